"""The example agent that measurements use: its lengths are drawn by the session's name and have the tail it names."""

import asyncio
import statistics
from types import SimpleNamespace

from megatron_fp8rl.envs.example_agents import long_tail


def lengths(median: int, limit: int) -> list[int]:
    asked = []

    async def ask(max_tokens: int) -> str:
        asked.append(max_tokens)
        return "x" * max_tokens

    async def play() -> list[float]:
        sessions = [SimpleNamespace(name=f"p/{i}", ask=ask) for i in range(4000)]
        return [await long_tail(session, {}, median=median, limit=limit, tool_s=0.0) for session in sessions]

    rewards = asyncio.run(play())
    assert rewards == [float(length % 2) for length in asked]
    return asked


def test_long_tailed_lengths_are_the_same_for_the_same_sessions_and_end_at_the_limit():
    actual = lengths(median=400, limit=100_000)
    assert actual == lengths(median=400, limit=100_000)
    assert 380 < statistics.median(actual) < 425
    assert 0.006 < actual.count(100_000) / len(actual) < 0.015  # 1 %; what is drawn stays below
    below = [length for length in actual if length < 100_000]
    assert 600 < statistics.fmean(below) < 720  # 400 exp(1/2) = 659
    assert max(lengths(median=400, limit=1000)) == 1000
