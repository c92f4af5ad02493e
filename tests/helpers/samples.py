"""Samples made of numbers for each token, and the numbers of the tokens of a sample."""

from collections.abc import Sequence

import numpy as np

from megatron_fp8rl.token_array import TokenArray
from megatron_fp8rl.types import Completion, Sample, Segment


def make_sample(
    name: str,
    environment: str,
    *,
    prompt: Sequence[int],
    completion: Sequence[int],
    logprobs: Sequence[float],
    mask: Sequence[bool],
    advantages: Sequence[float],
    routed_experts: np.ndarray | None = None,
) -> Sample:
    """A sample in which each completion token is a segment."""
    sampled = zip(completion, logprobs, mask, advantages, strict=True)
    segments = (
        Segment(TokenArray.from_ids((i,)), TokenArray.from_floats((p,)), advantage, flag)
        for i, p, flag, advantage in sampled
    )
    return Sample(
        name=name,
        environment=environment,
        segments=(Segment(TokenArray.from_ids(prompt)), *segments),
        routed_experts=routed_experts,
    )


def make_completion(ids: Sequence[int], logprobs: Sequence[float] | float = -1.0, **fields) -> Completion:
    """A completion with ``logprobs`` for each token or for all; by default it stopped, and has version 0."""
    if isinstance(logprobs, float):
        logprobs = (logprobs,) * len(ids)
    fields = {"finish_reason": "stop", "min_version": 0, "max_version": 0} | fields
    return Completion(token_ids=tuple(ids), rollout_logprobs=tuple(logprobs), **fields)


def mask_of(sample: Sample) -> list[bool]:
    return [segment.is_trained for segment in sample.segments for _ in segment.token_ids]


def logprobs_of(sample: Sample) -> list[float]:
    """The engine's log-probabilities; 0 for context tokens."""
    return [p for segment in sample.segments for p in segment.rollout_logprobs or [0.0] * len(segment.token_ids)]


def advantages_of(sample: Sample) -> list[float]:
    return [segment.advantage for segment in sample.segments for _ in segment.token_ids]
