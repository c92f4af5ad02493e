"""Converts scored groups to training samples. Pure; runs on trainer rank 0.

Rollouts whose scoring failed, or that the engine aborted, are excluded. A rollout in several branches gives a sample
for each. Samples refer to the arrays of their completions; data/packing.py copies them.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from megatron_fp8rl.algo.load_function import AdvantageFn
from megatron_fp8rl.algo.turns import advantages_of_turns, is_varied
from megatron_fp8rl.config import AlgoConfig, ModelConfig, SamplingConfig
from megatron_fp8rl.token_array import TokenArray
from megatron_fp8rl.types import Completion, Rollout, RolloutGroup, Sample, Segment, Trajectory

# A record of this many tokens cannot be all zeros, even if a token has one expert only.
_TOKEN_RICH = 16


class RoutedExpertsError(ValueError):
    """The engine's record of a sequence's experts is missing, or cannot be one of this model."""


class KeptEntriesError(ValueError):
    """A completion's record of kept vocabulary entries is missing, or does not fit its tokens."""


class NonFiniteRewardError(ValueError):
    """An environment returned NaN or infinity as a reward."""


def to_samples(
    groups: Iterable[RolloutGroup], advantage_fn: AdvantageFn, algo: AlgoConfig, sampling: SamplingConfig, version: int
) -> list[Sample]:
    """One sample per trajectory to train on, with at least one loss token, in the order of the groups.

    ``version`` is the trainer's version at the start of the step. Groups without variance are dropped unless
    ``algo.zero_variance`` is "keep". Raises NonFiniteRewardError with the rollout's name, and FunctionError if
    ``advantage_fn`` did not return one finite number per reward.
    """
    samples = []
    # Completions that continue after publications may have tokens of versions that are too old to train.
    oldest = version - sampling.max_staleness if sampling.window_groups else None
    for group in groups:
        rollouts, rewards = shaped_rewards(group, algo, sampling)
        if algo.zero_variance != "keep" and not is_varied(rollouts, rewards, algo):
            continue
        by_rollout = advantages_of_turns(rollouts, rewards, advantage_fn, algo)
        prompt_ids = TokenArray.from_ids(group.prompt.token_ids)
        for rollout, advantages in zip(rollouts, by_rollout, strict=True):
            turns = iter(advantages)
            for number, branch in enumerate(rollout.branches):
                samples.append(_sample(rollout, number, branch, turns, version, oldest, prompt_ids))
    return [sample for sample in samples if sample is not None]


def has_signal(group: RolloutGroup, algo: AlgoConfig, sampling: SamplingConfig) -> bool:
    """Whether the group's rewards differ, so that some advantage is nonzero."""
    return is_varied(*shaped_rewards(group, algo, sampling), algo)


def shaped_rewards(
    group: RolloutGroup, algo: AlgoConfig, sampling: SamplingConfig
) -> tuple[list[Rollout], list[float]]:
    """The valid rollouts of a group, and their rewards after the overlong rule. Truncated rollouts keep their reward
    (keep), are excluded (mask), or lose :func:`overlong_penalty` of the longest completion (penalty)."""
    rollouts = [r for r in group.rollouts if r.status != "score_failed" and r.finish_reason != "abort"]
    for rollout in rollouts:
        if not math.isfinite(rollout.reward):
            raise NonFiniteRewardError(
                f"rollout {rollout.name}: environment {rollout.prompt.environment} scored {rollout.reward}; a reward "
                "must be a finite number"
            )
    if algo.overlong == "mask":
        rollouts = [r for r in rollouts if r.finish_reason != "length" and r.status != "truncated"]
    rewards = [r.reward for r in rollouts]
    if algo.overlong == "penalty":
        limit = sampling.max_completion_tokens
        longest = [max((len(c.token_ids) for c in r.completions), default=0) for r in rollouts]
        penalties = [overlong_penalty(length, limit, algo) for length in longest]
        rewards = [reward - penalty for reward, penalty in zip(rewards, penalties, strict=True)]
    return rollouts, rewards


def overlong_penalty(num_tokens: int, max_completion_tokens: int, cfg: AlgoConfig) -> float:
    """Soft overlong punishment, 0 to 1: rises linearly over the last ``overlong_buffer_tokens`` before the limit. DAPO,
    arXiv 2503.14476 eq. 13, with positive sign. Without a buffer, only completions at the limit are penalized."""
    excess = num_tokens - (max_completion_tokens - cfg.overlong_buffer_tokens)
    if cfg.overlong_buffer_tokens == 0:
        return float(excess >= 0)
    return min(max(excess / cfg.overlong_buffer_tokens, 0.0), 1.0)


def require_experts(groups: Sequence[RolloutGroup], model: ModelConfig) -> None:
    """Raise RoutedExpertsError, with the rollout's name, unless the experts of every completion can be replayed."""
    for group in groups:
        for rollout in group.rollouts:
            for branch in rollout.branches:
                num_before = 0
                for end, completion in _ends(branch):
                    if completion.token_ids:
                        _require_experts(rollout, completion, end - 1 - num_before, model)
                        num_before = end - 1


def require_kept(groups: Sequence[RolloutGroup], sampling: SamplingConfig, model: ModelConfig) -> None:
    """Raise KeptEntriesError, with the rollout's name, unless each token was sampled from its kept entries."""
    for group in groups:
        for rollout in group.rollouts:
            for completion in rollout.completions:
                if completion.token_ids and (completion.kept is not None or sampling.truncates):
                    _require_kept(rollout, completion, model)


