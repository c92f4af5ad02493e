"""The cache of absorbed latent attention (``latent_layers.py``) on a GPU, which ``kernels/triton/latent.py`` reads.

Runs in every worker of an exact engine whose model has latent attention. One kernel computes decoded tokens, prompts
and parts of prompts, so that a token's bits do not depend on the batch.
"""

from typing import Any, ClassVar

from torch import Tensor
from vllm import _custom_ops
from vllm.v1.attention.backend import AttentionImpl
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionMetadata

from megatron_fp8rl.kernels.triton.latent import attend
from megatron_fp8rl.rollout.vllm_plugin.patches_attention import Metadata
from megatron_fp8rl.upstream import patches


@patches(
    "vllm",
    why="reads FlashAttention's metadata, and writes the cache by concat_and_cache_mla",
    remove_when="absorb_projections is removed",
    optional=True,
)
class LatentAttention(AttentionImpl):
    supports_quant_query_input = False

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None, *args: Any):
        # vLLM's base class sets nothing: its constructor raises
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, num_kv_heads

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlashAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Fill and return ``output`` [tokens, H, L] for query [tokens, H, L + R] and the keys in ``kv_cache``."""
        if attn_metadata is None:  # while vLLM measures memory
            return output.fill_(0)
        attend(
            query.contiguous(),
            kv_cache.squeeze(1),
            attn_metadata.block_table,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            attn_metadata.max_query_len,
            self.scale,
            output,
        )
        return output

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor):
        latent, rotated = key.squeeze(1).split([value.shape[-1], key.shape[-1] - value.shape[-1]], dim=-1)
        _custom_ops.concat_and_cache_mla(latent, rotated, kv_cache.squeeze(1), slot_mapping, "auto", layer._k_scale)


@patches(
    "vllm",
    why="vLLM asks a backend's class for LatentAttention, and for a cache that has keys only",
    remove_when="absorb_projections is removed",
    optional=True,
)
class LatentBackend(FlashAttentionBackend):
    supported_kv_cache_dtypes: ClassVar = ["auto", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[LatentAttention]:
        return LatentAttention

    @staticmethod
    def get_builder_cls() -> type[Metadata]:
        return Metadata

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, num_kv_heads, block_size, head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (0, 1, 2, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return True
