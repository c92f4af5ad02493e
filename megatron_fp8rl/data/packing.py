"""Pack samples into the microbatches of data-parallel ranks. Pure.

A microbatch is one row of T tokens: concatenated sequences, each padded at its end.

    samples --split--> updates --assign--> shares: bins of at most max_tokens, balanced over ranks --build--> tensors

Rank 0 divides all samples (:func:`divide_for`); each rank builds the tensors of its share (:func:`build_for`). If every
rank has all samples, each does both (:func:`pack_for`). The assignment depends only on lengths.

Shapes: L = tokens of one sequence, T = tokens of one microbatch, S = sequences of one microbatch.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megatron_fp8rl.config import ParallelConfig, RunConfig
from megatron_fp8rl.data.sample_columns import SampleColumns
from megatron_fp8rl.kept_entries import KeptEntries
from megatron_fp8rl.precision.kernel_support import may_gather
from megatron_fp8rl.types import Microbatch, Sample, Taught, TrainBatch

# FP8 GEMMs of Transformer Engine and cuBLAS require every dimension, including a rank's tokens, to be a multiple of 16.
_FP8_TOKEN_MULTIPLE = 16
_NOT_RECORDED = -1


class SequenceTooLongError(ValueError):
    """A sequence is longer than a microbatch."""


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """Multiples to which packed lengths are rounded up, in tokens."""

    sequence: int  # per sequence
    microbatch: int  # for T; a multiple of ``sequence``

    @classmethod
    def of(cls, parallel: ParallelConfig) -> Alignment:
        """The alignment for a parallel layout.

        Context parallelism cuts each sequence into ``2 * context`` chunks to balance causal attention. Sequence
        parallelism then splits T equally over tensor-parallel ranks; FP8 requires multiples of 16.
        """
        sequence = 2 * parallel.context if parallel.context > 1 else 1
        return cls(sequence=sequence, microbatch=_FP8_TOKEN_MULTIPLE * parallel.tensor * parallel.context)


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Training data of one data-parallel rank in one update."""

    microbatches: tuple[tuple[Sample, ...], ...]
    num_loss_tokens: int  # over all data-parallel ranks
    num_sequences: int  # over all data-parallel ranks
    routed: tuple[int, int] | None  # (layers, top_k) of the recorded experts
    lengths: tuple[int, ...] | None = None  # common padded lengths of all ranks; None: no common length

    def __reduce__(self) -> tuple[Any, ...]:
        samples = SampleColumns.from_samples([sample for microbatch in self.microbatches for sample in microbatch])
        rest = {name: getattr(self, name) for name in ("num_loss_tokens", "num_sequences", "routed", "lengths")}
        return _share, (samples, list(map(len, self.microbatches)), rest)


def _share(samples: SampleColumns, sizes: Sequence[int], rest: dict[str, Any]) -> Share:
    queue = iter(samples.samples())
    return Share(microbatches=tuple(tuple(itertools.islice(queue, size)) for size in sizes), **rest)


def pack_for(
    cfg: RunConfig, samples: Sequence[Sample], *, data_rank: int, num_updates: int = 1, together: int = 1
) -> tuple[TrainBatch, ...]:
    """:func:`pack` with the limits and multiples of a run's configuration."""
    return pack(samples, data_rank=data_rank, num_updates=num_updates, together=together, **_limits(cfg))


def divide_for(cfg: RunConfig, samples: Sequence[Sample], *, num_updates: int = 1) -> list[tuple[Share, ...]]:
    """:func:`divide` with the limits and multiples of a run's configuration."""
    return divide(samples, num_updates=num_updates, **_limits(cfg))


def build_for(parallel: ParallelConfig, shares: Sequence[Share]) -> tuple[TrainBatch, ...]:
    """:func:`build` with the multiples of a run's configuration."""
    return build(shares, Alignment.of(parallel))


def with_ref_logprobs(batch: TrainBatch, ref_logprobs: Mapping[str, np.ndarray]) -> TrainBatch:
    """Set ``ref_logprobs_T`` from the values of each sample's trained tokens, FP32, by the sample's name."""
    filled = []
    for mb in batch.microbatches:
        values_T = torch.zeros(mb.tokens_T.numel())
        for name, mask_T in _trained(mb):
            values_T[mask_T] = torch.tensor(ref_logprobs[name], dtype=torch.float32)
        filled.append(replace(mb, ref_logprobs_T=values_T))
    return replace(batch, microbatches=tuple(filled))


