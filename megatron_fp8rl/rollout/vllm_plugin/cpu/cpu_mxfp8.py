"""The engine's MXFP8 layers on a CPU: parameters and loaders of vLLM's, arithmetic of ``cpu_layers.py``.

vLLM's MXFP8 on a CPU multiplies BF16 activations by dequantized weights, and has no experts.
"""

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_mxfp8 as moe,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Mxfp8
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

from megatron_fp8rl.precision.formats import QuantFormat
from megatron_fp8rl.rollout.vllm_plugin.cpu.cpu_layers import (
    EmulatedExperts,
    EmulatedFp8LinearMethod,
    ReadableLinearMethod,
    ReadableMoEMethod,
)
from megatron_fp8rl.upstream import patches


@patches(
    "vllm",
    why="replaces compressed-tensors' methods, which on a CPU quantize no activations and have no MXFP8 experts",
    remove_when="vLLM has W8A8 MXFP8 linears and experts on any CPU",
    optional=True,
)
def register_config(fmt: QuantFormat) -> None:
    """Make ``quant_method: compressed-tensors`` use the methods of this module for MXFP8 in the calling process."""

    class CpuCompressedConfig(CompressedTensorsConfig):
        def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
            if not isinstance(layer, LinearBase | RoutedExperts):
                return super().get_quant_method(layer, prefix)
            is_linear = isinstance(layer, LinearBase)
            if is_layer_skipped(prefix=prefix, ignored_layers=self.ignore, fused_mapping=self.packed_modules_mapping):
                return ReadableLinearMethod() if is_linear else ReadableMoEMethod(layer)
            if self.quant_format != fmt.hf["format"]:
                raise ValueError(f"{prefix}: the format of quantization_config is {self.quant_format}, not {fmt.name}")
            return EmulatedMxfp8LinearMethod(fmt) if is_linear else EmulatedMxfp8MoEMethod(layer, fmt)

    register_quantization_config(fmt.hf["quant_method"])(CpuCompressedConfig)


@patches(
    "vllm",
    why="a linear method with the parameters of CompressedTensorsW8A8Mxfp8, whose create_weights it calls",
    remove_when="vLLM has W8A8 MXFP8 linears on any CPU",
    optional=True,
)
@register_weight_loader_v2_supported_method
class EmulatedMxfp8LinearMethod(EmulatedFp8LinearMethod):
    """W8A8 MXFP8 linear with the parameters of vLLM's ``CompressedTensorsW8A8Mxfp8``."""

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ):
        loader, scheme = extra_weight_attrs["weight_loader"], CompressedTensorsW8A8Mxfp8
        # Its own object would have a kernel, which a CPU lacks; the method does not use it.
        scheme.create_weights(None, layer, output_partition_sizes, input_size_per_partition, params_dtype, loader)


class EmulatedMxfp8MoEMethod(EmulatedExperts, moe.CompressedTensorsW8A8Mxfp8MoEMethod):
    """MXFP8 experts with the parameters of vLLM's ``CompressedTensorsW8A8Mxfp8MoEMethod``."""

    def __init__(self, layer: RoutedExperts, fmt: QuantFormat) -> None:
        moe.CompressedTensorsMoEMethod.__init__(self, layer.moe_config)  # skips the choice of a kernel
        self.emulate(layer, fmt)
