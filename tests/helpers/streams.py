"""Engines, prompts and scorers in memory, which are told when to answer."""

import asyncio
import threading
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import replace

from megatron_fp8rl.envs.scoring import Score
from megatron_fp8rl.rollout.completions import Sampling
from megatron_fp8rl.rollout.stream import RolloutStream
from megatron_fp8rl.types import Completion, Prompt
from model_configs.tiny import tiny_qwen3_moe
from tests.helpers.fields import set_fields
from tests.helpers.samples import make_completion


class Numbers:
    position = 0

    def next_prompts(self, count: int) -> list[Prompt]:
        start, self.position = self.position, self.position + count
        return [
            Prompt(prompt_id=f"n/{i}", environment="n", token_ids=(i,), text=str(i), answer="")
            for i in range(start, start + count)
        ]


class Client:
    """Answers at once; records the versions at the start and the end of a request."""

    def __init__(self, version: int = 0):
        self.version = version
        self.num_running = 0
        self.prompts: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=4, stop_token_ids=(), stop_strings=())

    async def generate(self, prompt, n, seed, *, sampling=None) -> list[Completion]:
        self.num_running += n
        self.prompts.append(prompt[0])
        first = self.version
        try:
            await asyncio.sleep(0)
            await self.gate.wait()
        finally:
            self.num_running -= n
        return [
            make_completion((i,), min_version=first, max_version=self.version, text=f"{prompt[0]} {i}")
            for i in range(n)
        ]


class Fleet:
    wants_publication = False

    def __init__(self, num_clients: int = 1):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.clients = [Client() for _ in range(num_clients)]

    def submit(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def sync(self, coroutine, deadline_s):
        return self.submit(coroutine).result(deadline_s)

    def wait_for_any(self, submitted, timeout_s):
        wait(submitted, timeout_s, FIRST_COMPLETED)

    def call(self, function) -> None:
        async def run() -> None:
            function()

        self.sync(run(), 60.0)

    def turn(self) -> None:
        """Run the pending callbacks of the loop."""
        for _ in range(20):
            self.call(lambda: None)


class Scorer:
    """Rewards differ within a group unless the prompt is even and ``uniform`` is set."""

    def __init__(self, uniform: bool = False):
        self.uniform = uniform

    async def score(self, prompt, text):
        number, index = map(int, text.split())
        return Score(1.0 if self.uniform and number % 2 == 0 else float(index), "scored")


class Ranks:
    """Rank 0 appends its broadcasts to a list; rank 1 reads from it."""

    def __init__(self, rank: int, carried: list):
        self.rank, self.carried = rank, carried

    def broadcast_object(self, value):
        if self.rank == 0:
            self.carried.append(value)
            return value
        return self.carried.pop(0)


def numbers(groups) -> list[int]:
    return [group.prompt.token_ids[0] for group in groups]


def build(fleet, *, scorer=None, rollout=None, algo=None, ranks=None, num_steps=80):
    cfg = tiny_qwen3_moe()
    cfg = replace(cfg, num_steps=num_steps, algo=replace(cfg.algo, **(algo or {})))
    cfg = set_fields(cfg, **{"prompts_per_step": 2, "completions_per_prompt": 2} | (rollout or {}))
    return RolloutStream(cfg, fleet, Numbers(), scorer or Scorer(), ranks or Ranks(0, []))


def publish(fleet, stream, version: int) -> None:
    def set_version() -> None:
        for client in fleet.clients:
            client.version = version

    stream.before_update()
    fleet.call(set_version)
    stream.after_update(version)
