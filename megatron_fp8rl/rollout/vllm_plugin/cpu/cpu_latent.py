"""The cache of absorbed latent attention (``latent_layers.py``) on a CPU; ``cpu_attention.py`` writes and reads it."""

from typing import Any

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionMetadataBuilder

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
