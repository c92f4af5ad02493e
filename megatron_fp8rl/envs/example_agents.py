"""Example agents, ``async def rollout(session, row) -> reward``: a calculator, a Python tool, a game."""

import asyncio
import math
import random
from typing import Any

from megatron_fp8rl.envs.agent_session import AgentSession, openai_client
from megatron_fp8rl.envs.environment import Problem
from megatron_fp8rl.envs.tools import calculate, python
from megatron_fp8rl.types import Prompt

_PILE = 7  # start of the game


class Products:
    """Products of two numbers with a calculator tool: the policy writes the expression, then the result. ``answer``
    demonstrates a session: call, end token, calculator output and answer. All products have four digits."""

    def make_problem(self, index: int) -> Problem:
        rng = random.Random(index)
        call = f"{rng.randint(32, 99)}*{rng.randint(32, 99)}"
        result = calculate(call)
        return Problem(question=f"{call}=", answer=f"{call}<eos>{result}{result}", metadata={"result": result})

    def score(self, prompt: Prompt, completion_text: str) -> float:
        return float(completion_text.strip() in (prompt.metadata["result"], prompt.answer))


async def with_calculator(session: AgentSession, row: dict[str, Any]) -> None:
    """Two turns: the calculator evaluates the first answer; the source's rewards score the second."""
    session.say(calculate(await session.ask()), role="tool")
    await session.ask()


async def calculator_by_url(session: AgentSession, row: dict[str, Any]) -> None:
    """The same through the ``openai`` client."""
    client = openai_client(session.base_url, session.api_key)
    messages = list(session.messages)
    for _ in range(2):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        text = answer.choices[0].message.content
        messages += [{"role": "assistant", "content": text}, {"role": "tool", "content": calculate(text)}]


async def with_python(session: AgentSession, row: dict[str, Any], *, num_programs: int = 3) -> None:
    """Run answers that begin with ```python in a sandbox; the first other answer is scored."""
    for _ in range(num_programs):
        answer = await session.ask()
        _, fence, program = answer.partition("```python\n")
        if not fence:
            return
        session.say(await python(program.partition("```")[0]), role="tool")
    await session.ask()


async def nim(session: AgentSession, row: dict[str, Any]) -> float:
    """Nim for two players: each takes 1 to 3 items in turn; the player who takes the last item wins. The session plays
    first. Its opponent is the same policy in an untrained side conversation. An illegal move loses."""
    pile, players = _PILE, (session, session.aside())
    for turn in range(2 * _PILE):
        player = players[turn % 2]
        player.say(f"{pile}:")
        move = (await player.ask(max_tokens=2)).strip()
        won_if_legal, allowed = 1.0 if turn % 2 == 0 else 0.0, [str(n) for n in range(1, min(3, pile) + 1)]
        if move not in allowed:
            return 1.0 - won_if_legal
        pile -= int(move)
        if not pile:
            return won_if_legal
    return 0.0


async def long_talk(
    session: AgentSession, row: dict[str, Any], *, num_turns: int = 8, fastest_s: float = 0.05, slowest_s: float = 2.0
) -> dict[str, float]:
    """Many turns with a slow tool between them, for measurements. The reward is arbitrary but varies."""
    rng = random.Random(session.name)
    for turn in range(num_turns):
        answer = await session.ask()
        if turn < num_turns - 1:
            await asyncio.sleep(rng.uniform(fastest_s, slowest_s))
            session.say(f"\ntool {turn + 1}: {rng.randrange(10**6)}\n", role="tool")
    return {"reward": float(len(answer) % 2)}


async def long_tail(
    session: AgentSession,
    row: dict[str, Any],
    *,
    median: int = 400,
    sigma: float = 1.0,
    limit: int = 4096,
    tool_s: float = 5.0,
) -> float:
    """One answer with a random length seeded by ``session.name``, for measurements. The reward is arbitrary but varies.

    Lengths are lognormal, at most ``limit`` tokens; 1 % are ``limit``. 10 % of sessions then wait ``tool_s`` seconds.
    """
    rng = random.Random(session.name)
    drawn = int(rng.lognormvariate(math.log(median), sigma)) + 1
    answer = await session.ask(max_tokens=limit if rng.random() < 0.01 else min(limit, drawn))
    if rng.random() < 0.1:
        await asyncio.sleep(tool_s)
    return float(len(answer) % 2)
