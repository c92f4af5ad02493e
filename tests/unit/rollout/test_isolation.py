"""One session breaks something; the others of its worker do not notice. The workers are real processes."""

import asyncio
import json
import os
import re
from pathlib import Path

import pytest

from megatron_fp8rl.envs.libraries import verifiers
from megatron_fp8rl.observe.recording import RolloutWriter, read_steps
from megatron_fp8rl.rollout.agents import agent_process
from megatron_fp8rl.types import RolloutGroup
from tests.helpers.sessions import Engine, config, play, prompt

AGENT = f"{Path(__file__).parents[2] / 'helpers' / 'bad_agents.py'}:rollout"
SCORED = "scored"
# What the record of the session says, or "scored".
IN_ONE_SESSION = {
    "sys exit": "the agent raised SystemExit",
    "sys exit in a task": "raised SystemExit: from a task",
    "sys exit in a task that nobody awaits": "a task of the agent raised SystemExit: from a task",
    "sys exit in a callback": "a task of the agent raised SystemExit: from a callback",
    "sys exit in a thread": "the agent raised SystemExit: from a thread",
    "interrupt": "the agent raised KeyboardInterrupt",
    "recursion": "the agent raised RecursionError: maximum recursion depth exceeded",
    "strange error": "the agent raised StrangeError: its text cannot be read (ValueError)",
    "surrogates": "the agent raised UnclearError: ? a lone surrogate\nand a second line",
    "generator exit": "the agent raised GeneratorExit",
    "cancels itself": "the agent raised CancelledError",
    "stops the loop": "an agent called stop() of the event loop, which other sessions use too (bad_agents.py, line",
    "closes the loop": "the agent raised RuntimeError: Cannot close a running event loop",
    "runs a loop": "the agent raised RuntimeError: asyncio.run() cannot be called from a running event loop",
    "shuts threads down": "an agent called shutdown_default_executor() of the event loop",
    "reads input": "the agent raised EOFError",
    "starts a program that reads input": SCORED,
    "asks on another loop": "the session was used on another event loop",
    "changes the folder": SCORED,
    "closes output": SCORED,
    "forks": SCORED,
    "replaces the threads": "an agent called set_default_executor() of the event loop",
    "an infinite reward": "session.reward(inf): a reward is a finite number",
    "puts its key into the environment": "puts its API key into the environment variable OPENAI_API_KEY, which all",
    "a set": "returned {1, 2}, which is not a number",
    "a generator": "which is not a number",
    "a coroutine": "which is not a number",
    "not json": "the agent raised TypeError: Object of type set is not JSON serializable",
    "no number of tokens": "the agent raised AgentError: max_tokens",
    "a lone surrogate": "the agent raised AgentError",
    "a huge message": "a request of 41943",
    "an unknown message": "messages[2] = 5",
    "leaves a task": SCORED,
    "a task raises": SCORED,
}
OF_THE_PROCESS = {
    "os exit": "the agent's process ended with exit code 0",
    "os exit in a task": "the agent's process ended with exit code 3",
    "crash": "the agent's process ended with exit code -11 (bad_agents.py, line",
    "crash in a thread": "the agent's process ended with exit code -11",  # in code of a library
    "crash in a thread of its own": "the agent's process ended with exit code -11",
    "kills itself": "the agent's process ended with exit code -9",
    "cancels all tasks": "the code of a session cancelled it",
}


def row(index: int, **fields):
    return prompt(index, folder=os.getcwd(), **fields)


def lost_lines(caplog) -> list[str]:
    return [line for line in caplog.messages if re.search(r"session \S+ is lost: ", line)]


