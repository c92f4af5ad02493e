"""Samples made of numbers for each token, and the numbers of the tokens of a sample."""

from collections.abc import Sequence

import numpy as np

from megatron_fp8rl.token_array import TokenArray
from megatron_fp8rl.types import Sample, Segment


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


def mask_of(sample: Sample) -> list[bool]:
    return [one.is_trained for one in sample.segments for _ in one.token_ids]


def logprobs_of(sample: Sample) -> list[float]:
    """The engine's log-probabilities; 0 for context tokens."""
    return [p for one in sample.segments for p in one.rollout_logprobs or [0.0] * len(one.token_ids)]


def advantages_of(sample: Sample) -> list[float]:
    return [one.advantage for one in sample.segments for _ in one.token_ids]