def with_top_tokens(batch: TrainBatch, top: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> TrainBatch:
    """Add a teacher's (ids, log-probabilities) [n, K] of each sample's n trained tokens, by the sample's name."""
    filled = []
    for mb in batch.microbatches:
        scored = [
            (mask_T.nonzero()[:, 0], *map(torch.from_numpy, top[name])) for name, mask_T in _trained(mb) if name in top
        ]
        if scored:
            positions, ids, teacher_logprobs = (torch.cat(parts) for parts in zip(*scored, strict=True))
            taught = Taught(positions_n=positions, ids_nK=ids, logprobs_nK=teacher_logprobs)
            mb = replace(mb, taught=(*mb.taught, taught))
        filled.append(mb)
    return replace(batch, microbatches=tuple(filled))


def old_logprobs_by_sample(batch: TrainBatch) -> dict[str, np.ndarray]:
    """``old_logprobs_T`` at each sample's trained tokens, FP32, by the sample's name."""
    values = ((mb, mb.old_logprobs_T) for mb in batch.microbatches)
    return {name: x[mask].cpu().numpy() for mb, x in values if x is not None for name, mask in _trained(mb)}


def _trained(mb: Microbatch) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, mask of its trained tokens) of each sequence but fillers."""
    for index, name in enumerate(mb.names):
        if name:
            yield name, mb.loss_mask_T & (mb.sequence_ids_T == index)


def _limits(cfg: RunConfig) -> dict[str, Any]:
    return {
        "data_size": cfg.parallel.data,
        "max_tokens": cfg.optim.max_tokens_per_microbatch,
        "alignment": Alignment.of(cfg.parallel),
        # The interleaved schedule needs a multiple of the pipeline ranks.
        "num_microbatches_multiple": cfg.parallel.pipeline if cfg.parallel.virtual_stages > 1 else 1,
        # Gathering tokens across ranks requires equal lengths.
        "equal_lengths": cfg.parallel.expert > 1 and may_gather(cfg.parallel, cfg.precision),
    }


def pack(
    samples: Sequence[Sample], *, data_size: int, data_rank: int, alignment: int | Alignment, **limits: int
) -> tuple[TrainBatch, ...]:
    """One :class:`TrainBatch` per optimizer update, for one data-parallel rank: :func:`divide` and :func:`build`.
    Raises the errors of :func:`divide`, and ValueError if ``data_rank`` does not exist."""
    if not 0 <= data_rank < data_size:
        raise ValueError(f"data_rank {data_rank} is not within data_size {data_size}")
    return build(divide(samples, data_size=data_size, alignment=alignment, **limits)[data_rank], alignment)


def divide(
    samples: Sequence[Sample],
    *,
    data_size: int,
    max_tokens: int,
    alignment: int | Alignment,
    num_microbatches_multiple: int = 1,
    num_updates: int = 1,
    equal_lengths: bool = False,
    together: int = 1,
) -> list[tuple[Share, ...]]:
    """Divide samples into shares, one per rank and optimizer update. Deterministic.

    Args:
        max_tokens: tokens of a microbatch at most, including padding.
        num_microbatches_multiple: of the number of microbatches, which is equal on all ranks; some may be empty.
        num_updates: consecutive parts of nearly equal size; fewer if there are fewer samples.
        equal_lengths: all ranks pad microbatch i to the same length.
        together: so many consecutive samples stay in one microbatch, one after another.

    Raises:
        SequenceTooLongError: a sequence, or samples that stay together, are longer than ``max_tokens``.
        ValueError: fields of a sample differ in length, or only some samples have routed experts.
    """
    alignment = _alignment(alignment)
    capacity = max_tokens - max_tokens % alignment.microbatch
    num_tokens = [sample.num_tokens for sample in samples]
    for sample, num in zip(samples, num_tokens, strict=True):
        _check(sample, num, capacity, max_tokens, alignment)
    routed = _routed_shape(samples)

    shares: list[list[Share]] = [[] for _ in range(data_size)]
    for units in _split(len(samples) // together, num_updates):
        part = range(units.start * together, units.stop * together)
        lengths = [_round_up(num_tokens[i], alignment.sequence) for i in part]
        totals = [sum(lengths[i : i + together]) for i in range(0, len(lengths), together)]
        if together > 1 and max(totals) > capacity:
            name = samples[part[totals.index(max(totals)) * together]].name
            raise SequenceTooLongError(
                f"sample {name} and the next {together - 1} have {max(totals)} tokens and do not fit in a microbatch "
                f"of {max_tokens} tokens. Raise optim.max_tokens_per_microbatch"
            )
        bins = assign(
            totals, data_size=data_size, capacity=capacity, num_microbatches_multiple=num_microbatches_multiple
        )
        bins = [[[u * together + i for u in chosen for i in range(together)] for chosen in rank] for rank in bins]
        loss_tokens = [samples[i].num_loss_tokens for i in part]
        for rank_shares, chosen in zip(shares, bins, strict=True):
            rank_shares.append(
                Share(
                    microbatches=tuple(tuple(samples[part[i]] for i in indices) for indices in chosen),
                    num_loss_tokens=sum(loss_tokens),
                    num_sequences=sum(count > 0 for count in loss_tokens),
                    routed=routed,
                    lengths=_longest(lengths, bins, alignment.microbatch) if equal_lengths else None,
                )
            )
    return [tuple(rank_shares) for rank_shares in shares]


def _longest(lengths: Sequence[int], bins: Sequence[Sequence[Sequence[int]]], multiple: int) -> tuple[int, ...]:
    """The most tokens of each microbatch index over all ranks. An empty microbatch counts its filler."""
    by_index = zip(*([max(1, sum(lengths[i] for i in indices)) for indices in chosen] for chosen in bins), strict=True)
    return tuple(_round_up(max(sizes), multiple) for sizes in by_index)


def build(shares: Sequence[Share], alignment: int | Alignment) -> tuple[TrainBatch, ...]:
    """Build the tensors of one rank's shares; an empty microbatch gets one masked filler sequence."""
    alignment = _alignment(alignment)
    return tuple(
        TrainBatch(
            microbatches=tuple(
                _build(samples, alignment, share.routed, length)
                for samples, length in zip(
                    share.microbatches, share.lengths or [0] * len(share.microbatches), strict=True
                )
            ),
            num_loss_tokens=share.num_loss_tokens,
            num_sequences=share.num_sequences,
        )
        for share in shares
    )


