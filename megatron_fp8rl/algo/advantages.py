"""Scored groups in, training samples with group-relative advantages out. Pure; every rank computes the same samples.

    advantage = reward - mean                     Dr.GRPO, arXiv 2503.20783
    advantage = (reward - mean) / (std + 1e-6)    GRPO, arXiv 2402.03300

mean and std (the sample standard deviation) are those of the completions of one prompt. A completion whose scoring
failed, or that the engine aborted, has no reward: it counts neither in its group's statistics nor as a sample.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from megatron_fp8rl.config import AlgoConfig, RunConfig
from megatron_fp8rl.types import Rollout, RolloutGroup, Sample

_STD_EPS = 1e-6


class NonFiniteRewardError(ValueError):
    """An environment returned NaN or infinity as a reward."""


def to_samples(groups: Iterable[RolloutGroup], cfg: RunConfig, version: int) -> list[Sample]:
    """One sample per completion that is trained on, in the order of the groups.

    ``version`` is the trainer's at the start of the step; a sample's staleness counts from it. Groups without variance
    are left out unless ``cfg.algo.zero_variance`` is "keep". Every sample has at least one loss token.

    Raises:
        NonFiniteRewardError: names the rollout.
    """
    samples = []
    for group in groups:
        rollouts, rewards = shaped_rewards(group, cfg)
        if cfg.algo.zero_variance != "keep" and not _varies(rewards):
            continue
        advantages = group_advantages(rewards, divide_by_std=cfg.algo.advantage_std)
        for rollout, advantage in zip(rollouts, advantages, strict=True):
            if rollout.completion.token_ids:
                samples.append(_sample(rollout, advantage, version))
    return samples


def has_signal(group: RolloutGroup, cfg: RunConfig) -> bool:
    """Whether the group's rewards differ, so that at least one advantage is not 0; the test for drop and refill."""
    return _varies(shaped_rewards(group, cfg)[1])


def group_advantages(rewards: Sequence[float], *, divide_by_std: bool) -> list[float]:
    """Advantages of the completions of one prompt; all 0 for equal rewards, a single completion included."""
    if not _varies(rewards):
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    scale = statistics.stdev(rewards) + _STD_EPS if divide_by_std else 1.0
    return [(reward - mean) / scale for reward in rewards]


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
