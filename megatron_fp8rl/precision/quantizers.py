"""The quantizer of each format, for weights that are published, saved or emulated, and for emulated activations."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_fp8rl.kernels import blockwise
from megatron_fp8rl.kernels.types import block_scales
from megatron_fp8rl.precision.formats import QuantFormat

Quantization = tuple[Tensor, Tensor, Tensor]  # a BF16 matrix, the values and the scales to fill


def quantize(weight_NK: Tensor, fmt: QuantFormat) -> tuple[Tensor, Tensor]:
    """Quantize a matrix: (values [N, K] in ``fmt.element``, scales of ``fmt.scale_shape``)."""
    if fmt.scale_kind != "e8m0":
        return blockwise.quantize_weight(weight_NK, block_scales(fmt))
    data, scale = blockwise.quantize_activation(weight_NK, "e8m0", fmt.block_size(1))
    return data, scale.to(torch.float8_e8m0fnu).view(torch.uint8)


def dequantize(data_NK: Tensor, scale: Tensor, fmt: QuantFormat) -> Tensor:
    """Undo :func:`quantize`: float32 [N, K]."""
    if fmt.scale_kind == "e8m0":
        return blockwise.dequantize_activation(data_NK, blockwise.float32_of_e8m0(scale), fmt.block_size(1))
    block_scales(fmt)
    return blockwise.dequantize_weight(data_NK, scale)


def round_activation(x: Tensor, fmt: QuantFormat, dtype: torch.dtype) -> Tensor:
    """Quantize the last axis and dequantize it to ``dtype``."""
    if fmt.scale_kind == "e8m0":
        return blockwise.round_activation(x, "e8m0", dtype, fmt.block_size(1))
    return blockwise.round_activation(x, block_scales(fmt), dtype)


def is_finite(tensor: Tensor) -> Tensor:
    """Bool []: whether a wire tensor is finite. Of scales of one byte, 255 is NaN. E4M3 values are not checked, because
    the scale of a block with a value that is not finite is NaN."""
    if tensor.dtype == torch.uint8:
        return (tensor != 255).all()
    return tensor.isfinite().all() if tensor.dtype.itemsize > 1 else torch.tensor(True, device=tensor.device)


def same_values(loaded: tuple[Tensor, Tensor], source: tuple[Tensor, Tensor], fmt: QuantFormat) -> bool:
    """Whether (values, scales) dequantize to equal numbers, even if bytes differ because vLLM rescaled blocks."""
    if fmt.scale_kind == "e8m0":
        return torch.equal(dequantize(*loaded, fmt), dequantize(*source, fmt))
    block_scales(fmt)
    pairs = (blockwise.canonical(data.contiguous(), scale.contiguous()) for data, scale in (loaded, source))
    (data, scale), (source_data, source_scale) = pairs
    same_data = torch.equal(data.view(torch.uint8), source_data.view(torch.uint8))
    return same_data and torch.equal(scale.float(), source_scale.float())


def prepare(quantizations: Sequence[Quantization], fmt: QuantFormat) -> Callable[[], None]:
    """A function that quantizes all of them in place: for blockwise formats one launch on a GPU."""
    scales = None if fmt.scale_kind == "e8m0" else block_scales(fmt)
    if scales is not None and quantizations[0][0].is_cuda:
        from megatron_fp8rl.kernels.triton import quantize as kernels  # imports Triton

        matrices, data, scale = (list(column) for column in zip(*quantizations, strict=True))
        return kernels.prepare_weights_into(matrices, data, scale, scales)

    def run() -> None:
        for matrix, data, scale in quantizations:
            for target, source in zip((data, scale), quantize(matrix, fmt), strict=True):
                target.copy_(source)

    return run
