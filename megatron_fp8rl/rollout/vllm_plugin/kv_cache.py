"""The scales of an engine's FP8 KV cache: set between two policies, and read back.

In: a model as vLLM holds it, and scales by layer from the trainer (trainer/kv_scales.py). Out: the scales that its
attention uses from now on. Runs in every engine worker; scales are per tensor, so all tensor-parallel workers hold the
same.

vLLM keeps each scale twice: in a buffer that GPU kernels read at run time, so that filling it in place reaches captured
CUDA graphs, and as a host float, which the CPU's kernel reads. Both are set. FlashInfer multiplies the floats into
constants at its first call and keeps them, so it is refused.

The content of the cache was written under the old scales and must not survive: call this while the engine is paused.
Pausing ends all requests and drops the prefix cache. vLLM resets scales to 1 when weights are reloaded and when a
sleeping cache wakes up, so they are set after either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from megatron_fp8rl.names.registry import layer_of
from megatron_fp8rl.rollout.vllm_plugin.patches import fill_kv_scales, has_kv_scales


def attention_layers(model: nn.Module) -> dict[int, nn.Module]:
    """vLLM's attention modules by layer: those with a KV cache and its scales."""
    layers = {}
    for path, module in model.named_modules():
        if has_kv_scales(module):
            number = layer_of(path)
            if number is None:
                raise ValueError(f"attention {path!r} has an FP8 KV cache and no layer number in its name")
            layers[number] = module
    return layers


@torch.inference_mode()
def set_kv_scales(model: nn.Module, scales: Mapping[int, Sequence[float]]) -> dict[int, list[float]]:
    """Set (query, key, value) of every layer; return what the kernels' buffers then hold.

    Raises ValueError if the layers are not those of the model, and RuntimeError for a cache without such scales.
    """
    layers = attention_layers(model)
    if set(layers) != set(scales):
        raise ValueError(f"KV scales came for layers {sorted(scales)}, and the engine has {sorted(layers)}")
    held = {}
    for index, layer in layers.items():
        _require_scales(index, layer)
        held[index] = fill_kv_scales(layer, scales[index])
    return held


def _require_scales(index: int, layer: nn.Module) -> None:
    if layer.kv_cache_dtype not in ("fp8", "fp8_e4m3"):
        raise RuntimeError(
            f"layer {index} keeps its KV cache as {layer.kv_cache_dtype!r}, which has no scales; start the engine with "
            "engine.kv_cache_dtype = 'fp8'"
        )
    backend = layer.attn_backend.get_name()
    if backend.startswith("FLASHINFER"):
        raise RuntimeError(
            f"layer {index}: {backend} keeps the first KV scales that it sees; set engine.attention_backend to "
            "FLASH_ATTN or TRITON_ATTN"
        )
