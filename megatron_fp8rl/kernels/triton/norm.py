"""RMSNorm whose bits do not depend on thread layout, block size or batch: for trainer and engine on a GPU.

A row is divided by the power of two below its largest magnitude. The squares are truncated to multiples of 2^-38 and
summed as integers, so the order of the sum is free. Each kernel that uses :func:`inverse_rms` gets the same bits. In
the same launch a kernel can add the residual stream before the norm, or quantize its result. Truncation changes the
mean square by at most 2^-38 of the largest square.

Shapes: T = tokens, H = columns. Import only for CUDA tensors, or under TRITON_INTERPRET=1.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp8rl.kernels.triton.bits import HARDWARE, INFINITY_BITS, quantized_rows, rounded_to_bf16
from megatron_fp8rl.kernels.triton.tiles import SIDE
from megatron_fp8rl.kernels.types import BLOCK, Scales

_THREAD_NUMBERS = 16  # of a row that a thread holds
_LEAST_POWER: tl.constexpr = tl.constexpr(1 << 23)  # bits of 2^-126
_LARGEST_POWER: tl.constexpr = tl.constexpr(253 << 23)  # bits of 2^126, whose reciprocal is a normal number
_SQUARES: tl.constexpr = tl.constexpr(2.0**38)  # integers in a square of 1
_SQUARE: tl.constexpr = tl.constexpr(2.0**-38)


@triton.jit
def magnitude_bits(number):
    return number.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def power_below(largest_bits):
    """Bits of the power of two that rows with magnitudes up to ``largest_bits`` are divided by."""
    return tl.minimum(tl.maximum(largest_bits & INFINITY_BITS, _LEAST_POWER), _LARGEST_POWER)


@triton.jit
def squares(number, power_bits):
    """int64 squares of float32 copies of BF16 numbers, in units of 2^-38 times the square of the power."""
    part = number * ((254 << 23) - power_bits).to(tl.float32, bitcast=True)  # below 4; exact unless negligible
    return (part * part * _SQUARES).to(tl.int64)


@triton.jit
def inverse_rms(total, largest_bits, num_columns, eps):
    """1 / sqrt(mean + eps) in float32, from int64 sums of :func:`squares`; NaN for rows that are not finite."""
    power = power_below(largest_bits).to(tl.float32, bitcast=True)
    columns = tl.zeros_like(power) + num_columns
    variance = tl.div_rn(total.to(tl.float32), columns) * _SQUARE * power * power
    inverse = tl.div_rn(tl.zeros_like(power) + 1.0, tl.sqrt_rn(variance + eps))
    return tl.where(largest_bits >= INFINITY_BITS, float("nan"), inverse)


@triton.jit
def _norm(
    x, residual, weight, out, inverses, data, scales, num_columns, num_heads, token_stride, head_stride, scale_row,
    scale_block, eps, BLOCKS: tl.constexpr, ADDS: tl.constexpr, WRITES: tl.constexpr, KEEPS: tl.constexpr,
    QUANTIZES: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Program t normalizes row t of ``x``, or of its sum with ``residual``, which is overwritten with the sum."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    column = block[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    inside = column < num_columns
    place = row * num_columns + column
    first = row // num_heads * token_stride + row % num_heads * head_stride
    number = tl.load(x + first + column, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        stored = rounded_to_bf16(number + tl.load(residual + place, mask=inside, other=0.0).to(tl.float32), HARDWARE)
        tl.store(residual + place, stored, mask=inside)
        number = stored.to(tl.float32)
    largest_bits = tl.max(tl.max(magnitude_bits(number), axis=1), axis=0)
    total = tl.sum(tl.sum(squares(number, power_below(largest_bits)), axis=1), axis=0)
    inverse = inverse_rms(total, largest_bits, num_columns, eps)
    result = number * inverse * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    result = rounded_to_bf16(result, HARDWARE)
    if WRITES:
        tl.store(out + place, result, mask=inside)
    if KEEPS:
        tl.store(inverses + row, inverse)
    if QUANTIZES:
        byte, scale_bits = quantized_rows(result.to(tl.float32), POW2, HARDWARE)
        tl.store(data + place, byte, mask=inside)
        tl.store(scales + row * scale_row + block * scale_block, scale_bits, mask=block * SIDE < num_columns)


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(BF16 norm of the rows of BF16 x, contiguous; float32 reciprocal root mean squares of all rows, one axis). x is
    [T, H], or [T, heads, H] with any strides of tokens and heads. Weights are BF16 or float32."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    inverses = torch.empty(out.numel() // max(x.shape[-1], 1), dtype=torch.float32, device=x.device)
    _launch(x, weight_H, eps, out=out, inverses=inverses)
    return out, inverses


def one_plus(weight_H: Tensor) -> Tensor:
    """float32 [H]: the factors of a norm with zero-centred weights."""
    return weight_H.float() + 1.0


def norm_quantize(
    x_TH: Tensor, weight_H: Tensor, eps: float, data_TH: Tensor, scales_TB: Tensor, scales: Scales,
    residual_TH: Tensor | None = None, out_TH: Tensor | None = None,
) -> None:  # fmt: skip
    """Quantize the RMSNorm of BF16 x [T, H] into E4M3 ``data_TH`` and float32 ``scales_TB`` [T, ceil(H / 128)].

    With ``residual_TH``, it becomes residual + x, which is normalized. ``out_TH`` gets the norm in BF16. The result is
    rounded to BF16 before it is quantized. ``scales_TB`` may have any strides, and rows of x any distance; other
    tensors are contiguous.
    """
    require_scales(scales_TB, x_TH.shape[0], x_TH.shape[-1])
    _launch(x_TH, weight_H, eps, residual=residual_TH, out=out_TH, data=data_TH, scales_TB=scales_TB, scales=scales)


def add_and_norm(x_TH: Tensor, weight_H: Tensor, eps: float, residual_TH: Tensor) -> Tensor:
    """BF16 norm of residual + x, [T, H]; ``residual_TH`` becomes the sum, rounded to BF16."""
    out_TH = torch.empty_like(residual_TH)
    _launch(x_TH, weight_H, eps, residual=residual_TH, out=out_TH)
    return out_TH


def _launch(
    x: Tensor, weight_H: Tensor, eps: float, *, residual: Tensor | None = None, out: Tensor | None = None,
    inverses: Tensor | None = None, data: Tensor | None = None, scales_TB: Tensor | None = None,
    scales: Scales = "pow2",
) -> None:  # fmt: skip
    require_rows(x)
    require_contiguous(weight_H, residual, out, data)
    num_columns, num_heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    num_rows = x.shape[0] * num_heads
    if not num_rows:
        return
    blocks = triton.next_power_of_2(triton.cdiv(num_columns, BLOCK))
    warps = min(16, max(1, blocks * BLOCK // (32 * _THREAD_NUMBERS)))
    with torch.cuda.device_of(x):
        _norm[(num_rows,)](
            x, residual, weight_H, out, inverses, None if data is None else data.view(torch.uint8),
            None if scales_TB is None else scales_TB.view(torch.int32), num_columns, num_heads, x.stride(0),
            x.stride(1) if x.dim() == 3 else 0, *((0, 0) if scales_TB is None else scales_TB.stride()), eps,
            BLOCKS=blocks, ADDS=residual is not None, WRITES=out is not None, KEEPS=inverses is not None,
            QUANTIZES=data is not None, POW2=scales == "pow2", HARDWARE=HARDWARE, num_warps=warps,
        )  # fmt: skip


def require_rows(x: Tensor) -> None:
    if x.dtype != torch.bfloat16 or x.dim() not in (2, 3) or x.stride(-1) != 1:
        raise ValueError(f"BF16 rows are needed, not {x.dtype} {list(x.shape)} of strides {x.stride()}")


def require_contiguous(*tensors: Tensor | None) -> None:
    if strides := [tensor.stride() for tensor in tensors if tensor is not None and not tensor.is_contiguous()]:
        raise ValueError(f"contiguous tensors are needed, not of strides {strides}")


def require_scales(scales_TB: Tensor, num_rows: int, num_columns: int) -> None:
    expected = (num_rows, -(-num_columns // BLOCK))
    if scales_TB.dtype != torch.float32 or scales_TB.shape != expected:
        raise ValueError(f"scales: float32 {list(expected)} are needed, not {scales_TB.dtype} {list(scales_TB.shape)}")
