"""The quantizer of each format, for weights that are published, saved or emulated, and for emulated activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_fp8rl.kernels import blockwise
from megatron_fp8rl.kernels.types import block_scales
from megatron_fp8rl.precision.formats import QuantFormat

Quantization = tuple[Tensor, Tensor, Tensor]  # a BF16 matrix, the values and the scales to fill


def quantize(weight_NK: Tensor, fmt: QuantFormat) -> tuple[Tensor, Tensor]:
    """Quantize a matrix: (values [N, K] in ``fmt.element``, scales of ``fmt.scale_shape``)."""
    return blockwise.quantize_weight(weight_NK, block_scales(fmt))


def dequantize(data_NK: Tensor, scale: Tensor, fmt: QuantFormat) -> Tensor:
    """Undo :func:`quantize`: float32 [N, K]."""
    block_scales(fmt)
    return blockwise.dequantize_weight(data_NK, scale)


def round_activation(x: Tensor, fmt: QuantFormat, dtype: torch.dtype) -> Tensor:
    """Quantize the last axis and dequantize it to ``dtype``."""
    return blockwise.round_activation(x, block_scales(fmt), dtype)


def same_values(loaded: tuple[Tensor, Tensor], source: tuple[Tensor, Tensor], fmt: QuantFormat) -> bool:
    """Whether (values, scales) dequantize to equal numbers, even if bytes differ because vLLM rescaled blocks."""
    block_scales(fmt)
    pairs = (blockwise.canonical(data.contiguous(), scale.contiguous()) for data, scale in (loaded, source))
    (data, scale), (source_data, source_scale) = pairs
    same_data = torch.equal(data.view(torch.uint8), source_data.view(torch.uint8))
    return same_data and torch.equal(scale.float(), source_scale.float())


def prepare(quantizations: Sequence[Quantization], fmt: QuantFormat) -> Callable[[], None]:
    """A function that quantizes all of them in place: one launch on a GPU."""
    scales = block_scales(fmt)
    if quantizations[0][0].is_cuda:
        from megatron_fp8rl.kernels.triton import quantize as kernels  # imports Triton

        matrices, data, scale = (list(column) for column in zip(*quantizations, strict=True))
        return kernels.prepare_weights_into(matrices, data, scale, scales)

    def run() -> None:
        for matrix, data, scale in quantizations:
            for target, source in zip((data, scale), blockwise.quantize_weight(matrix, scales), strict=True):
                target.copy_(source)

    return run
