"""Causal attention over packed sequences with rotary embedding, grouped-query heads and context parallelism.

Queries and keys are rotated here, because this module has the sequence lengths, unless one kernel splits, norms and
rotates heads. Everything that depends only on lengths is computed once per microbatch, for all layers, on the device.

On a GPU a single varlen kernel processes all sequences. On a CPU, and for shapes without a varlen kernel, sequences of
similar length are processed as a batch. Under context parallelism keys and values are gathered; queries are not.

Shapes: T = packed tokens of this rank, H = query heads, G = key and value heads, D = features of a query or key head, V
= of a value head.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_fp8rl.kernels import float64
from megatron_fp8rl.kernels.backend import runs_triton
from megatron_fp8rl.kernels.kv_rounding import as_cached
from megatron_fp8rl.trainer.compat.megatron import EngineGate, has_forward_hooks
from megatron_fp8rl.trainer.model import attention_te
from megatron_fp8rl.trainer.model.linear import AllHeadsNorm, current_device
from megatron_fp8rl.trainer.model.packed_sequences import Batch, PackedSequences, PackPlan, lengths_of, plan_pack
from megatron_fp8rl.trainer.model.rotary import Rotary, rotary_table
from megatron_fp8rl.upstream import patches

# query, key, value, segments, softmax scale, scales of an FP8 KV cache, window, sinks (attention_te.attend)
Attend = Callable[..., Tensor]


@patches(
    "megatron-core",
    why="replaces Megatron-Core's core attention, which needs Transformer Engine for packed sequences",
    remove_when="DotProductAttention supports packed sequences and context parallelism",
)
class PackedAttention(MegatronModule):
    """Core attention of Megatron-Core's SelfAttention, for ``qkv_format="thd"`` only."""

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        *,
        rotary: Rotary,
        scale: float,
        window: int | None = None,
        has_sinks: bool = False,
        attend: Attend | None = None,
        has_fallback: bool = True,
        rounds_queries: bool = False,
        caches_keys_only: bool = False,
        pg_collection=None,
        **unused,
    ):
        """``has_sinks``: each head has a sink, a learned score without a value; not measured on GPUs yet.
        ``attend``: a varlen kernel for shapes that :func:`attention_te.supports`; None for torch's attention.
        Without ``has_fallback``, other shapes raise ValueError. ``rounds_queries``: to E4M3 if the cache is FP8.
        ``caches_keys_only``: values are the first features of keys, and rounded as these."""
        super().__init__(config=config)
        self.attend, self.has_fallback = attend, has_fallback
        self.rotary, self.softmax_scale, self.window = rotary, scale, window
        self.rounds_queries, self.caches_keys_only = rounds_queries, caches_keys_only
        self.is_cached = True  # whether engines cache these keys and values
        self.cp_group = pg_collection.cp
        self.layer = layer_number - 1  # index in the whole model, from 0
        self.amax: Tensor | None = None  # FP32 [3], running max of |q|, |k|, |v| while trainer/kv_scales measures
        self.cache_scales: Tensor | None = None  # FP32 [3] of the engines' FP8 KV cache; k, v are rounded as in it
        self.softmax_offset: Tensor | None = None  # [H], the score of each head's sink
        if has_sinks:
            self._tp_group = pg_collection.tp
            num_heads = config.num_attention_heads // self._tp_group.size()
            offset = torch.zeros(num_heads, dtype=config.params_dtype, device=current_device())
            self.softmax_offset = nn.Parameter(offset)
            set_tensor_model_parallel_attributes(self.softmax_offset, self._tp_group.size() > 1, 0, 1)
        self.takes_rotated = False  # whether queries and keys are rotated already

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
        plan = self._plan(packed_seq_params, query.device)
        if not self.takes_rotated:
            cos, sin = _cos_and_sin(plan, self.rotary, query.dtype)
            query, key = self.rotary.rotate(query, cos, sin), self.rotary.rotate(key, cos, sin)
        if self.amax is not None:
            self._observe((query, key, value), packed_seq_params)
        if self.cache_scales is not None:
            of_query, of_key, of_value = self.cache_scales
            query = as_cached(query, of_query) if self.rounds_queries else query
            key, value = as_cached(key, of_key), as_cached(value, of_key if self.caches_keys_only else of_value)
        num_tokens, dtype = query.shape[0], query.dtype
        if query.device.type == "cpu":  # as in the engine (kernels/float64.py)
            query, key, value = query.double(), key.double(), value.double()
        if self.cp_group.size() > 1:
            key, value = (
                gather_from_sequence_parallel_region(x.contiguous(), group=self.cp_group) for x in (key, value)
            )
        out = self._attend(query, key, value, plan)
        return out.to(dtype).reshape(num_tokens, -1)

    def split(
        self,
        mixed_TW: Tensor,
        num_groups: int,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        packed: PackedSeqParams,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated heads for :meth:`forward` from a fused projection: ``kernels/triton/rotate.split_heads``."""
        from megatron_fp8rl.kernels.triton import rotate  # imports Triton

        cos, sin = _cos_and_sin(self._plan(packed, mixed_TW.device), self.rotary, mixed_TW.dtype)
        return rotate.split_heads(mixed_TW, num_groups, norms, eps, cos, sin)

    def _plan(self, packed: PackedSeqParams, device: torch.device) -> PackPlan:
        return plan_pack(lengths_of(packed), self.cp_group.size(), self.cp_group.rank(), device)

    @torch.no_grad()
    def _observe(self, tensors: tuple[Tensor, Tensor, Tensor], packed: PackedSeqParams) -> None:
        """Update amax, excluding padding. Never reads back from the device."""
        largest = torch.stack([torch.linalg.vector_norm(x, math.inf, dim=(1, 2)) for x in tensors]).float()  # [3, T]
        if isinstance(packed, PackedSequences) and packed.is_token_T is not None:
            largest = largest.masked_fill(~packed.is_token_T, 0.0)
        torch.maximum(self.amax, largest.amax(dim=1), out=self.amax)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, plan: PackPlan) -> Tensor:
        """[T, H, V]: attention of this rank's queries over the gathered keys and values."""
        window = self.window if self.window is not None and self.window < max(plan.lengths) else None
        if self.attend is not None and query.device.type == "cuda":
            segments = plan.segments
            if self.caches_keys_only or attention_te.supports(query, key, value, segments, window, self.softmax_offset):
                if segments.key_rows is not None:
                    key, value = (x.index_select(0, segments.key_rows) for x in (key, value))
                settings = segments, self.softmax_scale, self.cache_scales, window, self.softmax_offset
                return self.attend(query, key, value, *settings)
            if not self.has_fallback:
                raise ValueError(
                    f"precision.kernels.attention = engine: cuDNN has no backward pass for "
                    f"queries {list(query.shape)}, keys {list(key.shape)} in {query.dtype} on this GPU. "
                    "Choose --precision.kernels.attention auto"
                )
        batches = plan.batches(window)
        parts = [self._attend_batch(query, key, value, batch) for batch in batches.parts]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out if batches.restore_T is None else out.index_select(0, batches.restore_T)

    def _attend_batch(self, query: Tensor, key: Tensor, value: Tensor, batch: Batch) -> Tensor:
        """[n * Lq, H, V] in the order of the batch's sequences."""
        q, k, v = (
            x.index_select(0, rows.flatten()).view(*rows.shape, *x.shape[1:])
            for x, rows in ((query, batch.query_rows), (key, batch.key_rows), (value, batch.key_rows))
        )
        if self.softmax_offset is not None:
            length, mask = q.shape[1], batch.mask
            mask = (
                torch.ones(1, length, length, dtype=torch.bool, device=q.device).tril() if mask is None else mask[:, 0]
            )
            return float64.attend(q, k, v, mask, self.softmax_scale, self.softmax_offset).flatten(0, 1)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if batch.mask is None or not q.is_cuda:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=batch.mask, is_causal=batch.mask is None, scale=self.softmax_scale, enable_gqa=True
            )
        else:
            # Not cuDNN, whose gradients under a mask can be NaN on Hopper (pytorch/pytorch issue 196678). The
            # memory-efficient kernel needs a key head for each query head.
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
            with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=batch.mask, scale=self.softmax_scale)
        return out.transpose(1, 2).flatten(0, 1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        if self.softmax_offset is None:
            return super().sharded_state_dict(prefix, sharded_offsets, metadata)
        groups = {"tp_group": self._tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        named, axes = {"softmax_offset": self.softmax_offset}, {"softmax_offset": 0}
        return make_sharded_tensors_for_checkpoint(named, prefix, axes, sharded_offsets, **groups)


@patches(
    "megatron-core",
    why="overrides get_query_key_value_tensors, which does not get the lengths of sequences, and forward, which does",
    remove_when="SelfAttention passes packed_seq_params to get_query_key_value_tensors",
)
class PackedSelfAttention(EngineGate, SelfAttention):
    """SelfAttention in which one kernel splits, norms and rotates heads. The kernel runs if ``splits_heads`` is set,
    tensors are BF16 on a GPU, and rotated pairs are the halves of a head. ``norms_all_heads``: one norm spans all query
    heads, and one all key heads, by ``norm``, or by PyTorch without it."""

    def __init__(
        self, *args: Any, splits_heads: bool = False, norms_all_heads: bool = False, norm: Any = None, **kwargs: Any
    ):
        super().__init__(*args, **kwargs)
        self.norms_all_heads = norms_all_heads
        if norms_all_heads:
            heads = self.num_attention_heads_per_partition, self.num_query_groups_per_partition
            sizes = [num * self.hidden_size_per_attention_head for num in heads]
            self.q_norm, self.k_norm = (AllHeadsNorm(self.config, size, self.pg_collection.tp, norm) for size in sizes)
        rotary, width = self.core_attention.rotary, self.hidden_size_per_attention_head
        is_halves = rotary.num_features == width and not rotary.interleaved and width.bit_count() == 1 and width >= 32
        self.splits_heads = splits_heads and is_halves and not norms_all_heads
        self._packed: PackedSeqParams | None = None

    def forward(
        self, hidden_states: Tensor, *args: Any, packed_seq_params: PackedSeqParams | None = None, **kwargs: Any
    ):
        """Collective over tensor-parallel ranks: [T, 1, hidden] -> ([T, 1, hidden], None)."""
        self._packed = packed_seq_params
        self.core_attention.takes_rotated = self._may_split(hidden_states)
        return super().forward(hidden_states, *args, packed_seq_params=packed_seq_params, **kwargs)

    def _may_split(self, hidden_states: Tensor) -> bool:
        norms = [] if self.q_layernorm is None else [self.q_layernorm, self.k_layernorm]
        is_whole = self.config.num_query_groups >= self.world_size  # a rank has whole groups of heads
        is_bf16 = runs_triton(hidden_states) and hidden_states.dtype == torch.bfloat16
        return (
            self.splits_heads and is_whole and is_bf16 and not any(map(has_forward_hooks, norms))
        )  # the kernel would not call hooks of the norms

    def get_query_key_value_tensors(self, hidden_states: Tensor, *args: Any, output_gate: bool = False, **kwargs: Any):
        if output_gate:
            return self._gated(hidden_states)
        if not self.core_attention.takes_rotated:
            query, key, value = super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
            return (self.q_norm(query), self.k_norm(key), value) if self.norms_all_heads else (query, key, value)
        mixed, _ = self.linear_qkv(hidden_states)
        norms = None if self.q_layernorm is None else (self.q_layernorm.weight, self.k_layernorm.weight)
        eps = 0.0 if self.q_layernorm is None else self.q_layernorm.eps
        groups = self.num_query_groups_per_partition
        heads = self.core_attention.split(mixed.flatten(0, 1), groups, norms, eps, self._packed)
        return tuple(x.unsqueeze(1) for x in heads)

    def _gated(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(query, key, value, gate), where the projection has a head's gate behind its query, as in checkpoints."""
        mixed, _ = self.linear_qkv(hidden_states)
        width = self.hidden_size_per_attention_head
        grouped = mixed.unflatten(-1, (self.num_query_groups_per_partition, -1))
        queries, key, value = grouped.split([grouped.shape[-1] - 2 * width, width, width], dim=-1)
        query, gate = queries.unflatten(-1, (-1, 2, width)).flatten(-4, -3).unbind(-2)
        return self.q_layernorm(query), self.k_layernorm(key), value, gate


@functools.lru_cache(maxsize=4)
def _cos_and_sin(plan: PackPlan, rotary: Rotary, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every token and pair, FP32 [T, 1, R / 2]. Shared by the layers of a microbatch."""
    num_positions = 1 << (max(plan.lengths) - 1).bit_length()  # power of two, to keep the number of tables small
    tables = rotary_table(num_positions, rotary, dtype, plan.device)
    cos, sin = (table.index_select(0, plan.positions_T).float()[:, None] for table in tables)
    return cos, sin
