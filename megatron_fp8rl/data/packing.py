"""Pack samples into the microbatches of one data-parallel rank. Pure; every rank passes the same samples.

A microbatch is a row of T tokens: sequences one after another, each padded at its end. Padding never carries loss.

    samples --split--> updates --assign--> bins of at most max_tokens, balanced over ranks --build--> tensors

The assignment depends only on lengths and every rank computes all of it, so nothing is communicated.

Shapes: L = tokens of one sequence, T = tokens of one microbatch, S = sequences of one microbatch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_fp8rl.config import ParallelConfig, RunConfig
from megatron_fp8rl.types import Microbatch, Sample, TrainBatch

# FP8 GEMMs of Transformer Engine and cuBLAS require every dimension, including a rank's tokens, to be a multiple of 16.
_FP8_TOKEN_MULTIPLE = 16
_NOT_RECORDED = -1


class SequenceTooLongError(ValueError):
    """A sequence that fits in no microbatch."""


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """Multiples to which packed lengths are rounded up, in tokens."""

    sequence: int  # of every sequence
    microbatch: int  # of T; a multiple of ``sequence``

    @classmethod
    def of(cls, parallel: ParallelConfig) -> Alignment:
        """The alignment that a layout needs.

        Context parallelism cuts each sequence into ``2 * context`` chunks to balance causal attention. Sequence
        parallelism then gives each tensor-parallel rank an equal share of T, which FP8 requires in multiples of 16.
        """
        sequence = 2 * parallel.context if parallel.context > 1 else 1
        return cls(sequence=sequence, microbatch=_FP8_TOKEN_MULTIPLE * parallel.tensor * parallel.context)


def pack_for(
    cfg: RunConfig, samples: Sequence[Sample], *, data_rank: int, num_updates: int = 1
) -> tuple[TrainBatch, ...]:
    """:func:`pack` with the limits and multiples of a run's configuration."""
    return pack(
        samples,
        data_size=cfg.parallel.data,
        data_rank=data_rank,
        max_tokens=cfg.rollout.max_tokens_per_microbatch,
        alignment=Alignment.of(cfg.parallel),
        # The interleaved schedule takes its microbatches in rounds of one per pipeline rank.
        num_microbatches_multiple=cfg.parallel.pipeline if cfg.parallel.virtual_stages > 1 else 1,
        num_updates=num_updates,
    )


def pack(
    samples: Sequence[Sample],
    *,
    data_size: int,
    data_rank: int,
    max_tokens: int,
    alignment: int | Alignment,
    num_microbatches_multiple: int = 1,
    num_updates: int = 1,
) -> tuple[TrainBatch, ...]:
    """Pack samples into one :class:`TrainBatch` per optimizer update, for one data-parallel rank.

    Deterministic in its arguments. ``samples`` is cut into ``num_updates`` consecutive parts of nearly equal size
    (fewer if there are fewer samples; none for no samples). Within a part every rank gets the same number of
    microbatches, a multiple of ``num_microbatches_multiple`` (pipeline ranks, for an interleaved schedule); empty
    microbatches hold one masked filler sequence. A microbatch holds at most ``max_tokens`` tokens, including padding.

    Raises:
        SequenceTooLongError: a sequence that does not fit in ``max_tokens``, by name.
        ValueError: a sample with fields of unequal length, or routed experts on some samples only, by name.
    """
    if isinstance(alignment, int):
        alignment = Alignment(sequence=alignment, microbatch=alignment)
    if alignment.microbatch % alignment.sequence:
        raise ValueError(f"{alignment}: the microbatch multiple must be a multiple of the sequence multiple")
    if not 0 <= data_rank < data_size:
        raise ValueError(f"data_rank {data_rank} is not within data_size {data_size}")
    capacity = max_tokens - max_tokens % alignment.microbatch
    for sample in samples:
        _check(sample, capacity, max_tokens, alignment)
    routed = _routed_shape(samples)

    batches = []
    for part in _split(samples, num_updates):
        lengths = [_round_up(len(sample.token_ids), alignment.sequence) for sample in part]
        bins = assign(
            lengths, data_size=data_size, capacity=capacity, num_microbatches_multiple=num_microbatches_multiple
        )
        microbatches = tuple(_build([part[i] for i in chosen], alignment, routed) for chosen in bins[data_rank])
        loss_tokens = [int(np.count_nonzero(sample.loss_mask[1:])) for sample in part]
        batches.append(
            TrainBatch(
                microbatches=microbatches,
                num_loss_tokens=sum(loss_tokens),
                num_sequences=sum(count > 0 for count in loss_tokens),
            )
        )
    return tuple(batches)


