"""The adapter that an engine worker adds to the products of frozen weights: requests, digests, products on a CPU.

In: a folder with an adapter in peft's format, whose B is scaled. Out: vLLM's buffers with A and B, which its adapter
kernels read. An engine has one adapter, that of the policy's version. Each version has another name, which is part of
the key of vLLM's prefix cache.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.request import LoRARequest

from megatron_fp8rl.kernels import float64
from megatron_fp8rl.names.blocks import ENGINE_FUSIONS
from megatron_fp8rl.upstream import patches
from megatron_fp8rl.weight_sync.digest import digests


def adapter_request(version: int, path: str = "not loaded by requests") -> LoRARequest:
    """The adapter of a policy version. vLLM reads ``path`` only for a version that a worker has not loaded."""
    return LoRARequest(lora_name=f"version-{version}", lora_int_id=version + 1, lora_path=path)


@patches(
    "vllm",
    why="reads the buffers of vLLM's adapter layers, which have no name in its API",
    remove_when="vLLM returns the tensors of a loaded adapter",
)
def digests_of_adapter(manager: Any) -> dict[str, str]:
    """Digests of this worker's A and B, by the name of the linear and "lora_A" or "lora_B", from the buffers of the
    worker's ``lora_manager`` that adapter kernels read."""
    tensors = {}
    for path, layer in manager._adapter_manager.modules.items():
        parent, _, leaf = path.rpartition(".")
        buffers = zip(ENGINE_FUSIONS.get(leaf, (leaf,)), layer.lora_a_stacked, layer.lora_b_stacked, strict=True)
        for name, a, b in buffers:
            tensors[f"{parent}.{name}.lora_A"], tensors[f"{parent}.{name}.lora_B"] = a[0, 0], b[0, 0]
    return dict(zip(tensors, digests(tensors.values()), strict=True))


@patches(
    "vllm",
    why="vLLM's adapter kernels for CPUs keep A x in FP32, and its linears add a bias before the adapter's product",
    remove_when="the kernels of adapters can be chosen",
)
def round_adapters_as_the_trainer() -> None:
    """On a CPU, round the products of adapters where ``trainer/model/lora.py`` rounds them."""
    BaseLinearLayerWithLoRA._apply_sync = _multiply


def _multiply(layer: BaseLinearLayerWithLoRA, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = W0 x + B (A x) + bias, where the layer has scaled B; W0 x + bias for tokens of requests without adapter."""
    y = layer.base_layer.quant_method.apply(layer.base_layer, x)
    is_adapted = layer.punica_wrapper.token_lora_indices == 0
    if is_adapted.any():
        matrices = zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True)
        rows = x.flatten(0, -2)
        parts = [float64.matmul(float64.matmul(rows, a[0, 0].t()), b[0, 0].t()) for a, b in matrices]
        total = y + torch.cat(parts, -1).view_as(y)
        y = total if is_adapted.all() else torch.where(is_adapted[:, None], total, y)
    return y if bias is None else y + bias