def _alignment(value: int | Alignment) -> Alignment:
    alignment = Alignment(sequence=value, microbatch=value) if isinstance(value, int) else value
    if alignment.microbatch % alignment.sequence:
        raise ValueError(f"{alignment}: the microbatch multiple must be a multiple of the sequence multiple")
    return alignment


def assign(
    lengths: Sequence[int], *, data_size: int, capacity: int, num_microbatches_multiple: int = 1
) -> list[list[list[int]]]:
    """Assign sequences to microbatches: ``result[rank][microbatch]`` lists indices into ``lengths``, ascending.

    Sequences go, longest first, into the emptiest microbatch of all ranks (Graham's LPT rule: the fullest bin is within
    4/3 of the optimum). The number of microbatches is minimal; above 100 per rank, within one percent of minimal. Then
    microbatches go, fullest first, to the rank with the fewest tokens. Lengths must not exceed ``capacity``.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)  # stable: ties by index
    needed = max(1, math.ceil(sum(lengths) / (capacity * data_size)))
    num_per_rank = _round_up(needed, num_microbatches_multiple)
    while (bins := _fill(order, lengths, num_per_rank * data_size, capacity)) is None:
        num_per_rank += _round_up(max(1, num_per_rank // 100), num_microbatches_multiple)

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
    emptiest_first = list(range(num_bins))  # heap of tokens * num_bins + bin index; the index breaks ties
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for i in order:
        load, emptiest = divmod(emptiest_first[0], num_bins)
        load += lengths[i]
        if load > capacity:
            return None
        heapq.heapreplace(emptiest_first, load * num_bins + emptiest)
        bins[emptiest].append(i)
    return [(sum(lengths[i] for i in chosen), chosen) for chosen in bins]


def _build(samples: Sequence[Sample], alignment: Alignment, routed: tuple[int, int] | None, least: int) -> Microbatch:
    """Concatenate sequences in one row of at least ``least`` tokens; filler sequences are fully masked."""
    padded = [_round_up(len(sample.token_ids), alignment.sequence) for sample in samples] or [alignment.microbatch]
    padded[-1] += -sum(padded) % alignment.microbatch
    padded += [alignment.microbatch] * ((least - sum(padded)) // alignment.microbatch)
    starts = np.concatenate([[0], np.cumsum(padded)])
    num_tokens = int(starts[-1])

    tokens, targets = np.zeros(num_tokens, dtype=np.int64), np.zeros(num_tokens, dtype=np.int64)
    mask = np.zeros(num_tokens, dtype=bool)
    rollout_logprobs, advantages = np.zeros(num_tokens, dtype=np.float32), np.zeros(num_tokens, dtype=np.float32)
    completion_positions = np.full(num_tokens, -1, dtype=np.int64)
    stale = np.zeros(num_tokens, dtype=bool)
    experts = None if routed is None else np.full((num_tokens, *routed), _NOT_RECORDED, dtype=np.int16)

    kept: list[tuple[int, KeptEntries]] = []  # (position that predicts the first token, entries)
    for sample, start in zip(samples, starts.tolist(), strict=False):
        # Position t predicts token t + 1, so all properties of token t + 1 shift one position to the left.
        end = start
        for ids, logprobs, advantage, is_trained, entries, num_stale in sample.segments:
            first, end = end, end + len(ids)
            tokens[first:end] = ids
            if first > start:  # the first segment is context without properties
                predicting = slice(first - 1, end - 1)
                mask[predicting], advantages[predicting] = is_trained, advantage
                stale[first - 1 : first - 1 + num_stale] = True
                if logprobs is not None:
                    rollout_logprobs[predicting] = logprobs
                if entries is not None:
                    kept.append((first - 1, entries))
        targets[start : end - 1] = tokens[start + 1 : end]
        first = start + sample.num_prompt_tokens
        completion_positions[first - 1 : end - 1] = np.arange(end - first)
        if experts is not None:
            experts[start : end - 1] = sample.routed_experts

    sizes, fillers = torch.tensor(padded), [""] * (len(padded) - len(samples))
    return Microbatch(
        tokens_T=torch.from_numpy(tokens),
        targets_T=torch.from_numpy(targets),
        positions_T=torch.arange(num_tokens) - torch.from_numpy(starts[:-1]).repeat_interleave(sizes),
        cu_seqlens_S=torch.from_numpy(starts.astype(np.int32)),
        sequence_ids_T=torch.arange(len(padded)).repeat_interleave(sizes),
        loss_mask_T=torch.from_numpy(mask),
        rollout_logprobs_T=torch.from_numpy(rollout_logprobs),
        advantages_T=torch.from_numpy(advantages),
        names=(*(sample.name for sample in samples), *fillers),
        environments=(*(sample.environment for sample in samples), *fillers),
        completion_positions_T=torch.from_numpy(completion_positions),
        stale_T=torch.from_numpy(stale) if stale.any() else None,
        routed_experts_T=None if experts is None else torch.from_numpy(experts),
        kept=_placed(kept, num_tokens),
    )


def _placed(parts: Sequence[tuple[int, KeptEntries]], num_tokens: int) -> KeptEntries | None:
    """Entries of a row of tokens from parts at positions, ascending; None without parts."""
    if not parts:
        return None
    lengths = np.zeros(num_tokens, np.int32)
    for position, part in parts:
        lengths[position : position + len(part)] = part.lengths
    words = np.concatenate([part.words for _, part in parts])
    return KeptEntries(words=words, lengths=lengths, vocab_size=parts[0][1].vocab_size)


def _check(sample: Sample, num: int, capacity: int, max_tokens: int, alignment: Alignment) -> None:
    for ids, logprobs, _, _, kept, _ in sample.segments:
        if logprobs is not None and len(logprobs) != len(ids):
            raise ValueError(f"sample {sample.name}: {len(logprobs)} log-probabilities for {len(ids)} sampled tokens")
        if kept is not None and len(kept) != len(ids):
            raise ValueError(f"sample {sample.name}: kept entries of {len(kept)} tokens for {len(ids)} sampled tokens")
    if not sample.num_prompt_tokens:
        raise ValueError(f"sample {sample.name}: the prompt is empty; it needs at least one token")
    if _round_up(num, alignment.sequence) > capacity:
        raise SequenceTooLongError(
            f"sample {sample.name} has {num} tokens and does not fit in a microbatch of {max_tokens} tokens (in "
            f"multiples of {alignment.microbatch}). Raise optim.max_tokens_per_microbatch to at least "
            f"{_round_up(num, alignment.microbatch)} or lower sampling.max_completion_tokens"
        )


def _routed_shape(samples: Sequence[Sample]) -> tuple[int, int] | None:
    """(layers, top_k) of the recorded experts. All samples or none must have them."""
    recorded = [sample for sample in samples if sample.routed_experts is not None]
    if not recorded:
        return None
    shape = recorded[0].routed_experts.shape[1:]
    for sample in samples:
        actual = None if sample.routed_experts is None else sample.routed_experts.shape
        expected = (sample.num_tokens - 1, *shape)
        if actual != expected:
            raise ValueError(
                f"sample {sample.name}: routed experts of shape {actual}, expected {expected} "
                f"(tokens - 1, layers, top_k), as in sample {recorded[0].name}"
            )
    return shape


def _split(num: int, num_parts: int) -> list[range]:
    """Split 0 to ``num`` - 1 into consecutive non-empty parts whose sizes differ by at most one."""
    num_parts = min(num_parts, num)
    bounds = [num * part // num_parts for part in range(num_parts + 1)] if num_parts else []
    return list(itertools.starmap(range, itertools.pairwise(bounds)))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
