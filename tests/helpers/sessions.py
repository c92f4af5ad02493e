"""Engines, prompts and configurations for sessions, in memory; the workers of agents are real processes."""

import asyncio
import textwrap
from dataclasses import replace
from pathlib import Path

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.data.conversation import ChatFormat
from megatron_fp8rl.data.tokenizer import character_tokenizer
from megatron_fp8rl.envs.scoring import Score
from megatron_fp8rl.rollout.agents.agent_pool import AgentPool
from megatron_fp8rl.rollout.agents.requests import Requests
from megatron_fp8rl.rollout.completions import Sampling
from megatron_fp8rl.rollout.errors import EngineDeadError
from megatron_fp8rl.types import Prompt, Rollout
from model_configs.tiny import tiny_qwen3_moe
from tests.helpers.samples import make_completion

AGENTS = str(Path(__file__).with_name("session_agents.py"))
TOKENIZER = character_tokenizer()
_IMPORTS = """import asyncio, ctypes, os, sys, threading, time
from openai import AsyncOpenAI, OpenAI
from megatron_fp8rl.envs.agent_session import AgentError, SessionLimit"""
CHAT = ChatFormat(TOKENIZER, False, {}, frozenset({TOKENIZER.eos_token_id}))


class Engine:
    """Answers each prompt by a function of its text, in the tokens of a chat format."""

    def __init__(self, answer, *, chat: ChatFormat = CHAT, name: str = "a") -> None:
        self.answer, self.chat, self.name = answer, chat, name
        self.num_running = 0
        self.prompts: list[tuple[int, ...]] = []
        self.seeds: list[int] = []
        self.dies_at = -1
        (self.end,) = chat.stop_ids
        fixed = dict(temperature=1.0, top_p=1.0, top_k=0, stop_strings=())
        self.sampling = Sampling(max_tokens=16, stop_token_ids=(self.end,), **fixed)

    async def generate(self, prompt, n, seed, *, sampling):
        self.prompts.append(tuple(prompt))
        self.seeds.append(seed)
        await asyncio.sleep(0.001)
        if len(self.prompts) == self.dies_at:
            raise EngineDeadError(f"replica {self.name} is dead")
        tokenizer = self.chat.tokenizer
        text = self.answer(tokenizer.decode(prompt, skip_special_tokens=not self.chat.uses_chat))
        if not self.chat.uses_chat:
            text = text[: sampling.max_tokens - 1]
        ids = (*tokenizer.encode(text, add_special_tokens=False), self.end)
        return [make_completion(ids, [-i / 64 for i in ids], min_version=3, max_version=3, text=text)]


class Fleet:
    def __init__(self, *engines: Engine) -> None:
        self.clients = tuple(engines)

    def remove(self, client, reason, *, num_retried=0) -> None:
        self.clients = tuple(item for item in self.clients if item is not client)


class Scorer:
    def __init__(self) -> None:
        self.texts: list[str] = []

    async def score(self, prompt, text):
        self.texts.append(text)
        return Score(0.75, "scored")


def config(agent: str, **session) -> RunConfig:
    cfg = tiny_qwen3_moe()
    (source,) = cfg.data.environments
    source = replace(source, agent=agent if ":" in agent else f"{AGENTS}:{agent}")
    fields = {"max_tokens": 128, "deadline_s": 30.0} | session
    return replace(cfg, data=replace(cfg.data, environments=(source,)), session=replace(cfg.session, **fields))


def prompt(index: int = 0, text: str = "2+3=", **row) -> Prompt:
    return Prompt(
        prompt_id=f"chain_sum/{index}",
        environment="chain_sum",
        token_ids=tuple(TOKENIZER.encode(text)),
        text=text,
        answer="5",
        metadata=row,
    )


def agent_file(folder: Path, body: str) -> str:
    """The name of an agent in a file of its own; ``body`` is that of ``rollout(session, row)``."""
    path = folder / "agent.py"
    path.write_text(
        f"{_IMPORTS}\n\nasync def rollout(session, row):\n{textwrap.indent(textwrap.dedent(body), ' ' * 4)}\n"
    )
    return f"{path}:rollout"


def play(cfg: RunConfig, *prompts: Prompt, engines=None, chat: ChatFormat = CHAT, scorer=None) -> list[Rollout]:
    engines = engines or [Engine(lambda text: "2+3" if text.endswith("=") else "5")]

    async def run() -> list[Rollout]:
        pool = AgentPool(cfg, Requests(Fleet(*engines)), scorer or Scorer(), chat)
        try:
            return await asyncio.gather(*(pool.run_session(one, i, 1000 * i) for i, one in enumerate(prompts)))
        finally:
            await pool.close()
            assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    return asyncio.run(run())
