"""MXFP8 on GPUs: vLLM's kernels of Blackwell, and an emulation of linears for others. Never run on hardware.

vLLM rearranges E8M0 scales for its GEMMs and drops those that were loaded, so that they could be neither verified nor
written directly. Here the parameters stay as sent. The rearranged scales are ``kernel_scales``, an attribute of the
layer. Emulated linears have ``dequantized_weight`` instead. Updates change both in place, because CUDA graphs read
them. Checked against the source of vLLM 0.26.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_fp8rl.precision.formats import MXFP8
from megatron_fp8rl.precision.quantizers import dequantize, round_activation
from megatron_fp8rl.upstream import patches


class _Operands(NamedTuple):
    """The attributes of a layer that vLLM's kernel reads."""

    weight: Tensor
    weight_scale: Tensor


@patches(
    "vllm",
    why="FlashInferCutlassMxfp8LinearKernel and CompressedTensorsW8A8Mxfp8MoEMethod replace the loaded scales by "
    "rearranged ones, which cannot be verified",
    remove_when="vLLM keeps the loaded scales beside those of its kernels",
    optional=True,
)
def keep_scales_readable() -> None:
    """Patch the MXFP8 linears on FlashInfer CUTLASS and the MXFP8 experts on DeepGEMM in this process."""
    from vllm.model_executor.kernels.linear.mxfp8 import flashinfer
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w8a8_mxfp8 as moe,
    )

    linear, experts = flashinfer.FlashInferCutlassMxfp8LinearKernel, moe.CompressedTensorsW8A8Mxfp8MoEMethod
    multiply, prepare_experts = linear.apply_weights, experts.process_weights_after_loading

    def convert_linear(self: Any, layer: nn.Module) -> None:
        num_rows, num_columns = layer.weight.shape
        _keep(layer, flashinfer.swizzle_mxfp8_scale(layer.weight_scale.data, M=num_rows, K=num_columns))

    def apply_weights(self: Any, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return multiply(self, _Operands(layer.weight, layer.kernel_scales[0]), x, bias)

    def convert_experts(self: Any, layer: nn.Module) -> None:
        sent = layer.w13_weight_scale, layer.w2_weight_scale
        if not hasattr(layer, "kernel_scales"):
            prepare_experts(self, layer)  # builds the kernel, which reads the rearranged scales
            _keep(layer, layer.w13_weight_scale.data, layer.w2_weight_scale.data)
            layer.w13_weight_scale, layer.w2_weight_scale = sent
            return
        _, _, *scales = moe.convert_to_fp8_moe_kernel_format(
            fp8_backend=self.fp8_backend,
            layer=layer,
            w13=layer.w13_weight,
            w2=layer.w2_weight,
            w13_scale=sent[0],
            w2_scale=sent[1],
            w13_input_scale=None,
            w2_input_scale=None,
        )
        _keep(layer, *scales)

    linear.process_weights_after_loading, linear.apply_weights = convert_linear, apply_weights
    experts.process_weights_after_loading = convert_experts


# An opaque operator, so that no compiler changes its bit patterns. Every engine.graphs can use it; plain is the safest.
@torch.library.custom_op("megatron_fp8rl::round_mxfp8", mutates_args=())
def round_mxfp8(x: Tensor) -> Tensor:
    """Quantize the last axis to MXFP8 and dequantize it, as the trainer's emulation does."""
    return round_activation(x, MXFP8, x.dtype).contiguous()


round_mxfp8.register_fake(torch.empty_like)


@patches(
    "vllm",
    why="vLLM's emulation rounds no activations, replaces bytes by BF16, and starts with uninitialized scales",
    remove_when="vLLM's emulation quantizes activations and keeps the loaded weight",
    optional=True,
)
def emulate_linears() -> None:
    """Multiply rounded rows by dequantized weights in vLLM's emulated linears, in BF16. Not measured on GPUs yet."""
    from vllm.model_executor.kernels.linear.mxfp8.emulation import EmulationMxfp8LinearKernel as kernel
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Mxfp8 as scheme

    create = scheme.create_weights

    def create_weights(self: Any, layer: nn.Module, *args: Any, **options: Any) -> None:
        create(self, layer, *args, **options)
        if isinstance(self.kernel, kernel):
            layer.weight_scale.data.fill_(127)  # 1; 255 is NaN

    def convert(self: Any, layer: nn.Module) -> None:
        weight = dequantize(layer.weight.data, layer.weight_scale.data, MXFP8).bfloat16()
        if not hasattr(layer, "dequantized_weight"):
            layer.dequantized_weight = weight  # no parameter or buffer, which vLLM would reload
        layer.dequantized_weight.copy_(weight)

    def apply_weights(self: Any, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = nn.functional.linear(round_mxfp8(x), layer.dequantized_weight)
        return y if bias is None else y + bias

    scheme.create_weights, kernel.apply_weights = create_weights, apply_weights
    kernel.process_weights_after_loading = convert


def _keep(layer: nn.Module, *scales: Tensor) -> None:
    """Set ``kernel_scales``, or copy into those of an earlier call."""
    if not hasattr(layer, "kernel_scales"):
        layer.kernel_scales = scales
    for kept, new in zip(layer.kernel_scales, scales, strict=True):
        if kept is not new:
            kept.copy_(new)
