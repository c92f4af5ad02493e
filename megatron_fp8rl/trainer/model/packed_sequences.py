"""Attention plans for the sequences of one packed microbatch, computed once for all layers.

Plans are positions and row indices on the compute device. Lengths are on the host, so nothing synchronizes with a GPU.
Under context parallelism each sequence is split into 2 * cp chunks; rank r gets chunks r and 2 * cp - 1 - r. Keys and
values are gathered in rank order; queries are not.

A rectangular kernel gets batches of sequences of similar length; a varlen kernel gets segments. A segment is a run of
queries with all keys up to the last query: a whole sequence, or one chunk and everything before its end.

Shapes: T = packed tokens of this rank, L = longest sequence of a batch, K = keys of all segments. In :class:`Routes`: R
= tokens that this rank routes, L = layers of the whole model, K = experts of a token.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

CPU = torch.device("cpu")
PAGE_TOKENS = 16  # of vLLM's KV cache


def upload(x: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device without synchronizing with it."""
    if device.type == "cpu" or x.is_cuda or not x.numel():
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, kw_only=True)
class Routes:
    """Expert ids of the tokens that this rank routes in one pass of one microbatch."""

    rows_R: Tensor  # int64 [R] positions in the packed microbatch
    recorded_RLK: Tensor | None  # int16 [R, L, K]; negative without a record
    replays: bool  # False: the routers choose, and the recorded experts are only compared
    agreement_L2: Tensor | None = None  # int64 [L, 2] tokens that agree and tokens compared; updated in place
    own: dict[int, Tensor] | None = None  # layer -> int64 [R, K]; if not None, filled with the routers' choices

    def experts(self, layer: int, router_RK: Tensor) -> Tensor:
        """The experts that a layer of the whole model uses, int64 [R, K]; ``router_RK`` are its router's choice.

        A token without a record keeps its router's choice. Equal ids are no record: an engine returns zeros for tokens
        that it has not routed.
        """
        if self.own is not None:
            self.own[layer] = router_RK
        if self.recorded_RLK is None:
            return router_RK
        recorded_RK = self.recorded_RLK[:, layer].long()
        sorted_RK = recorded_RK.sort(dim=1).values
        recorded_R = (sorted_RK[:, 0] >= 0) & (sorted_RK.diff(dim=1) > 0).all(dim=1)
        if self.agreement_L2 is not None:
            same_R = (sorted_RK == router_RK.sort(dim=1).values).all(dim=1)
            self.agreement_L2[layer] += torch.stack([(same_R & recorded_R).sum(), recorded_R.sum()])
        return torch.where(recorded_R[:, None], recorded_RK, router_RK) if self.replays else router_RK


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron-Core's PackedSeqParams plus host copies that avoid reading back from the device, and router replay."""

    lengths: tuple[int, ...] = ()  # padded, of the whole microbatch
    is_token_T: Tensor | None = None  # bool [T], False at padding, for this rank's tokens
    routes: Routes | None = None  # experts to use, compare or record; None: every router chooses

    @classmethod
    def of(
        cls, cu_seqlens: Tensor, device: torch.device, is_token_T: Tensor | None = None, routes: Routes | None = None
    ) -> PackedSequences:
        """Create from the cumulative padded sequence lengths, int32 [S + 1] on the host."""
        lengths = tuple(n for n in cu_seqlens.diff().tolist() if n)
        on_device = upload(cu_seqlens, device)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=on_device,
            cu_seqlens_kv=on_device,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
            lengths=lengths,
            is_token_T=None if is_token_T is None else upload(is_token_T, device),
            routes=routes,
        )


def lengths_of(packed: PackedSeqParams) -> tuple[int, ...]:
    """Padded lengths of the sequences; synchronizes with the device unless ``packed`` is :class:`PackedSequences`."""
    if isinstance(packed, PackedSequences):
        return packed.lengths
    cu_seqlens = packed.cu_seqlens_q_padded if packed.cu_seqlens_q_padded is not None else packed.cu_seqlens_q
    return tuple(n for n in cu_seqlens.diff().tolist() if n)


