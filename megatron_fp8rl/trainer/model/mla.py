"""Multi-head latent attention (MLA, arXiv:2412.19437).

Down-projections into the latent space are replicated on every tensor-parallel rank and applied to the rank's tokens;
up-projections are sharded by heads. Core attention rotates the keys; all heads share one rotated part.

In exact runs the forward pass is absorbed, as in the engine (``kernels/latent.py``). Its gradients are those of the
expanded form, whose forward pass runs only where gradients are needed.

Megatron-Core 0.19's MLA layer without Transformer Engine cannot be used. The gradient of the keys' shared rotated part
is not summed over tensor-parallel ranks (relative errors of 11 to 38 % in ``linear_kv_down_proj``). It rotates by the
length of the pack. It pads values to the size of keys, which truncates larger values.

Shapes: T = packed tokens, S = T / tensor-parallel size, H = heads of this rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from megatron_fp8rl.kernels import latent
from megatron_fp8rl.trainer.compat.megatron import LatentAttentionBase
from megatron_fp8rl.trainer.model.linear import ColumnLinear, LinearSpec, ReplicatedLinear, RMSNorm, rounded_weight
from megatron_fp8rl.trainer.model.packed_sequences import PAGE_TOKENS, Segments
from megatron_fp8rl.trainer.model.router import Replaced
from megatron_fp8rl.trainer.model.weight_cache import WeightCache
from megatron_fp8rl.upstream import patches


def attend_over_latents(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float, *unused: Any
) -> Tensor:
    """On a GPU: query [T, H, L + R], key [K, 1, L + R] and its first features, value [K, 1, L] -> [T, H, L]."""
    from megatron_fp8rl.kernels.triton.latent import attend  # imports Triton

    pages = segments.pages
    cache = key.squeeze(1).index_select(0, pages.rows).unflatten(0, (-1, PAGE_TOKENS))
    out = query.new_empty(*query.shape[:2], value.shape[-1])
    queries = query.contiguous(), cache, pages.table, segments.cu_queries
    attend(*queries, pages.num_keys, segments.max_queries, scale, out)
    return out


@dataclass
class LatentSubmodules:
    core_attention: Any
    linear_proj: Any
    absorbed: Any = None  # attention of the absorbed form; None: the forward pass is expanded


@patches(
    "megatron-core",
    why="overrides get_query_key_value_tensors: column-parallel down-projections gather their outputs, and the "
    "gradient of the shared rotated part of the keys is not summed over tensor-parallel ranks",
    remove_when="down-projections are replicated without Transformer Engine, too",
)
class LatentAttention(LatentAttentionBase):
    """Latent self-attention with the parameter names of Megatron-Core's MLASelfAttention."""

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: LatentSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        linear: Callable[[str], LinearSpec],
        norm: Callable[..., RMSNorm],
        **kwargs: Any,
    ):
        """``linear`` returns the spec of a linear by name; ``norm`` builds a norm."""
        super().__init__(
            config,
            submodules,
            layer_number,
            attn_mask_type,
            attention_type="self",
            pg_collection=pg_collection,
            **kwargs,
        )
        heads, hidden, tp_group = config.num_attention_heads, config.hidden_size, self.pg_collection.tp
        settings = dict(
            config=config, init_method=config.init_method, gather_output=False, bias=False, tp_group=tp_group
        )

        def column(name: str, size: int, features: int) -> ColumnLinear:
            return ColumnLinear(size, heads * features, spec=linear(name), **settings)

        def replicated(name: str, features: int) -> ReplicatedLinear:
            return ReplicatedLinear(hidden, features, config=config, tp_group=tp_group, spec=linear(name))

        if config.q_lora_rank is None:
            self.linear_q_proj = column("linear_q_proj", hidden, self.q_head_dim)
        else:
            self.linear_q_down_proj = replicated("linear_q_down_proj", config.q_lora_rank)
            self.q_layernorm = norm(config, config.q_lora_rank, eps=latent.NORM_EPS)
            self.linear_q_up_proj = column("linear_q_up_proj", config.q_lora_rank, self.q_head_dim)
        self.latent_and_rotated = (config.kv_lora_rank, config.qk_pos_emb_head_dim)
        self.linear_kv_down_proj = replicated("linear_kv_down_proj", sum(self.latent_and_rotated))
        self.kv_layernorm = norm(config, config.kv_lora_rank, eps=latent.NORM_EPS)
        self.key_and_value = (config.qk_head_dim, config.v_head_dim)
        self.absorbed = None
        if submodules.absorbed is not None:
            self.absorbed = submodules.absorbed(
                config, layer_number, attn_mask_type, "self", pg_collection=pg_collection
            )
            self.core_attention.is_cached = False  # it has gradients only
            self.up_cache = WeightCache()  # of the up-projection, in the values that its product reads
        self._latents: tuple[Tensor, Tensor] | None = None  # of the current forward pass, for the absorbed form
        self.linear_kv_up_proj = column("linear_kv_up_proj", config.kv_lora_rank, sum(self.key_and_value))

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        inference_context: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        """hidden [S, 1, hidden] -> query and key [T, H, qk_head_dim], not yet rotated, and value [T, H, v_head_dim].
        An absorbed pass without gradients has no values, and its keys are the rotated parts."""
        if self.config.q_lora_rank is None:
            query, _ = self.linear_q_proj(hidden_states)
        else:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)))
        mixed, rotated = self.linear_kv_down_proj(hidden_states).split(self.latent_and_rotated, dim=-1)
        mixed = self.kv_layernorm(mixed)
        if self.config.sequence_parallel:
            # Backward: each rank has the gradient through its heads only, so the slices are summed.
            rotated = gather_from_sequence_parallel_region(rotated, group=self.tp_group)
        num_heads = self.num_attention_heads_per_partition
        query = query.view(-1, num_heads, self.q_head_dim)
        if self.absorbed is not None:
            with torch.no_grad():
                self._latents = (self.linear_kv_up_proj.gathered(mixed), rotated)
            if not torch.is_grad_enabled():
                return query, rotated, None, None, None
        key_value, _ = self.linear_kv_up_proj(mixed)
        key, value = key_value.view(-1, num_heads, sum(self.key_and_value)).split(self.key_and_value, dim=-1)
        key = torch.cat([key, rotated.expand(-1, num_heads, -1)], dim=-1)
        return query, key, value, None, None

    def attend(self, query: Tensor, key: Tensor, value: Tensor | None, packed: PackedSeqParams | None) -> Tensor:
        """[T, H * v_head_dim]. A recomputed pass has no latents, and needs the graph of the expanded form only."""
        latents, self._latents = self._latents, None
        if latents is None:
            return super().attend(query, key, value, packed)
        out = self._absorbed(query, *latents, packed)
        if value is None or not torch.is_grad_enabled():
            return out
        return Replaced.apply(super().attend(query, key, value, packed), out)

    @torch.no_grad()
    def _absorbed(self, query: Tensor, mixed: Tensor, rotated: Tensor, packed: PackedSeqParams | None) -> Tensor:
        up, (size, num_values) = self.linear_kv_up_proj, self.key_and_value
        weight = self.up_cache.get((up.weight,), lambda: rounded_weight(up))
        plain, turning = query.split([size, query.shape[-1] - size], dim=-1)
        query = torch.cat([latent.absorb(plain, weight), turning], dim=-1)
        key = torch.cat([mixed, rotated], dim=-1)
        out = self.absorbed(query, key, mixed, packed_seq_params=packed)
        return latent.project_up(out.unflatten(1, (query.shape[1], -1)), weight, num_values).flatten(1)
