"""Phi in an engine: vLLM's class of Llama, whose matrices have names of their own, and longrope rounded once.

Imports vLLM's model, so that vLLM loads this module only for such an engine.
"""

import math

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models import llama

from megatron_fp8rl.upstream import patches


@patches(
    "vllm",
    why="vLLM's class of Phi-3 takes its matrices to be combined in quantization_config, so single names in BF16 would "
    "be read as FP8",
    remove_when="its packed_modules_mapping names q_proj, k_proj, v_proj, gate_proj and up_proj",
    optional=True,
)
class Phi3ForCausalLM(llama.LlamaForCausalLM):
    """Reads single matrices, as a publication sends them, and combined ones."""


@patches(
    "vllm",
    why="Phi3LongRoPEScaledRotaryEmbedding rotates in BF16 and rounds every product; the trainer and vLLM's other "
    "rotary embeddings compute in FP32 and round once",
    remove_when="it is a RotaryEmbedding",
    optional=True,
)
class LongRope(RotaryEmbedding):
    """The same frequencies and factors: the long list if ``max_model_len`` exceeds the original length."""

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        original_max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
        short_factor: list[float],
        long_factor: list[float],
        short_mscale: float | None = None,
        long_mscale: float | None = None,
    ) -> None:
        original = original_max_position_embeddings
        is_long = get_current_vllm_config().model_config.max_model_len > original
        magnitude = long_mscale if is_long else short_mscale
        if magnitude is None:
            growth = math.log(max(1.0, max_position_embeddings / original)) / math.log(original)
            magnitude = math.sqrt(1 + growth)
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype, init_cache=False)
        divisors = torch.tensor(long_factor if is_long else short_factor, dtype=torch.float)
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float) / rotary_dim
        frequencies = 1.0 / (divisors * base**exponents)
        angles = torch.arange(max_position_embeddings, dtype=torch.float)[:, None] * frequencies
        cache = torch.cat([angles.cos() * magnitude, angles.sin() * magnitude], dim=-1)
        self.register_buffer("cos_sin_cache", cache.to(dtype), persistent=False)


rotary_embedding.Phi3LongRoPEScaledRotaryEmbedding = LongRope  # get_rope calls it by this name
