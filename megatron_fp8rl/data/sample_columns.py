"""Samples as columns for sending to training ranks: a few arrays, in which shared prompts occur once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_fp8rl.kept_entries import KeptEntries
from megatron_fp8rl.token_array import TokenArray
from megatron_fp8rl.types import Sample, Segment


@dataclass(frozen=True, kw_only=True, slots=True)
class _Arrays:
    """R arrays [N, ...] of one kind, concatenated."""

    lengths: list[int]  # [R]
    numbers: np.ndarray

    @classmethod
    def join(cls, arrays: Sequence[np.ndarray]) -> _Arrays:
        numbers = np.concatenate(arrays) if arrays else np.empty(0, np.float32)
        return cls(lengths=list(map(len, arrays)), numbers=numbers)

    def arrays(self) -> list[np.ndarray]:
        """The arrays, as views of ``numbers``."""
        ends = itertools.accumulate(self.lengths)
        return [self.numbers[end - length : end] for length, end in zip(self.lengths, ends, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleColumns:
    """Samples as arrays. Shapes: N = samples, M = their segments, R = distinct rows of token ids."""

    names: list[str]  # [N]
    environments: list[str]  # [N]
    staleness: list[int]  # [N]
    num_segments: list[int]  # [N]
    rows: np.ndarray  # int64 [M], index into token_ids
    are_sampled: np.ndarray  # bool [M]
    advantages: np.ndarray  # float64 [M]
    are_trained: np.ndarray  # bool [M]
    num_stale: np.ndarray  # int64 [M]
    token_ids: _Arrays  # int32, R arrays
    rollout_logprobs: _Arrays  # float32 or float64, one array per sampled segment
    routed_experts: _Arrays | None  # [tokens - 1, num_layers, top_k] per sample; None: not recorded
    kept: KeptEntries | None  # of all sampled segments; None: the whole vocabulary

    @classmethod
    def from_samples(cls, samples: Sequence[Sample]) -> SampleColumns:
        """Convert samples in order. Copies the numbers once."""
        segments = [segment for sample in samples for segment in sample.segments]
        rows = {id(segment.token_ids): segment.token_ids for segment in segments}
        index = {key: i for i, key in enumerate(rows)}
        sampled = [segment for segment in segments if segment.rollout_logprobs is not None]
        experts = [sample.routed_experts for sample in samples if sample.routed_experts is not None]
        return cls(
            names=[sample.name for sample in samples],
            environments=[sample.environment for sample in samples],
            staleness=[sample.staleness for sample in samples],
            num_segments=[len(sample.segments) for sample in samples],
            rows=np.array([index[id(s.token_ids)] for s in segments], np.int64),
            are_sampled=np.array([s.rollout_logprobs is not None for s in segments], np.bool_),
            advantages=np.array([s.advantage for s in segments], np.float64),
            are_trained=np.array([s.is_trained for s in segments], np.bool_),
            num_stale=np.array([s.num_stale for s in segments], np.int64),
            token_ids=_Arrays.join([row.array for row in rows.values()]),
            rollout_logprobs=_Arrays.join([s.rollout_logprobs.array for s in sampled]),
            routed_experts=_Arrays.join(experts) if experts else None,
            kept=KeptEntries.join([s.kept for s in sampled], [len(s.token_ids) for s in sampled]),
        )

    def samples(self) -> list[Sample]:
        """Convert back to samples; their arrays are views of the columns."""
        rows = [TokenArray(array) for array in self.token_ids.arrays()]
        rollout_logprobs = map(TokenArray, self.rollout_logprobs.arrays())
        experts = itertools.repeat(None) if self.routed_experts is None else self.routed_experts.arrays()
        kept = itertools.repeat(None) if self.kept is None else iter(self.kept.split(self.rollout_logprobs.lengths))
        columns = (self.rows, self.are_sampled, self.advantages, self.are_trained, self.num_stale)
        segments = (
            Segment(
                rows[row],
                next(rollout_logprobs) if is_sampled else None,
                advantage,
                is_trained,
                next(kept) if is_sampled else None,
                num_stale,
            )
            for row, is_sampled, advantage, is_trained, num_stale in zip(
                *(column.tolist() for column in columns), strict=True
            )
        )
        fields = zip(self.names, self.environments, self.staleness, self.num_segments, experts, strict=False)
        return [
            Sample(
                name=name,
                environment=environment,
                segments=tuple(itertools.islice(segments, num)),
                staleness=staleness,
                routed_experts=routed,
            )
            for name, environment, staleness, num, routed in fields
        ]
