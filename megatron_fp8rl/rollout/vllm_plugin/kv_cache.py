"""Sets the scales of an engine's FP8 KV cache between two policies, and reads them back.

In: vLLM's model, and scales by layer from the trainer (trainer/kv_scales.py). Out: the scales that its attention now
uses. Runs in every engine worker; scales are per tensor, so they are equal in all tensor-parallel workers.

vLLM keeps each scale in a buffer for GPU kernels, which captured CUDA graphs read too, and as a host float for the CPU
kernel. FlashInfer is rejected, because it turns the floats into constants at its first call. Call this while the engine
is paused, because cached keys and values use the old scales, and a pause drops them. vLLM resets scales to 1 after a
reload of weights and when a sleeping cache wakes up: set them again afterwards.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from megatron_fp8rl.names.registry import layer_of
from megatron_fp8rl.rollout.vllm_plugin.patches import fill_kv_scales, has_kv_scales


def attention_layers(model: nn.Module) -> dict[int, nn.Module]:
    layers = {}
    for path, module in model.named_modules():
        if has_kv_scales(module):
            number = layer_of(path)
            if number is None:
                raise ValueError(f"attention {path!r} has an FP8 KV cache, but no layer number in its name")
            layers[number] = module
    return layers


@torch.inference_mode()
def set_kv_scales(model: nn.Module, scales: Mapping[int, Sequence[float]]) -> dict[int, list[float]]:
    """Set the (query, key, value) scales of every layer; return the values in the kernels' buffers. Raises ValueError
    if the layers differ from the model's, and RuntimeError for a cache without such scales."""
    layers = attention_layers(model)
    if set(layers) != set(scales):
        raise ValueError(f"KV scales came for layers {sorted(scales)}, and the engine has {sorted(layers)}")
    buffers = {}
    for index, layer in layers.items():
        _require_scales(index, layer)
        buffers[index] = fill_kv_scales(layer, scales[index])
    return buffers


def _require_scales(index: int, layer: nn.Module) -> None:
    if layer.kv_cache_dtype not in ("fp8", "fp8_e4m3"):
        raise RuntimeError(
            f"layer {index} keeps its KV cache as {layer.kv_cache_dtype!r}, which has no scales; start the engine with "
            "engine.kv_cache_dtype = 'fp8'"
        )
    backend = layer.attn_backend.get_name()
    if backend.startswith("FLASHINFER"):
        raise RuntimeError(
            f"layer {index}: {backend} keeps the first KV scales that it sees; set "
            "precision.kernels.engine_attention to FLASH_ATTN or TRITON_ATTN"
        )
