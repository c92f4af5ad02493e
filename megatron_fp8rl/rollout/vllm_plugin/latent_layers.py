"""The engine's latent attention in exact runs: absorbed, over a cache of latent vectors.

With VLLM_MLA_DISABLE vLLM projects keys and values up and caches them. Here the same layer computes
``kernels/latent.py`` for prompts, parts of prompts and decoded tokens, as the trainer does. A backend writes and reads
the cache, [blocks, 1, tokens of a block, L + R], L latent and R rotated features: ``cpu/cpu_latent.py`` on a CPU,
``patches_latent.py`` on a GPU.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.deepseek_v2 import DeepseekV2Attention
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import KVCacheSpec

from megatron_fp8rl.kernels import float64, latent
from megatron_fp8rl.kernels.blockwise import dequantize_weight
from megatron_fp8rl.precision.formats import SCALE_SUFFIX
from megatron_fp8rl.upstream import patches


@patches(
    "vllm",
    why="overrides get_kv_cache_spec, which counts memory for values",
    remove_when="absorb_projections is removed",
    optional=True,
)
class KeysOnlyAttention(Attention):
    """Attention whose values are the first features of its keys, so that they need no memory. On a GPU it has the
    values of the quantized ``kv_b_proj`` in BF16, which ``kernel_weights.py`` refreshes: ``up_weight``."""

    linear: tuple[Any]  # kv_b_proj; in a tuple, because it is not a part of this module

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        super().process_weights_after_loading(act_dtype)
        (linear,) = self.linear
        if linear.weight.is_cuda:
            self.up_weight = _dequantized(linear).to(act_dtype)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        return dataclasses.replace(super().get_kv_cache_spec(vllm_config), head_size_v=0)


@patches(
    "vllm",
    why="replaces DeepseekV2Attention.forward and its attention, which project every token's keys and values up",
    remove_when="vLLM decodes and prefills by one absorbed form whose bits do not depend on the batch",
    optional=True,
)
def absorb_projections(backend: type[AttentionBackend]) -> None:
    """Make latent attention of this process cache latent vectors and compute the absorbed form."""
    build = DeepseekV2Attention.__init__

    def build_absorbed(self: DeepseekV2Attention, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        expanded = self.attn
        config = get_current_vllm_config()
        del config.compilation_config.static_forward_context[expanded.layer_name]
        self.attn = KeysOnlyAttention(
            self.num_local_heads,
            self.kv_lora_rank + self.qk_rope_head_dim,
            self.scaling,
            num_kv_heads=1,
            cache_config=config.cache_config,
            quant_config=expanded.quant_config,
            prefix=expanded.layer_name,
            attn_backend=backend,
            head_size_v=self.kv_lora_rank,
        )
        self.attn.linear = (self.kv_b_proj,)

    DeepseekV2Attention.__init__, DeepseekV2Attention.forward = build_absorbed, _forward


def _forward(
    self: DeepseekV2Attention, positions: Tensor, hidden_states: Tensor, llama_4_scaling: Tensor | None
) -> Tensor:
    if llama_4_scaling is not None:
        raise ValueError(f"{self.attn.layer_name}: scaled queries are not supported in the absorbed form")
    if self.q_lora_rank is None:
        query = self.q_proj(hidden_states)[0]
    else:
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)[0]))[0]
    query = query.view(-1, self.num_local_heads, self.qk_head_dim)
    plain, turning = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
    compressed = self.kv_a_proj_with_mqa(hidden_states)[0]
    mixed, key = compressed.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
    mixed = self.kv_a_layernorm(mixed)
    cos, sin = self.rotary_emb.cos_sin_cache[positions.flatten()].float()[:, None].chunk(2, dim=-1)

    def rotated(x: Tensor) -> Tensor:  # neighbors are pairs; both halves of the result, as in the trainer
        return float64.rotate_halves(torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1), cos, sin)

    weight = getattr(self.kv_b_proj, "dequantized_weight", self.kv_b_proj.weight)
    weight = getattr(self.attn, "up_weight", weight)
    query = torch.cat([latent.absorb(plain, weight), rotated(turning)], dim=-1)
    key = torch.cat([mixed, rotated(key[:, None])[:, 0]], dim=-1)
    out = self.attn(query.flatten(1), key, mixed).view(-1, self.num_local_heads, self.kv_lora_rank)
    return self.o_proj(latent.project_up(out, weight, self.v_head_dim).flatten(1))[0]


def _dequantized(linear: Any) -> Tensor:
    """float32 [N, K]: a weight in blocks times its scales; or the weight, if it has no scales."""
    scales = getattr(linear, f"weight{SCALE_SUFFIX}", None)
    if scales is None:
        return linear.weight.float()
    return dequantize_weight(linear.weight, scales)
