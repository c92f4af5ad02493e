"""Causal attention over packed sequences, with rotary embedding, grouped queries and context parallelism.

In: query, key and value of one packed microbatch, as Megatron-Core's SelfAttention hands them over, without rotary
embedding. Out: attention outputs in the same order. Runs on every trainer rank.

Queries and keys are rotated here because positions are known here: a packed token's position follows from the sequence
lengths, and one table serves all layers.

Sequences of similar length are attended together, as a batch. Under context parallelism each sequence is cut into
2 * cp chunks of which rank r holds chunks r and 2 * cp - 1 - r; keys and values are gathered, queries stay.

Shapes: T = packed tokens of this rank, L = longest sequence of a batch, H = query heads, G = key and value heads,
D = features of a query or key head, V = features of a value head.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_fp8rl.trainer.rotary import Rotary, rotary_table


@dataclass(frozen=True)
class Batch:
    """Sequences of similar length, as rows of the packed tensors. Shorter ones repeat a row at their end."""

    query_rows: Tensor  # int64 [n, Lq] rows of this rank's tokens
    key_rows: Tensor  # int64 [n, L] rows of the gathered tokens
    mask: Tensor | None  # bool [n, 1, Lq, L]; None is the causal mask of equal lengths


@dataclass(frozen=True)
class PackPlan:
    """How to batch the sequences of one microbatch."""

    positions_T: Tensor  # int64 [T] within the sequence, of this rank's tokens
    batches: tuple[Batch, ...]
    restore_T: Tensor | None  # int64 [T] row of each token in the concatenated batches; None when already in order


def _zigzag(length: int, cp_size: int, rank: int) -> Tensor:
    """Positions of one sequence that a context-parallel rank holds, int64 [length / cp_size]."""
    chunks = torch.arange(length).chunk(2 * cp_size)
    return torch.cat([chunks[rank], chunks[2 * cp_size - 1 - rank]]) if cp_size > 1 else torch.arange(length)


def _groups(lengths: tuple[int, ...]) -> list[list[int]]:
    """Indices of sequences whose lengths differ by less than a factor of sqrt(2)."""
    groups: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        groups.setdefault(math.ceil(2 * math.log2(length)), []).append(index)
    return list(groups.values())


@functools.lru_cache(maxsize=32)
def plan_pack(lengths: tuple[int, ...], cp_size: int, cp_rank: int) -> PackPlan:
    """Plan for sequences of these padded lengths; each must be a multiple of 2 * cp_size under context parallelism."""
    if cp_size > 1 and any(length % (2 * cp_size) for length in lengths):
        raise ValueError(f"packed sequences of {lengths} tokens do not divide into {2 * cp_size} chunks each")
    starts = torch.tensor((0, *lengths)).cumsum(0).tolist()
    num_local = starts[-1] // cp_size
    # Row in the gathered tensors (rank after rank) of every packed position.
    gathered = torch.empty(starts[-1], dtype=torch.int64)
    for rank in range(cp_size):
        held = torch.cat([start + _zigzag(n, cp_size, rank) for start, n in zip(starts, lengths)])
        gathered[held] = torch.arange(num_local) + rank * num_local
    positions = [_zigzag(n, cp_size, cp_rank) for n in lengths]
    batches, order = [], []
    for group in _groups(lengths):
        longest = max(lengths[i] for i in group)
        # Clamping repeats a sequence's last row; no query of the sequence sees it, and its own output is dropped.
        offsets_L = torch.arange(longest)
        n = torch.tensor([lengths[i] for i in group])[:, None]
        start = torch.tensor([starts[i] for i in group])[:, None]
        key_rows = gathered[start + torch.minimum(offsets_L, n - 1)]
        local_L = torch.arange(longest // cp_size)
        query_rows = start // cp_size + torch.minimum(local_L, n // cp_size - 1)
        mask = None
        if cp_size > 1:
            query_positions = torch.stack([_fit(positions[i], longest // cp_size) for i in group])
            mask = (offsets_L <= query_positions[..., None])[:, None]
        batches.append(Batch(query_rows, key_rows, mask))
        order.append(torch.where(local_L < n // cp_size, query_rows, -1).flatten())
    rows = torch.cat(order)
    restore = torch.empty(num_local, dtype=torch.int64)
    restore[rows[rows >= 0]] = torch.arange(rows.numel())[rows >= 0]
    in_order = rows.numel() == num_local and torch.equal(restore, torch.arange(num_local))
    return PackPlan(torch.cat(positions), tuple(batches), None if in_order else restore)


def _fit(x: Tensor, length: int) -> Tensor:
    """x filled up to ``length`` with its last value."""
    return F.pad(x, (0, length - x.numel()), value=int(x[-1]))


class PackedAttention(MegatronModule):
    """Core attention of Megatron-Core's SelfAttention, for ``qkv_format="thd"`` only."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, *, rotary: Rotary, scale: float,
                 window: int | None = None, pg_collection=None, **unused):  # fmt: skip
        super().__init__(config=config)
        self.rotary, self.softmax_scale, self.window = rotary, scale, window
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type=None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """query [T, H, D], key [T, G, D] and value [T, G, V] -> [T, H * V]."""
        if packed_seq_params is None or attention_bias is not None:
            raise ValueError("attention takes packed sequences without bias; pass PackedSeqParams(qkv_format='thd')")
        plan = self._plan(packed_seq_params)
        query, key = self._rotate(query, key, plan)
        num_tokens, dtype = query.shape[0], query.dtype
        if query.device.type == "cpu":
            # torch's attention for BF16 on CPUs is two to three times slower backward, and less exact.
            query, key, value = query.float(), key.float(), value.float()
        if self.cp_group.size() > 1:
            key, value = (
                gather_from_sequence_parallel_region(x.contiguous(), group=self.cp_group) for x in (key, value)
            )
        parts = [self._attend(query, key, value, batch) for batch in plan.batches]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        if plan.restore_T is not None:
            out = out.index_select(0, plan.restore_T.to(out.device))
        return out.to(dtype).reshape(num_tokens, -1)

    def _plan(self, packed: PackedSeqParams) -> PackPlan:
        cu_seqlens = packed.cu_seqlens_q_padded if packed.cu_seqlens_q_padded is not None else packed.cu_seqlens_q
        lengths = tuple(n for n in cu_seqlens.diff().tolist() if n)
        if self.window is not None and max(lengths) > self.window:
            raise ValueError(
                f"a packed sequence has {max(lengths)} tokens, and attention over a window (model.sliding_window = "
                f"{self.window}) is computed only for sequences that fit into it; use shorter sequences"
            )
        return plan_pack(lengths, self.cp_group.size(), self.cp_group.rank())

    def _rotate(self, query: Tensor, key: Tensor, plan: PackPlan) -> tuple[Tensor, Tensor]:
        num_positions = 1 << int(plan.positions_T.max()).bit_length()  # few different tables as lengths vary
        table = rotary_table(num_positions, self.rotary, query.dtype)
        cos, sin = (x[plan.positions_T].to(query.device).float()[:, None] for x in table)
        return self.rotary.rotate(query, cos, sin), self.rotary.rotate(key, cos, sin)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, batch: Batch) -> Tensor:
        """[n * Lq, H, V], in the order of the batch's sequences."""
        q, k, v = (
            x.index_select(0, rows.flatten().to(x.device)).view(*rows.shape, *x.shape[1:]).transpose(1, 2)
            for x, rows in ((query, batch.query_rows), (key, batch.key_rows), (value, batch.key_rows))
        )
        mask = None if batch.mask is None else batch.mask.to(q.device)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.softmax_scale, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(0, 1)
