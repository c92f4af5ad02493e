"""An agent that uses a calculator once, and the configuration of a run that trains it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.envs.agent_session import AgentSession
from megatron_fp8rl.envs.tools import calculate
from model_configs.agents import tiny_calculator


async def rollout(session: AgentSession, row: dict[str, Any], *, call_reward: float = 0.1) -> dict[str, float]:
    """Calculate the policy's first answer, and compare its second answer with the product asked for.

    Returns:
        Rewards for the answer and for a call that the calculator understands.
    """
    result = calculate(await session.ask())
    session.say(result, role="tool")  # context, not trained
    answer = await session.ask()
    product = calculate(row["prompt"].removesuffix("="))
    return {"answer": float(answer.strip() == product), "call": call_reward * (not result.startswith("error"))}


def products() -> RunConfig:
    """The tiny mixture of experts multiplies two numbers with the agent of this file."""
    cfg = tiny_calculator()
    (source,) = cfg.data.environments
    source = replace(source, agent=f"{Path(__file__).resolve()}:rollout")
    return replace(cfg, name="agent_tools", data=replace(cfg.data, environments=(source,)))