@dataclass(frozen=True)
class Batch:
    """Row indices of sequences of similar length. Shorter sequences repeat their last row as padding."""

    query_rows: Tensor  # int64 [n, Lq] rows of this rank's tokens
    key_rows: Tensor  # int64 [n, L] rows of the gathered tokens
    mask: Tensor | None  # bool [n or 1, 1, Lq, L]; None for the causal mask with Lq = L


@dataclass(frozen=True)
class Batches:
    parts: tuple[Batch, ...]
    restore_T: Tensor | None  # int64 [T] row of each token in the concatenated batches; None if already in order


@dataclass(frozen=True)
class Pages:
    """The keys of all segments in pages, as in an engine's KV cache; a segment's last page repeats its last row."""

    rows: Tensor  # int64 [P * PAGE_TOKENS] rows of the keys
    table: Tensor  # int32 [n, most pages of a segment]
    num_keys: Tensor  # int32 [n]


@dataclass(frozen=True)
class Segments:
    """Plan of all sequences for a varlen kernel: the causal mask is aligned to the bottom right of a segment."""

    cu_queries: Tensor  # int32 [n + 1] starts of the segments in this rank's queries, and T
    cu_keys: Tensor  # int32 [n + 1] starts of the segments in the keys, and K
    max_queries: int
    max_keys: int
    key_rows: Tensor | None  # int64 [K] rows of the gathered tokens; None if keys are in order and as many as queries
    key_lengths: tuple[int, ...]  # n

    @property
    def is_square(self) -> bool:
        return self.key_rows is None

    @cached_property
    def pages(self) -> Pages:
        num_pages = [-(-n // PAGE_TOKENS) for n in self.key_lengths]
        rows = [
            (start + torch.arange(pages * PAGE_TOKENS)).clamp(max=start + n - 1)
            for start, n, pages in zip(_starts(self.key_lengths), self.key_lengths, num_pages)
        ]
        first = torch.tensor(_starts(num_pages)[:-1])
        table = first[:, None] + torch.arange(max(num_pages)).clamp(max=torch.tensor(num_pages)[:, None] - 1)
        device = self.cu_keys.device
        return Pages(
            rows=upload(torch.cat(rows), device),
            table=upload(table.int(), device),
            num_keys=upload(torch.tensor(self.key_lengths, dtype=torch.int32), device),
        )


@dataclass(frozen=True, eq=False)  # compared by identity: a plan is a cache key
class PackPlan:
    lengths: tuple[int, ...]
    cp_size: int
    cp_rank: int
    device: torch.device
    positions_T: Tensor  # int64 [T] position within the sequence, for this rank's tokens

    @cached_property
    def _batches(self) -> dict[int | None, Batches]:
        return {}

    def batches(self, window: int | None = None) -> Batches:
        """The batches of a rectangular kernel; ``window``: a token attends to at most so many, with itself."""
        if window not in self._batches:
            self._batches[window] = self._make_batches(window)
        return self._batches[window]

    def _make_batches(self, window: int | None) -> Batches:
        lengths, cp_size = self.lengths, self.cp_size
        starts, gathered = _starts(lengths), _gathered_rows(lengths, cp_size)
        positions = [_zigzag(n, cp_size, self.cp_rank) for n in lengths]
        parts, order = [], []
        for group in _groups(lengths):
            longest = max(lengths[i] for i in group)
            # Clamping repeats a sequence's last row; no query of the sequence attends to it, and its output is dropped.
            offsets_L = torch.arange(longest)
            n = torch.tensor([lengths[i] for i in group])[:, None]
            start = torch.tensor([starts[i] for i in group])[:, None]
            key_rows = gathered[start + torch.minimum(offsets_L, n - 1)]
            local_L = torch.arange(longest // cp_size)
            query_rows = start // cp_size + torch.minimum(local_L, n // cp_size - 1)
            mask = None
            if cp_size > 1 or (window is not None and window < longest):
                queries = local_L[None]
                if cp_size > 1:
                    queries = torch.stack([_fit(positions[i], longest // cp_size) for i in group])
                mask = offsets_L <= queries[..., None]
                if window is not None:
                    mask &= offsets_L > queries[..., None] - window
                mask = mask[:, None].to(self.device)
            parts.append(Batch(query_rows.to(self.device), key_rows.to(self.device), mask))
            order.append(torch.where(local_L < n // cp_size, query_rows, -1).flatten())
        rows = torch.cat(order)
        num_local = starts[-1] // cp_size
        restore = torch.empty(num_local, dtype=torch.int64)
        restore[rows[rows >= 0]] = torch.arange(rows.numel())[rows >= 0]
        in_order = rows.numel() == num_local and torch.equal(restore, torch.arange(num_local))
        return Batches(tuple(parts), None if in_order else restore.to(self.device))

    @cached_property
    def segments(self) -> Segments:
        if self.cp_size == 1:
            queries = keys = list(self.lengths)
            key_rows = None
        else:
            chunks = [n // (2 * self.cp_size) for n in self.lengths]
            local_chunks = (self.cp_rank, 2 * self.cp_size - 1 - self.cp_rank)  # in a rank's token order
            queries = [chunk for chunk in chunks for _ in local_chunks]
            keys = [chunk * (index + 1) for chunk in chunks for index in local_chunks]
            gathered = _gathered_rows(self.lengths, self.cp_size)
            starts = [start for start in _starts(self.lengths)[:-1] for _ in local_chunks]
            key_rows = torch.cat([gathered[start : start + n] for start, n in zip(starts, keys, strict=True)])
        return Segments(
            cu_queries=upload(torch.tensor(_starts(queries), dtype=torch.int32), self.device),
            cu_keys=upload(torch.tensor(_starts(keys), dtype=torch.int32), self.device),
            max_queries=max(queries),
            max_keys=max(keys),
            key_rows=None if key_rows is None else upload(key_rows, self.device),
            key_lengths=tuple(keys),
        )


@functools.lru_cache(maxsize=32)
def plan_pack(lengths: tuple[int, ...], cp_size: int, cp_rank: int, device: torch.device = CPU) -> PackPlan:
    """Plan sequences with these padded lengths, which context parallelism needs to be multiples of 2 * cp_size."""
    if cp_size > 1 and any(length % (2 * cp_size) for length in lengths):
        raise ValueError(f"packed sequences of {lengths} tokens do not divide into {2 * cp_size} chunks each")
    positions_T = torch.cat([_zigzag(n, cp_size, cp_rank) for n in lengths])
    return PackPlan(lengths, cp_size, cp_rank, device, upload(positions_T, device))


def _starts(lengths: Sequence[int]) -> list[int]:
    return torch.tensor((0, *lengths)).cumsum(0).tolist()


def _zigzag(length: int, cp_size: int, rank: int) -> Tensor:
    """Positions of one sequence on a context-parallel rank, int64 [length / cp_size]."""
    chunks = torch.arange(length).chunk(2 * cp_size)
    return torch.cat([chunks[rank], chunks[2 * cp_size - 1 - rank]]) if cp_size > 1 else torch.arange(length)


def _gathered_rows(lengths: tuple[int, ...], cp_size: int) -> Tensor:
    """Row of every packed position in the gathered tensors (in rank order), int64 [T * cp_size]."""
    starts = _starts(lengths)
    num_local = starts[-1] // cp_size
    gathered = torch.empty(starts[-1], dtype=torch.int64)
    for rank in range(cp_size):
        local = torch.cat([start + _zigzag(n, cp_size, rank) for start, n in zip(starts, lengths)])
        gathered[local] = torch.arange(num_local) + rank * num_local
    return gathered


def _groups(lengths: tuple[int, ...]) -> list[list[int]]:
    """Indices of sequences whose lengths differ by less than a factor of sqrt(2)."""
    groups: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        groups.setdefault(math.ceil(2 * math.log2(length)), []).append(index)
    return list(groups.values())


def _fit(x: Tensor, length: int) -> Tensor:
    """Pad x to ``length`` with its last value."""
    return F.pad(x, (0, length - x.numel()), value=int(x[-1]))