def assign(
    lengths: Sequence[int], *, data_size: int, capacity: int, num_microbatches_multiple: int = 1
) -> list[list[list[int]]]:
    """Assign sequences to microbatches: ``result[rank][microbatch]`` lists indices into ``lengths``, ascending.

    Longest sequence first, into the emptiest microbatch of all ranks (Graham's LPT rule: the fullest bin is within 4/3
    of the optimum), with as few microbatches as possible. The filled microbatches then go to the ranks, fullest first,
    each to the rank with the fewest tokens so far. Lengths must not exceed ``capacity``.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    needed = max(1, math.ceil(sum(lengths) / (capacity * data_size)))
    num_per_rank = _round_up(needed, num_microbatches_multiple)
    while (bins := _fill(order, lengths, num_per_rank * data_size, capacity)) is None:
        num_per_rank += num_microbatches_multiple

    ranks: list[list[list[int]]] = [[] for _ in range(data_size)]
    loads = [0] * data_size
    for load, chosen in sorted(bins, key=lambda item: (-item[0], item[1])):
        rank = min((r for r in range(data_size) if len(ranks[r]) < num_per_rank), key=lambda r: (loads[r], r))
        ranks[rank].append(sorted(chosen))
        loads[rank] += load
    return ranks


def _fill(
    order: Sequence[int], lengths: Sequence[int], num_bins: int, capacity: int
) -> list[tuple[int, list[int]]] | None:
    """Put each sequence into the emptiest bin; None if one does not fit."""
    loads = np.zeros(num_bins, dtype=np.int64)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for i in order:
        emptiest = int(loads.argmin())
        if loads[emptiest] + lengths[i] > capacity:
            return None
        loads[emptiest] += lengths[i]
        bins[emptiest].append(i)
    return [(int(load), chosen) for load, chosen in zip(loads, bins, strict=True)]


def _build(samples: Sequence[Sample], alignment: Alignment, routed: tuple[int, int] | None) -> Microbatch:
    """Lay sequences out in one row; without samples, one filler sequence of masked tokens."""
    padded = [_round_up(len(sample.token_ids), alignment.sequence) for sample in samples] or [alignment.microbatch]
    padded[-1] += -sum(padded) % alignment.microbatch
    starts = np.concatenate([[0], np.cumsum(padded)])
    num_tokens = int(starts[-1])

    tokens, targets = np.zeros(num_tokens, dtype=np.int64), np.zeros(num_tokens, dtype=np.int64)
    mask = np.zeros(num_tokens, dtype=bool)
    rollout_logprobs, advantages = np.zeros(num_tokens, dtype=np.float32), np.zeros(num_tokens, dtype=np.float32)
    completion_positions = np.full(num_tokens, -1, dtype=np.int64)
    experts = None if routed is None else np.full((num_tokens, *routed), _NOT_RECORDED, dtype=np.int16)

    for sample, start in zip(samples, starts, strict=False):
        num = len(sample.token_ids)
        # Position t predicts token t + 1, so everything that describes token t + 1 moves one position to the left.
        here, last = slice(start, start + num), start + num - 1
        predicting = slice(start, last)
        tokens[here] = sample.token_ids
        targets[predicting] = sample.token_ids[1:]
        mask[predicting] = sample.loss_mask[1:]
        rollout_logprobs[predicting] = sample.rollout_logprobs[1:]
        advantages[predicting] = sample.advantages[1:]
        first = start + sample.num_prompt_tokens - 1
        completion_positions[first:last] = np.arange(num - sample.num_prompt_tokens)
        if experts is not None:
            experts[predicting] = sample.routed_experts

    sizes = torch.tensor(padded)
    return Microbatch(
        tokens_T=torch.from_numpy(tokens),
        targets_T=torch.from_numpy(targets),
        positions_T=torch.arange(num_tokens) - torch.from_numpy(starts[:-1]).repeat_interleave(sizes),
        cu_seqlens_S=torch.from_numpy(starts.astype(np.int32)),
        sequence_ids_T=torch.arange(len(padded)).repeat_interleave(sizes),
        loss_mask_T=torch.from_numpy(mask),
        rollout_logprobs_T=torch.from_numpy(rollout_logprobs),
        advantages_T=torch.from_numpy(advantages),
        names=tuple(sample.name for sample in samples) or ("",),
        environments=tuple(sample.environment for sample in samples) or ("",),
        completion_positions_T=torch.from_numpy(completion_positions),
        routed_experts_T=None if experts is None else torch.from_numpy(experts),
    )


def _check(sample: Sample, capacity: int, max_tokens: int, alignment: Alignment) -> None:
    num = len(sample.token_ids)
    for field in ("loss_mask", "rollout_logprobs", "advantages"):
        if (found := len(getattr(sample, field))) != num:
            raise ValueError(f"sample {sample.name}: {field} has {found} entries for {num} tokens")
    if not 1 <= sample.num_prompt_tokens <= num:
        raise ValueError(f"sample {sample.name}: {sample.num_prompt_tokens} prompt tokens of {num}; a prompt has some")
    if any(sample.loss_mask[: sample.num_prompt_tokens]):
        raise ValueError(f"sample {sample.name}: the loss mask covers prompt tokens")
    if _round_up(num, alignment.sequence) > capacity:
        raise SequenceTooLongError(
            f"sample {sample.name} has {num} tokens and does not fit in a microbatch of {max_tokens} tokens (in "
            f"multiples of {alignment.microbatch}). Raise rollout.max_tokens_per_microbatch to at least "
            f"{_round_up(num, alignment.microbatch)} or lower rollout.max_completion_tokens"
        )


def _routed_shape(samples: Sequence[Sample]) -> tuple[int, int] | None:
    """(layers, top_k) of the recorded experts, which all samples or none must carry."""
    recorded = [sample for sample in samples if sample.routed_experts is not None]
    if not recorded:
        return None
    shape = recorded[0].routed_experts.shape[1:]
    for sample in samples:
        found = None if sample.routed_experts is None else sample.routed_experts.shape
        if found != (len(sample.token_ids) - 1, *shape):
            raise ValueError(
                f"sample {sample.name}: routed experts of shape {found}, expected "
                f"{(len(sample.token_ids) - 1, *shape)} (tokens - 1, layers, top_k) as of sample {recorded[0].name}"
            )
    return shape


def _split(samples: Sequence[Sample], num_parts: int) -> list[Sequence[Sample]]:
    """Consecutive parts whose sizes differ by at most one; no part is empty."""
    num_parts = min(num_parts, len(samples))
    bounds = [len(samples) * part // num_parts for part in range(num_parts + 1)] if num_parts else []
    return [samples[low:high] for low, high in itertools.pairwise(bounds)]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