def _require_kept(rollout: Rollout, completion: Completion, model: ModelConfig) -> None:
    kept, num_tokens = completion.kept, len(completion.token_ids)
    problem = None
    if kept is None:
        problem = "has no kept entries, which sampling.top_p, top_k or min_p need. Sample it with these settings"
    elif (len(kept), kept.vocab_size) != (num_tokens, model.vocab_size):
        problem = (
            f"has kept entries of {len(kept)} tokens in a vocabulary of {kept.vocab_size}, expected {num_tokens} and "
            f"{model.vocab_size}. Sample it with this model"
        )
    elif not (are_kept := kept.contain(completion.token_ids.array)).all():
        position = int(are_kept.argmin())
        problem = (
            f"sampled token {completion.token_ids[position]} at position {position} of a completion, which is not one "
            f"of its kept entries ({int(kept.counts()[position])}): the record belongs to another token. Check the "
            "version of vLLM"
        )
    if problem is not None:
        raise KeptEntriesError(f"rollout {rollout.name} {problem}, or set --sampling.top_p 1, top_k 0 and min_p 0")


def _ends(branch: Trajectory) -> Iterator[tuple[int, Completion]]:
    """(end position in the trajectory, completion) of every completion."""
    end = 0
    for segment in branch.segments:
        end += len(segment.token_ids)
        if isinstance(segment, Completion):
            yield end, segment


def _require_experts(rollout: Rollout, completion: Completion, num_tokens: int, model: ModelConfig) -> None:
    """Raise RoutedExpertsError unless the completion has the ids of this model's experts, [tokens, layers, top_k]."""
    experts = completion.routed_experts
    expected = (num_tokens, model.num_layers, model.experts_per_token)
    problem = None
    if experts is None:
        problem = "has no routed experts. Set --engine.record_routed_experts True where it is sampled"
    elif experts.shape != expected:
        problem = f"has routed experts of shape {experts.shape}, expected {expected}. Sample it with this model"
    elif experts.size and int(experts.max()) >= model.num_experts:
        problem = f"was routed to expert {experts.max()} of {model.num_experts}. Sample it with this model"
    elif num_tokens >= _TOKEN_RICH and not experts.any():
        problem = (
            f"was routed to expert 0 in every layer for all of its {num_tokens} tokens: the engine did not record. "
            "Look for 'routed_experts' in the engine's log, and at the version of vLLM"
        )
    if problem is not None:
        raise RoutedExpertsError(f"rollout {rollout.name} {problem}, or set --algo.router_replay old or off")


def _sample(
    rollout: Rollout,
    number: int,
    branch: Trajectory,
    advantages: Iterator[float],
    version: int,
    oldest: int | None,
    prompt_ids: TokenArray,
) -> Sample | None:
    """The sample of a branch up to its last sampled token; None if no token is trained.

    ``advantages`` starts with those of the branch's completions. Tokens of versions before ``oldest`` are not trained.
    All samples of a prompt share ``prompt_ids``.
    """
    segments: list[Segment] = []
    recorded: list[np.ndarray | None] = []
    versions: list[int] = []
    last = max((i for i, x in enumerate(branch.segments) if isinstance(x, Completion) and len(x.token_ids)), default=-1)
    turns = iter([next(advantages) for _ in branch.completions])
    for segment in branch.segments[: last + 1]:
        if not isinstance(segment, Completion):
            is_prompt = segment.token_ids is rollout.prompt.token_ids
            segments.append(Segment(prompt_ids if is_prompt else TokenArray.from_ids(segment.token_ids)))
            continue
        num = len(segment.token_ids)
        if len(segment.rollout_logprobs) != num:
            raise ValueError(
                f"rollout {rollout.name}: {len(segment.rollout_logprobs)} log-probabilities for {num} tokens"
            )
        advantage = next(turns)
        if not num:
            continue
        recorded.append(segment.routed_experts)
        token_ids, rollout_logprobs, kept = segment.token_ids, segment.rollout_logprobs, segment.kept
        first = 0  # the first token that is new enough
        if oldest is not None:
            first = sum(length for sampled_by, length in version_runs(segment) if sampled_by < oldest)
        if first:
            segments.append(Segment(token_ids[:first], rollout_logprobs[:first]))
            token_ids, rollout_logprobs = token_ids[first:], rollout_logprobs[first:]
            kept = None if kept is None else kept[first:]
        if first < num:
            num_stale = sum(length for sampled_by, length in version_runs(segment) if sampled_by < version)
            segments.append(Segment(token_ids, rollout_logprobs, advantage, True, kept, max(0, num_stale - first)))
            versions.append(segment.min_version if oldest is None else max(segment.min_version, oldest))
    if not versions:
        return None
    return Sample(
        name=f"{rollout.name}/{number}" if len(rollout.branches) > 1 else rollout.name,
        environment=rollout.prompt.environment,
        segments=tuple(segments),
        staleness=version - min(versions),
        routed_experts=_joined(recorded),
    )


def _joined(recorded: Sequence[np.ndarray | None]) -> np.ndarray | None:
    arrays = [array for array in recorded if array is not None]
    if len(arrays) < len(recorded):
        return None
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def version_runs(completion: Completion) -> list[tuple[int, int]]:
    """Which policy version sampled how many tokens, (version, length) in order."""
    spans = completion.version_spans or ((0, completion.min_version),)
    ends = [*(first for first, _ in spans[1:]), len(completion.token_ids)]
    return [(version, end - first) for (first, version), end in zip(spans, ends, strict=True)]