def test_an_error_of_a_session_stays_in_it(monkeypatch, caplog, tmp_path):
    """Every kind of error at once, among 16 sessions that work, in one process that no error ends."""
    started = []
    start = agent_process.AgentProcess.__init__
    monkeypatch.setattr(
        agent_process.AgentProcess, "__init__", lambda self, *args: (started.append(self), start(self, *args))[1]
    )
    kinds = [kind for pair in zip(IN_ONE_SESSION, [None] * len(IN_ONE_SESSION), strict=True) for kind in pair]
    prompts = [row(i, **({} if kind is None else {"kind": kind})) for i, kind in enumerate(kinds)]
    rollouts = play(config(AGENT), *prompts, engines=[Engine(lambda text: "5")])
    assert len(started) == 1, "no session has cost its worker"
    for kind, one in zip(kinds, rollouts, strict=True):
        detail = IN_ONE_SESSION.get(kind, SCORED)
        if detail == SCORED:
            assert (one.status, one.detail, one.reward) == ("scored", "", 1.0), (kind, one.detail)
        elif kind == "a huge message":
            assert one.status == "truncated" and detail in one.detail, (kind, one.detail)
        else:
            assert one.status == "score_failed" and detail in one.detail, (kind, one.status, one.detail)
        assert len(one.completions) == (2 if kind is None else 1), kind
    # Each lost session is named once, in one line.
    lost = [one for one in rollouts if one.status == "score_failed"]
    lines = lost_lines(caplog)
    assert [sum(f"session {one.name} is lost" in line for line in lines) for one in lost] == [1] * len(lost)
    assert len(lines) == len(lost) and all("\n" not in line and len(line) < 500 for line in lines)
    # The records have the reasons, whatever they contain.
    writer = RolloutWriter(tmp_path)
    writer.write(1, [RolloutGroup(prompt=one.prompt, rollouts=(one,)) for one in rollouts])
    writer.close()
    ((_, groups),) = read_steps(tmp_path)
    assert [group.rollouts[0].detail for group in groups] == [one.detail for one in rollouts]


@pytest.mark.slow
@pytest.mark.parametrize("kind", OF_THE_PROCESS)
def test_the_end_of_a_process_costs_the_session_that_caused_it(kind, caplog):
    prompts = [row(i, **({"kind": kind} if i == 5 else {})) for i in range(16)]
    rollouts = play(config(AGENT), *prompts, engines=[Engine(lambda text: "5")])
    assert [one.status for i, one in enumerate(rollouts) if i != 5] == ["scored"] * 15
    assert rollouts[5].status == "score_failed" and OF_THE_PROCESS[kind] in rollouts[5].detail, rollouts[5].detail
    assert not any("Traceback" in line for line in caplog.messages)
    assert len(lost_lines(caplog)) == 1


@pytest.mark.slow
def test_several_sessions_that_crash_cost_the_others_nothing():
    """Five of sixteen end their process, one after another: no innocent session is blamed or runs out of tries."""
    prompts = [
        row(i, **({"kind": ["crash", "os exit", "crash in a thread"][i % 3]} if i < 5 else {})) for i in range(16)
    ]
    rollouts = play(config(AGENT), *prompts, engines=[Engine(lambda text: "5")])
    assert [one.status for one in rollouts] == ["score_failed"] * 5 + ["scored"] * 11, [one.detail for one in rollouts]


def test_an_unexpected_error_of_the_program_fails_the_session(caplog):
    class Broken(Engine):
        async def generate(self, prompt, n, seed, *, sampling):
            if "7" in self.chat.tokenizer.decode(prompt):
                raise ZeroDivisionError("a bug")
            return await super().generate(prompt, n, seed, sampling=sampling)

    prompts = [row(0), prompt(1, "7+1=", folder=os.getcwd()), row(2)]
    works, lost, other = play(config(AGENT), *prompts, engines=[Broken(lambda text: "5")])
    assert (works.status, other.status) == ("scored", "scored")
    assert lost.status == "score_failed" and "ZeroDivisionError: a bug" in lost.detail
    assert json.dumps(lost.detail)


def test_a_session_that_ends_while_an_environment_starts_does_not_end_the_start(monkeypatch):
    """The first session is cancelled, others wait for the same environment; a start that fails is tried again."""
    num_starts = []

    async def start(*_):
        num_starts.append(1)
        await asyncio.sleep(0.1)
        if len(num_starts) == 1:
            raise OSError("no port is free")
        return "environment"

    monkeypatch.setattr(verifiers, "_start", start)
    monkeypatch.setattr(verifiers, "_serving", {})

    async def run() -> None:
        with pytest.raises(OSError, match="no port is free"):
            await verifiers._environment("tasks", "", "", "")
        first, *others = (asyncio.ensure_future(verifiers._environment("tasks", "", "", "")) for _ in range(3))
        await asyncio.sleep(0.05)
        first.cancel()
        assert await asyncio.gather(*others) == ["environment"] * 2 and first.cancelled()

    asyncio.run(run())
    assert len(num_starts) == 2
