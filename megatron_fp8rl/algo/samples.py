"""Converts scored groups to training samples. Pure; every rank computes the same samples.

The advantage of a rollout, or of each of its turns, is computed from the rewards of its group by the ``algo.advantage``
function (algo/advantages.py). Rollouts whose scoring failed or that the engine aborted have no reward: they are excluded
from their group's advantages and from the samples. A rollout in several branches gives a sample for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from megatron_fp8rl.algo.named import AdvantageFn
from megatron_fp8rl.algo.turns import advantages_of_turns, is_varied
from megatron_fp8rl.config import AlgoConfig, ModelConfig, RunConfig
from megatron_fp8rl.token_rows import Row
from megatron_fp8rl.types import Completion, Given, Rollout, RolloutGroup, Sample, Trajectory

# A record of this many tokens cannot be all zeros, even if a token has one expert only.
_TOKEN_RICH = 16


class RoutedExpertsError(ValueError):
    """The engine's record of a sequence's experts is missing, or cannot be one of this model."""


class NonFiniteRewardError(ValueError):
    """An environment returned NaN or infinity as a reward."""


def to_samples(groups: Iterable[RolloutGroup], advantage_fn: AdvantageFn, cfg: RunConfig, version: int) -> list[Sample]:
    """One sample per trajectory to train on, in the order of the groups.

    ``version`` is the trainer's version at the start of the step; staleness is relative to it. Groups without variance
    are dropped unless ``cfg.algo.zero_variance`` is "keep". Every sample has at least one loss token.

    Raises:
        NonFiniteRewardError: names the rollout.
        RoutedExpertsError: names the rollout whose experts ``algo.router_replay`` = "rollout" cannot replay.
        NamedFunctionError: ``advantage_fn`` did not return one finite number per reward.
    """
    samples = []
    # Answers that go on over publications may hold tokens of versions that are too old to be trained.
    oldest = version - cfg.rollout.max_staleness if cfg.rollout.window_groups else None
    for group in groups:
        rollouts, rewards = shaped_rewards(group, cfg)
        if cfg.algo.zero_variance != "keep" and not is_varied(rollouts, rewards, cfg.algo):
            continue
        by_rollout = advantages_of_turns(rollouts, rewards, advantage_fn, cfg.algo)
        for rollout, of_turns in zip(rollouts, by_rollout, strict=True):
            turns = iter(of_turns)
            for number, branch in enumerate(rollout.branches):
                own = [next(turns) for _ in branch.completions]
                sample = _sample(rollout, number, branch, own, version, oldest)
                if sample is not None:
                    samples.append(sample)
    return samples


def has_signal(group: RolloutGroup, cfg: RunConfig) -> bool:
    """Whether the group's rewards differ, so that some advantage is nonzero; the criterion of drop and refill."""
    return is_varied(*shaped_rewards(group, cfg), cfg.algo)


def shaped_rewards(group: RolloutGroup, cfg: RunConfig) -> tuple[list[Rollout], list[float]]:
    """The rollouts of a group that count, and their rewards after the overlong rule.

    keep: a rollout truncated at a limit keeps its reward. mask: it is ignored, because the reward of an unfinished
    answer is meaningless. penalty: :func:`overlong_penalty` of its longest completion is subtracted from its reward.
    """
    rollouts = [r for r in group.rollouts if r.status != "score_failed" and r.finish_reason != "abort"]
    for rollout in rollouts:
        if not math.isfinite(rollout.reward):
            raise NonFiniteRewardError(
                f"rollout {rollout.name}: environment {rollout.prompt.environment} scored {rollout.reward}; a reward "
                "must be a finite number"
            )
    if cfg.algo.overlong == "mask":
        rollouts = [r for r in rollouts if r.finish_reason != "length" and r.status != "truncated"]
    rewards = [r.reward for r in rollouts]
    if cfg.algo.overlong == "penalty":
        limit = cfg.rollout.max_completion_tokens
        rewards = [r.reward - overlong_penalty(_longest(r), limit, cfg.algo) for r in rollouts]
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
            for branch in rollout.branches:
                num_before = 0
                for end, completion in _ends(branch):
                    if completion.token_ids:
                        _require_experts(rollout, completion, end - 1 - num_before, cfg.model)
                        num_before = end - 1


