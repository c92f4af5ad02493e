"""The quantizer of each format: the only place that chooses a kernel for the weights that are published and saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_fp8rl.kernels import blockwise
from megatron_fp8rl.kernels.types import BLOCK, Scales
from megatron_fp8rl.precision.formats import QuantFormat

Quantization = tuple[Tensor, Tensor, Tensor]  # a BF16 matrix, the values and the scales to fill


def quantize(weight_NK: Tensor, fmt: QuantFormat) -> tuple[Tensor, Tensor]:
    """Quantize a matrix: (values [N, K] in ``fmt.element``, scales of ``fmt.scale_shape``)."""
    return blockwise.quantize_weight(weight_NK, _block_scales(fmt))


def dequantize(data_NK: Tensor, scale: Tensor, fmt: QuantFormat) -> Tensor:
    """Undo :func:`quantize`: float32 [N, K]."""
    _block_scales(fmt)
    return blockwise.dequantize_weight(data_NK, scale)


def same_values(held: tuple[Tensor, Tensor], source: tuple[Tensor, Tensor], fmt: QuantFormat) -> bool:
    """Whether (values, scales) dequantize to equal numbers, even if bytes differ because vLLM rescaled blocks."""
    _block_scales(fmt)
    pairs = (blockwise.canonical(data.contiguous(), scale.contiguous()) for data, scale in (held, source))
    (data, scale), (source_data, source_scale) = pairs
    same_data = torch.equal(data.view(torch.uint8), source_data.view(torch.uint8))
    return same_data and torch.equal(scale.float(), source_scale.float())


def prepare(quantizations: Sequence[Quantization], fmt: QuantFormat) -> Callable[[], None]:
    """A function that quantizes all of them in place: one launch on a GPU."""
    scales = _block_scales(fmt)
    if quantizations[0][0].is_cuda:
        from megatron_fp8rl.kernels.triton import quantize as kernels  # imports Triton

        matrices, data, scale = (list(column) for column in zip(*quantizations, strict=True))
        return kernels.prepare_weights_into(matrices, data, scale, scales)

    def run() -> None:
        for matrix, data, scale in quantizations:
            for target, source in zip((data, scale), blockwise.quantize_weight(matrix, scales), strict=True):
                target.copy_(source)

    return run


def _block_scales(fmt: QuantFormat) -> Scales:
    """The kind of scales of a format that the blockwise kernels are written for."""
    if fmt.scale_kind is None or fmt.weight_block != (BLOCK, BLOCK) or fmt.element != "float8_e4m3fn":
        raise ValueError(f"format {fmt.name}: no quantizer is written for it; add one to precision/quantizers.py")
    return fmt.scale_kind
