"""Reference blockwise E4M3 quantization: weights in 128x128 blocks, activations in 1x128; MXFP8: both in 1x32.

    amax      = largest magnitude in the block
    scale_inv = amax / 448, rounded up to a power of two unless ``scales="fp32"``  448 is the largest E4M3 number
    data      = x / scale_inv, rounded to the nearest E4M3 number, ties to even
    x         ~ data * scale_inv

This is the only definition, for the trainer's linears, the weight exporter and the engine's CPU kernels, so bytes can
be compared. With power-of-two scales they match Transformer Engine's ``Float8BlockScaling`` and DeepGEMM's ``ue8m0``.
By their sources, MXFP8's ``e8m0`` scales are those of Transformer Engine 2.16's ``MXFP8BlockScaling`` and FlashInfer.
OCP MX 1.0 rounds down instead, to 2^(floor(log2(amax)) - 8), and clips values above 448.

Blocks start at index 0 of each axis; the last block of an axis may be shorter. Quantizing a shard whose edges are
multiples of 128 gives the same bytes as slicing the quantized full tensor. NaN or infinity makes its whole block NaN.

Shapes: N = output features, K = input features, Nb = ceil(N / 128), Kb = ceil(K / 128).
"""

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fp8rl.kernels import c_code, float64
from megatron_fp8rl.kernels.types import BLOCK, ScaleKind, Scales

_VLLM_LEAST_AMAX = 1e-4  # lower bound on block amax in vllm.utils.deep_gemm.per_block_cast_to_fp8


@dataclass(frozen=True)
class Format:
    """An FP8 number format. Its largest value is 1.75 * 2^max_exponent; this mantissa is the same in E4M3 and E5M2."""

    dtype: torch.dtype
    max_exponent: int
    min_exponent: int  # of normal numbers; subnormals below it are equally spaced
    num_mantissa_bits: int

    @property
    def max(self) -> float:
        return 1.75 * 2.0**self.max_exponent


E4M3 = Format(torch.float8_e4m3fn, max_exponent=8, min_exponent=-6, num_mantissa_bits=3)
E5M2 = Format(torch.float8_e5m2, max_exponent=15, min_exponent=-14, num_mantissa_bits=2)

_EXPONENT_BITS = 0x7F800000
_BELOW_MAX_MANTISSA = 0x1FFFFF  # added to float32 bits: increments the exponent iff mantissa > 1.75


def scale_of(amax: Tensor, scales: ScaleKind, fmt: Format = E4M3) -> Tensor:
    """Dequantization scale of a block. ``amax`` is float32 of any shape; an all-zero block gets scale 1 (``e8m0``:
    2^-127). ``pow2`` and ``e8m0`` are 2^ceil(log2(amax / max)) from the exponent bits, so no logarithm can round it to
    a neighbor."""
    if scales == "e8m0":
        exponent = (amax.view(torch.int32) + _BELOW_MAX_MANTISSA >> 23) - fmt.max_exponent
        biased = exponent.clamp_(0, 254).masked_fill_(~amax.isfinite(), 255)
        return float32_of_e8m0(biased.to(torch.uint8))
    if scales == "pow2":
        # The sum never reaches the sign bit for a finite amax. NaN and infinity are handled below.
        exponent = (amax.view(torch.int32) + _BELOW_MAX_MANTISSA >> 23) - fmt.max_exponent
        scale = (exponent.clamp_(1, 254) << 23).view(torch.float32)
    else:
        # Divide by a tensor: by a scalar, torch on a GPU multiplies with the rounded reciprocal, which does not give
        # the correctly rounded quotient. Clamp to the smallest normal number to keep 1 / scale finite.
        scale = (amax / torch.full_like(amax, fmt.max)).clamp_(min=torch.finfo(torch.float32).tiny)
    scale = torch.where(amax.isfinite(), scale, torch.nan)
    return torch.where(amax == 0, 1.0, scale)


