"""Converts scored groups to training samples. Pure; every rank computes the same samples.

Each completion's advantage is computed from the rewards of its group by the ``algo.advantage`` function
(algo/advantages.py). Completions whose scoring failed or that the engine aborted have no reward: they are excluded from
their group's advantages and from the samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from megatron_fp8rl.algo.named import AdvantageFn, NamedFunctionError
from megatron_fp8rl.config import AlgoConfig, ModelConfig, RunConfig
from megatron_fp8rl.types import Rollout, RolloutGroup, Sample

# A record of this many tokens cannot be all zeros, even if a token has one expert only.
_TOKEN_RICH = 16


class RoutedExpertsError(ValueError):
    """The engine's record of a sequence's experts is missing, or cannot be one of this model."""


class NonFiniteRewardError(ValueError):
    """An environment returned NaN or infinity as a reward."""


def to_samples(groups: Iterable[RolloutGroup], advantage_fn: AdvantageFn, cfg: RunConfig, version: int) -> list[Sample]:
    """One sample per completion to train on, in the order of the groups.

    ``version`` is the trainer's version at the start of the step; staleness is relative to it. Groups without variance
    are dropped unless ``cfg.algo.zero_variance`` is "keep". Every sample has at least one loss token.

    Raises:
        NonFiniteRewardError: names the rollout.
        RoutedExpertsError: names the rollout whose experts ``algo.router_replay`` = "rollout" cannot replay.
        NamedFunctionError: ``advantage_fn`` did not return one finite number per reward.
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
    """Whether the group's rewards differ, so that some advantage is nonzero; the criterion of drop and refill."""
    return _varies(shaped_rewards(group, cfg)[1])


def shaped_rewards(group: RolloutGroup, cfg: RunConfig) -> tuple[list[Rollout], list[float]]:
    """The rollouts of a group that count, and their rewards after the overlong rule.

    keep: a completion truncated at the limit keeps its reward. mask: it is ignored, because the reward of an unfinished
    answer is meaningless. penalty: :func:`overlong_penalty` of its length is subtracted from each completion's reward.
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

    DAPO, arXiv 2503.14476 eq. 13, with positive sign. Without a buffer, only completions at the limit are penalized.
    """
    excess = num_tokens - (max_completion_tokens - cfg.overlong_buffer_tokens)
    if cfg.overlong_buffer_tokens == 0:
        return float(excess >= 0)
    return min(max(excess / cfg.overlong_buffer_tokens, 0.0), 1.0)


def require_experts(groups: Sequence[RolloutGroup], cfg: RunConfig) -> None:
    """Raise RoutedExpertsError, with the rollout's name, unless every completion has experts that can be replayed."""
    for group in groups:
        for rollout in group.rollouts:
            if rollout.completion.token_ids:
                _require_experts(rollout, cfg.model)


def _require_experts(rollout: Rollout, model: ModelConfig) -> None:
    """Raise RoutedExpertsError unless the completion has the ids of this model's experts, [L - 1, layers, top_k]."""
    experts = rollout.completion.routed_experts
    num_tokens = len(rollout.prompt.token_ids) + _length(rollout) - 1
    wanted = (num_tokens, model.num_layers, model.experts_per_token)
    problem = None
    if experts is None:
        problem = "has no routed experts. Set --rollout.record_routed_experts True where it is sampled"
    elif experts.shape != wanted:
        problem = f"has routed experts of shape {experts.shape}, expected {wanted}. Sample it with this model"
    elif experts.size and int(experts.max()) >= model.num_experts:
        problem = f"was routed to expert {experts.max()} of {model.num_experts}. Sample it with this model"
    elif num_tokens >= _TOKEN_RICH and not experts.any():
        problem = (
            f"was routed to expert 0 in every layer for all of its {num_tokens} tokens: the engine did not record. "
            "Look for 'routed_experts' in the engine's log, and at the version of vLLM"
        )
    if problem is not None:
        raise RoutedExpertsError(f"rollout {rollout.name} {problem}, or set --algo.router_replay old or off")


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
