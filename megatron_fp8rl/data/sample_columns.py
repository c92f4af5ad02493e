"""Samples as columns, in which they travel to the ranks that train them: a few arrays instead of objects for each. Pure.

Rows that several samples share, such as the row of a prompt, appear once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_fp8rl.token_array import TokenArray
from megatron_fp8rl.types import Sample, Stretch


@dataclass(frozen=True, kw_only=True, slots=True)
class _Arrays:
    """R arrays [N, ...] of one kind, concatenated."""

    lengths: list[int]  # [R]
    numbers: np.ndarray

    @classmethod
    def of(cls, arrays: Sequence[np.ndarray]) -> _Arrays:
        numbers = np.concatenate(arrays) if arrays else np.empty(0, np.float32)
        return cls(lengths=list(map(len, arrays)), numbers=numbers)

    def arrays(self) -> list[np.ndarray]:
        """The arrays, as views of ``numbers``."""
        ends = itertools.accumulate(self.lengths)
        return [self.numbers[end - length : end] for length, end in zip(self.lengths, ends, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleColumns:
    """Shapes: N = samples, M = their stretches, R = distinct rows of token ids."""

    names: list[str]  # [N]
    environments: list[str]  # [N]
    staleness: list[int]  # [N]
    num_stretches: list[int]  # [N]
    rows: np.ndarray  # int64 [M], index of its token ids
    are_sampled: np.ndarray  # bool [M]
    advantages: np.ndarray  # float64 [M]
    are_trained: np.ndarray  # bool [M]
    token_ids: _Arrays  # int32, R of them
    rollout_logprobs: _Arrays  # float32 or float64, of all sampled stretches
    routed_experts: _Arrays | None  # [tokens - 1, num_layers, top_k], of all samples or none

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> SampleColumns:
        """In their order. Copies the numbers once."""
        stretches = [one for sample in samples for one in sample.stretches]
        rows = {id(one.token_ids): one.token_ids for one in stretches}
        index = {key: i for i, key in enumerate(rows)}
        experts = [sample.routed_experts for sample in samples if sample.routed_experts is not None]
        return cls(
            names=[sample.name for sample in samples],
            environments=[sample.environment for sample in samples],
            staleness=[sample.staleness for sample in samples],
            num_stretches=[len(sample.stretches) for sample in samples],
            rows=np.array([index[id(one.token_ids)] for one in stretches], np.int64),
            are_sampled=np.array([one.rollout_logprobs is not None for one in stretches], np.bool_),
            advantages=np.array([one.advantage for one in stretches], np.float64),
            are_trained=np.array([one.is_trained for one in stretches], np.bool_),
            token_ids=_Arrays.of([row.array for row in rows.values()]),
            rollout_logprobs=_Arrays.of(
                [one.rollout_logprobs.array for one in stretches if one.rollout_logprobs is not None]
            ),
            routed_experts=_Arrays.of(experts) if experts else None,
        )

    def samples(self) -> list[Sample]:
        """The samples; their numbers are views of the columns."""
        rows = [TokenArray(array) for array in self.token_ids.arrays()]
        of_sampled = map(TokenArray, self.rollout_logprobs.arrays())
        experts = itertools.repeat(None) if self.routed_experts is None else self.routed_experts.arrays()
        flags = zip(
            self.rows.tolist(),
            self.are_sampled.tolist(),
            self.advantages.tolist(),
            self.are_trained.tolist(),
            strict=True,
        )
        stretches = (
            Stretch(rows[row], next(of_sampled) if is_sampled else None, advantage, is_trained)
            for row, is_sampled, advantage, is_trained in flags
        )
        of_samples = zip(self.names, self.environments, self.staleness, self.num_stretches, experts, strict=False)
        return [
            Sample(
                name=name,
                environment=environment,
                stretches=tuple(itertools.islice(stretches, num)),
                staleness=staleness,
                routed_experts=own,
            )
            for name, environment, staleness, num, own in of_samples
        ]