def round_to_grid_(x: Tensor, scale: Tensor, fmt: Format = E4M3) -> Tensor:
    """Round x in place to the nearest ``fmt`` value times ``scale``, ties to even: FP8 rounding without the bytes.

    x is float32 with no magnitude above ``fmt.max * scale``; scale is float32, powers of two, broadcast over x. Adding
    and subtracting 1.5 * 2^(e + 23 - mantissa bits), where 2^e <= |x| < 2^(e + 1), makes the float32 adder round x. On
    CPUs this is several times faster than converting to FP8 and back.
    """
    shift = (x.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    torch.maximum(shift, scale * 2.0**fmt.min_exponent, out=shift)
    shift.mul_(1.5 * 2.0 ** (23 - fmt.num_mantissa_bits))
    return x.add_(shift).sub_(shift)


def float32_of_e8m0(scale: Tensor) -> Tensor:
    """The powers of two that bytes mean; 255 is NaN."""
    return scale.view(torch.float8_e8m0fnu).float()


def round_blocks_(blocks: Tensor, dims: int | tuple[int, ...], scales: ScaleKind, fmt: Format = E4M3) -> Tensor:
    """Quantize and dequantize float32 ``blocks`` in place; ``dims`` are the axes within a block."""
    # Two reductions without a temporary are faster than abs().amax().
    amax = torch.maximum(blocks.amax(dims, keepdim=True), blocks.amin(dims, keepdim=True).neg_())
    scale = scale_of(amax, scales, fmt)
    if scales != "fp32":
        return round_to_grid_(blocks, scale, fmt)
    return round_to_grid_(blocks.div_(scale), torch.ones_like(scale), fmt).mul_(scale)


def float32_copy(x: Tensor, *, rows_to: int = 1, columns_to: int = 1) -> Tensor:
    """A float32 copy that may be overwritten, with its last two axes zero-padded to multiples."""
    missing = (0, -x.shape[-1] % columns_to, 0, -x.shape[-2] % rows_to)
    return F.pad(x.float(), missing) if any(missing) else x.to(torch.float32, copy=True)


def _weight_blocks(weight_NK: Tensor) -> Tensor:
    """[N, K] -> float32 [Nb, 128, Kb, 128], zero-padded at the bottom and right edges."""
    num_rows, num_columns = weight_NK.shape
    padded = F.pad(weight_NK.float(), (0, -num_columns % BLOCK, 0, -num_rows % BLOCK))
    return padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)


def _row_blocks(x: Tensor, size: int) -> Tensor:
    """[..., K] -> float32 [..., Kb, size], zero-padded at the right edge."""
    return F.pad(x.float(), (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))


def quantize_weight(weight_NK: Tensor, scales: Scales) -> tuple[Tensor, Tensor]:
    """Quantize in 128x128 blocks, on a GPU in one kernel: (data float8_e4m3fn [N, K], scale_inv float32 [Nb, Kb])."""
    if weight_NK.is_cuda and weight_NK.dtype in (torch.bfloat16, torch.float32):
        from megatron_fp8rl.kernels.triton import quantize  # imports Triton

        return quantize.quantize_weight(weight_NK, scales)
    return quantize_weight_in_torch(weight_NK, scales)


def quantize_weight_in_torch(weight_NK: Tensor, scales: Scales) -> tuple[Tensor, Tensor]:
    """:func:`quantize_weight` in pure torch, on any device: the reference that the Triton kernel must match."""
    num_rows, num_columns = weight_NK.shape
    blocks = _weight_blocks(weight_NK)
    scale = scale_of(blocks.abs().amax(dim=(1, 3)), scales)
    data = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    data = data.view(blocks.shape[0] * BLOCK, blocks.shape[2] * BLOCK)[:num_rows, :num_columns]
    return data.contiguous(), scale


def dequantize_weight(data_NK: Tensor, scale_inv: Tensor) -> Tensor:
    """Dequantize the output of :func:`quantize_weight` to float32 [N, K]."""
    num_rows, num_columns = data_NK.shape
    scale_NKb = scale_inv.repeat_interleave(BLOCK, 0)[:num_rows]
    values = _float32_of(data_NK)
    if num_columns % BLOCK:
        return values.mul_(scale_NKb.repeat_interleave(BLOCK, 1)[:, :num_columns])
    return values.view(num_rows, -1, BLOCK).mul_(scale_NKb.unsqueeze(-1)).view(num_rows, num_columns)


