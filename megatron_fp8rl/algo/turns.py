"""The turns of a trajectory: their returns and advantages, and the turn of each loss token. Pure."""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_fp8rl.algo.load_function import AdvantageFn, FunctionError
from megatron_fp8rl.config import AlgoConfig
from megatron_fp8rl.types import Rollout


def advantages_of_turns(
    rollouts: Sequence[Rollout], rewards: Sequence[float], advantage_fn: AdvantageFn, cfg: AlgoConfig
) -> list[list[float]]:
    """The advantage of every completion of every rollout. Unit "trajectory": that of the rollout's reward. Unit "turn":
    the k-th completions of all rollouts in time are compared, by their returns."""
    if cfg.advantage_unit == "trajectory":
        by_rollout = _advantages(rewards, advantage_fn, cfg)
        return [[advantage] * len(r.completions) for r, advantage in zip(rollouts, by_rollout, strict=True)]
    returns = list(map(_returns, rollouts, rewards))
    advantages: list[list[float]] = [[] for _ in rollouts]
    for turn in range(max(map(len, returns), default=0)):
        present = [i for i, by_turn in enumerate(returns) if turn < len(by_turn)]
        values = _advantages([returns[i][turn] for i in present], advantage_fn, cfg)
        for i, advantage in zip(present, values, strict=True):
            advantages[i].append(advantage)
    return [
        [by_turn[turn] for turn in rollout.turn_order] if rollout.turn_order else by_turn
        for rollout, by_turn in zip(rollouts, advantages, strict=True)
    ]


def _returns(rollout: Rollout, reward: float) -> list[float]:
    """``reward`` minus the rewards of earlier turns, for each turn, in order of time."""
    rewards = rollout.turn_rewards or (0.0,) * len(rollout.completions)
    if len(rewards) != len(rollout.completions):
        raise ValueError(f"rollout {rollout.name}: {len(rewards)} rewards for {len(rollout.completions)} turns")
    if rollout.turn_order:
        rewards = [reward for _, reward in sorted(zip(rollout.turn_order, rewards, strict=True))]
    before = itertools.accumulate(rewards[:-1], initial=0.0)
    return [reward - past for past in before] if rewards else []


def is_varied(rollouts: Sequence[Rollout], rewards: Sequence[float], cfg: AlgoConfig) -> bool:
    """Whether some advantage is nonzero."""
    if cfg.advantage_unit == "trajectory":
        return _varies(rewards)
    by_turn = itertools.zip_longest(*map(_returns, rollouts, rewards))
    return any(_varies([value for value in values if value is not None]) for values in by_turn)


def turn_of_tokens(loss_mask_T: Tensor, sequence_ids_T: Tensor) -> Tensor:
    """int64 [T]: the turn of each loss token in its sequence, from 1. Context tokens separate turns."""
    before_T = torch.cat([loss_mask_T.new_zeros(1), loss_mask_T[:-1]])
    is_new_T = torch.cat([loss_mask_T.new_ones(1), sequence_ids_T[1:] != sequence_ids_T[:-1]])
    begun_T = (loss_mask_T & (~before_T | is_new_T)).long().cumsum(0)
    starts = is_new_T.nonzero().flatten()
    before_S = torch.cat([begun_T.new_zeros(1), begun_T])[starts]
    return begun_T - before_S[is_new_T.long().cumsum(0) - 1]


def _advantages(rewards: Sequence[float], advantage_fn: AdvantageFn, cfg: AlgoConfig) -> list[float]:
    advantages = advantage_fn(rewards)
    if len(advantages) != len(rewards) or not all(math.isfinite(advantage) for advantage in advantages):
        raise FunctionError(
            f"--algo.advantage = {cfg.advantage!r}: returned {advantages} for the rewards {rewards}. "
            "Return one finite number for each reward."
        )
    return [float(advantage) for advantage in advantages]


def _varies(rewards: Sequence[float]) -> bool:
    return len(rewards) > 1 and max(rewards) > min(rewards)
