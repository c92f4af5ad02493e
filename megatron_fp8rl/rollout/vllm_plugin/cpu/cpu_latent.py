"""The engine's latent attention on a CPU in exact runs: absorbed, over a cache of latent vectors.

vLLM has no latent attention on a CPU. With VLLM_MLA_DISABLE it projects keys and values up and caches them. Here the
same layer computes ``kernels/latent.py`` for prompts, parts of prompts and decoded tokens, as the trainer does.
``cpu_attention.py`` writes and reads the cache: [blocks, 1, tokens of a block, L + R], L latent and R rotated features.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.deepseek_v2 import DeepseekV2Attention
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import KVCacheSpec

from megatron_fp8rl.kernels import float64, latent
from megatron_fp8rl.upstream import patches

_ANY_HEAD_DIM = 128  # vLLM plans its kernel's work, which does not run here, for some sizes only


class _Builder(CPUAttentionMetadataBuilder):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.head_dim = _ANY_HEAD_DIM


@patches(
    "vllm",
    why="overrides the layout of a CPU's KV cache, which has a value of the same size for each key",
    remove_when="vLLM has absorbed latent attention on a CPU",
    optional=True,
)
class KeysOnlyBackend(CPUAttentionBackend):
    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return _Builder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, num_kv_heads, block_size, head_size


@patches(
    "vllm",
    why="overrides get_kv_cache_spec, which counts memory for values",
    remove_when="vLLM has absorbed latent attention on a CPU",
    optional=True,
)
class KeysOnlyAttention(Attention):
    """Attention whose values are the first features of its keys, so that they need no memory."""

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        return dataclasses.replace(super().get_kv_cache_spec(vllm_config), head_size_v=0)


@patches(
    "vllm",
    why="replaces DeepseekV2Attention.forward and its attention, which project every token's keys and values up",
    remove_when="vLLM has absorbed latent attention on a CPU, with prefix caching and chunked prefill",
    optional=True,
)
def absorb_projections() -> None:
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
            attn_backend=KeysOnlyBackend,
            head_size_v=self.kv_lora_rank,
        )

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
    query = torch.cat([latent.absorb(plain, weight), rotated(turning)], dim=-1)
    key = torch.cat([mixed, rotated(key[:, None])[:, 0]], dim=-1)
    out = self.attn(query.flatten(1), key, mixed).view(-1, self.num_local_heads, self.kv_lora_rank)
    return self.o_proj(latent.project_up(out, weight, self.v_head_dim).flatten(1))[0]