def canonical(data_NK: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    """Requantize E4M3 blocks with power-of-two scales to the canonical form that vLLM produces for DeepGEMM.

    data_NK float8_e4m3fn [N, K] and scale_inv float32 [Nb, Kb] -> the same types and shapes. A block whose E4M3 amax is
    at most 224 can also store doubled values with half the scale. vLLM chooses the smallest scale, from an amax clamped
    to at least 1e-4. In blocks below that, values are rounded to the grid of that scale.
    """
    num_rows, num_columns = data_NK.shape
    padding = (0, -num_columns % BLOCK, 0, -num_rows % BLOCK)
    magnitude = F.pad(data_NK.view(torch.uint8) & 0x7F, padding).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    # Magnitude bytes sort like the magnitudes themselves, with NaN the largest.
    amax = magnitude.amax(dim=(1, 3)).view(torch.float8_e4m3fn).float() * scale_inv
    scale = scale_of(amax.clamp(min=_VLLM_LEAST_AMAX), "pow2")
    if torch.equal(scale, scale_inv):
        return data_NK, scale_inv
    shift_NKb = (scale_inv / scale).bfloat16().repeat_interleave(BLOCK, 0)[:num_rows]
    # Four significant bits times a power of two: every product is exact in BF16, so the conversion rounds only once.
    values = data_NK.bfloat16().mul_(shift_NKb.repeat_interleave(BLOCK, 1)[:, :num_columns])
    return values.to(torch.float8_e4m3fn), scale


def _float32_of(data: Tensor) -> Tensor:
    """Convert E4M3 to contiguous float32. On CPUs, torch converts one element at a time, but vectorizes FP16: E4M3 bits
    shifted left by seven are an FP16 number 2^(15 - 7) times smaller, except NaN."""
    if data.device.type != "cpu":
        return data.float()
    bits = data.contiguous().view(torch.int8).to(torch.int16)  # sign extension sets the FP16 sign bit
    magnitude = bits & 0x7F
    is_nan = magnitude == 0x7F
    values = ((magnitude << 7) | (bits & -0x8000)).view(torch.float16).float().mul_(2.0 ** (15 - 7))
    return values.masked_fill_(is_nan, torch.nan) if is_nan.any() else values


def quantize_activation(x: Tensor, scales: ScaleKind, size: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Quantize the last axis in blocks: (data float8_e4m3fn [..., K], scale_inv float32 [..., Kb])."""
    blocks = _row_blocks(x, size)
    scale = scale_of(blocks.abs().amax(dim=-1), scales)
    data = (blocks / scale[..., None]).to(torch.float8_e4m3fn).flatten(-2)[..., : x.shape[-1]]
    return data.contiguous(), scale


def dequantize_activation(data: Tensor, scale_inv: Tensor, size: int = BLOCK) -> Tensor:
    """Dequantize the output of :func:`quantize_activation` to float32 [..., K]."""
    return _float32_of(data).mul_(scale_inv.repeat_interleave(size, -1)[..., : data.shape[-1]])


def operand_dtype(dtype: torch.dtype, scales: ScaleKind) -> torch.dtype:
    """Exact dtype of a dequantized operand: BF16 for power-of-two scales, because E4M3 has 4 significant bits."""
    return torch.bfloat16 if scales != "fp32" and dtype == torch.bfloat16 else torch.float32


def linear(x: Tensor, weight_data: Tensor, weight_scale_inv: Tensor, scales: Scales) -> Tensor:
    """y = x W^T on FP8 operands: quantizes x, accumulates as ``float64.matmul`` does, rounds y once to x.dtype. x [...,
    K]; weight_data float8_e4m3fn [N, K] and weight_scale_inv float32 [Nb, Kb] as in :func:`quantize_weight`."""
    rows = round_activation(x, scales, torch.float64).flatten(0, -2)
    weight = dequantize_weight(weight_data, weight_scale_inv)
    return float64.matmul(rows, weight.t()).to(x.dtype).view(*x.shape[:-1], -1)


def round_activation(x: Tensor, scales: ScaleKind, dtype: torch.dtype, size: int = BLOCK) -> Tensor:
    """``dequantize_activation(*quantize_activation(x, scales))`` in ``dtype``, without materializing FP8 bytes."""
    is_compiled = x.device.type == "cpu" and scales == "pow2" and x.dtype == dtype == torch.bfloat16
    if is_compiled and x.shape[-1] % size == 0 and (library := c_code.library("rows")) is not None:
        x = x.contiguous()
        out = torch.empty_like(x)
        library.round_blocks(*map(c_code.pointer, (x, out)), *map(ctypes.c_ssize_t, (x.numel() // size, size)))
        return out
    blocks = float32_copy(x.unsqueeze(0), columns_to=size)[0].unflatten(-1, (-1, size))
    rounded = round_blocks_(blocks, -1, scales)
    return rounded.flatten(-2)[..., : x.shape[-1]].to(dtype)