def without_experts(groups: tuple[RolloutGroup, ...] | None) -> tuple[RolloutGroup, ...] | None:
    """The groups without the experts of their completions."""
    if groups is None or not any(
        c.routed_experts is not None for g in groups for r in g.rollouts for c in r.completions
    ):
        return groups

    def bare_segment(segment: Given | Completion) -> Given | Completion:
        return replace(segment, routed_experts=None) if isinstance(segment, Completion) else segment

    def bare(rollout: Rollout) -> Rollout:
        branches = (Trajectory(segments=tuple(map(bare_segment, branch.segments))) for branch in rollout.branches)
        return replace(rollout, branches=tuple(branches))

    return tuple(replace(group, rollouts=tuple(map(bare, group.rollouts))) for group in groups)


def _ends(branch: Trajectory) -> Iterator[tuple[int, Completion]]:
    """(tokens of the trajectory up to its end, completion) of every completion."""
    end = 0
    for segment in branch.segments:
        end += len(segment.token_ids)
        if isinstance(segment, Completion):
            yield end, segment


def _require_experts(rollout: Rollout, completion: Completion, num_tokens: int, model: ModelConfig) -> None:
    """Raise RoutedExpertsError unless the completion has the ids of this model's experts, [tokens, layers, top_k]."""
    experts = completion.routed_experts
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


def _longest(rollout: Rollout) -> int:
    return max((len(completion.token_ids) for completion in rollout.completions), default=0)


def _sample(
    rollout: Rollout,
    number: int,
    branch: Trajectory,
    advantages: Sequence[float],
    version: int,
    oldest: int | None,
) -> Sample | None:
    """The sample of one branch, without what was given after its last sampled token; None if nothing of it is trained.

    Tokens of versions before ``oldest`` are not trained.
    """
    mask: list[np.ndarray] = []
    rollout_logprobs: list[Sequence[float]] = []
    of_tokens: list[np.ndarray] = []
    num_prompt = num_used = num_tokens = 0
    versions: list[int] = []
    of_completion = iter(advantages)
    for segment in branch.segments:
        num = len(segment.token_ids)
        num_tokens += num
        if not isinstance(segment, Completion):
            mask.append(np.zeros(num, np.bool_))
            rollout_logprobs.append(np.zeros(num, np.float32))
            of_tokens.append(np.zeros(num))
            continue
        if len(segment.rollout_logprobs) != num:
            raise ValueError(
                f"rollout {rollout.name}: {len(segment.rollout_logprobs)} log-probabilities for {num} tokens"
            )
        if num and not num_used:
            num_prompt = num_tokens - num
        is_fresh = np.ones(num, np.bool_) if oldest is None else versions_of(segment) >= oldest
        mask.append(is_fresh)
        rollout_logprobs.append(segment.rollout_logprobs)
        of_tokens.append(next(of_completion) * is_fresh)
        num_used = num_tokens if num else num_used
        if is_fresh.any():
            versions.append(segment.min_version if oldest is None else max(segment.min_version, oldest))
    if not versions:
        return None
    sampled = [completion for completion in branch.completions if completion.token_ids]
    recorded = [completion.routed_experts for completion in sampled]
    experts = None
    if all(one is not None for one in recorded):
        experts = recorded[0] if len(recorded) == 1 else np.concatenate(recorded)
    return Sample(
        name=rollout.name + (f"/{number}" if len(rollout.branches) > 1 else ""),
        environment=rollout.prompt.environment,
        token_ids=branch.token_ids[:num_used],
        num_prompt_tokens=num_prompt,
        loss_mask=Row(np.concatenate(mask)[:num_used]),
        rollout_logprobs=Row.of_floats(np.concatenate(rollout_logprobs)[:num_used]),
        advantages=Row.of_floats(np.concatenate(of_tokens)[:num_used]),
        staleness=version - min(versions),
        routed_experts=experts,
    )


def versions_of(completion: Completion) -> np.ndarray:
    """The policy version that sampled each token, int64 [C]."""
    found = np.full(len(completion.token_ids), completion.min_version)
    for first, version in completion.version_spans:
        found[first:] = version
    return found
