"""Scored groups in, training samples out. Pure; every rank computes the same samples.

A completion gets the advantage that the function of ``algo.advantage`` gives its reward among those of its prompt
(algo/advantages.py). A completion whose scoring failed, or that the engine aborted, has no reward: it counts neither in
its group's advantages nor as a sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from megatron_fp8rl.algo.named import AdvantageFn, NamedFunctionError
from megatron_fp8rl.config import AlgoConfig, RunConfig
from megatron_fp8rl.types import Rollout, RolloutGroup, Sample


class NonFiniteRewardError(ValueError):
    """An environment returned NaN or infinity as a reward."""


def to_samples(
    groups: Iterable[RolloutGroup], advantage_fn: AdvantageFn, cfg: RunConfig, version: int
) -> list[Sample]:
    """One sample per completion that is trained on, in the order of the groups.

    ``version`` is the trainer's at the start of the step; a sample's staleness counts from it. Groups without variance
    are left out unless ``cfg.algo.zero_variance`` is "keep". Every sample has at least one loss token.

    Raises:
        NonFiniteRewardError: names the rollout.
        NamedFunctionError: ``advantage_fn`` returned something else than one finite number for each reward.
    """
    samples = []
    for group in groups:
        rollouts, rewards = shaped_rewards(group, cfg)
        if cfg.algo.zero_variance != "keep" and not _varies(rewards):
            continue
        advantages = _advantages(rewards, advantage_fn, cfg.algo)
        for rollout, advantage in zip(rollouts, advantages, strict=True):
            if rollout.completion.token_ids:
                samples.append(_sample(rollout, advantage, version))
    return samples


def has_signal(group: RolloutGroup, cfg: RunConfig) -> bool:
    """Whether the group's rewards differ, so that at least one advantage is not 0; the test for drop and refill."""
    return _varies(shaped_rewards(group, cfg)[1])


def shaped_rewards(group: RolloutGroup, cfg: RunConfig) -> tuple[list[Rollout], list[float]]:
    """The rollouts of a group that count, and their rewards after the overlong rule.

    keep: a completion that was cut at the limit counts with the reward it got. mask: it counts as never sampled (the
    reward of an unfinished answer says nothing). penalty: every completion's reward falls by
    :func:`overlong_penalty` of its length.
    """
    rollouts = [r for r in group.rollouts if r.status != "score_failed" and r.completion.finish_reason != "abort"]
    for rollout in rollouts:
        if not math.isfinite(rollout.reward):
            raise NonFiniteRewardError(
                f"rollout {rollout.name}: environment {rollout.prompt.environment} scored {rollout.reward}; a reward "
                "must be a finite number"
            )
    if cfg.algo.overlong == "mask":
        rollouts = [r for r in rollouts if r.completion.finish_reason != "length"]
    rewards = [r.reward for r in rollouts]
    if cfg.algo.overlong == "penalty":
        limit = cfg.rollout.max_completion_tokens
        rewards = [r.reward - overlong_penalty(_length(r), limit, cfg.algo) for r in rollouts]
    return rollouts, rewards


def overlong_penalty(num_tokens: int, max_completion_tokens: int, cfg: AlgoConfig) -> float:
    """Soft overlong punishment, 0 to 1: rises linearly over the last ``overlong_buffer_tokens`` before the limit.

    DAPO, arXiv 2503.14476 eq. 13, with the sign of a penalty. Without a buffer only reaching the limit costs.
    """
    excess = num_tokens - (max_completion_tokens - cfg.overlong_buffer_tokens)
    if cfg.overlong_buffer_tokens == 0:
        return float(excess >= 0)
    return min(max(excess / cfg.overlong_buffer_tokens, 0.0), 1.0)


def _advantages(rewards: Sequence[float], advantage_fn: AdvantageFn, cfg: AlgoConfig) -> list[float]:
    advantages = advantage_fn(rewards)
    if len(advantages) != len(rewards) or not all(math.isfinite(advantage) for advantage in advantages):
        raise NamedFunctionError(
            f"--algo.advantage = {cfg.advantage!r}: returned {advantages} for the rewards {rewards}. "
            "Return one finite number for each reward."
        )
    return [float(advantage) for advantage in advantages]


def _length(rollout: Rollout) -> int:
    return len(rollout.completion.token_ids)


def _varies(rewards: Sequence[float]) -> bool:
    return len(rewards) > 1 and max(rewards) > min(rewards)


def _sample(rollout: Rollout, advantage: float, version: int) -> Sample:
    prompt, completion = rollout.prompt.token_ids, rollout.completion
    num_prompt, num_completion = len(prompt), len(completion.token_ids)
    if len(completion.rollout_logprobs) != num_completion:
        raise ValueError(
            f"rollout {rollout.name}: {len(completion.rollout_logprobs)} log-probabilities for {num_completion} tokens"
        )
    return Sample(
        name=rollout.name,
        environment=rollout.prompt.environment,
        token_ids=(*prompt, *completion.token_ids),
        num_prompt_tokens=num_prompt,
        loss_mask=(False,) * num_prompt + (True,) * num_completion,
        rollout_logprobs=(0.0,) * num_prompt + tuple(completion.rollout_logprobs),
        advantages=(0.0,) * num_prompt + (advantage,) * num_completion,
        staleness=version - completion.min_version,
        routed_experts=completion.routed_experts,
    )
