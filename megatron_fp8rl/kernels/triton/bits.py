"""Bit operations of the Triton kernels: blockwise scales, rounding to E4M3 and to BF16.

Triton's interpreter rounds conversions differently, so each rounding is also written in integers or float32 additions.
"""

import triton
import triton.language as tl

from megatron_fp8rl.kernels.backend import INTERPRETED
from megatron_fp8rl.kernels.types import E4M3_MAX

HARDWARE = not INTERPRETED  # a GPU runs the kernels

_MAX: tl.constexpr = tl.constexpr(E4M3_MAX)
INFINITY_BITS: tl.constexpr = tl.constexpr(0x7F800000)
NAN_BITS: tl.constexpr = tl.constexpr(0x7FC00000)
_ONE_BITS: tl.constexpr = tl.constexpr(0x3F800000)
_TINY_BITS: tl.constexpr = tl.constexpr(0x00800000)  # the smallest normal float32


@triton.jit
def bits_of_scale(amax_bits, POW2: tl.constexpr):
    """``blockwise.scale_of`` on the bits of float32 numbers: int32 scalar -> int32 scalar."""
    if POW2:
        exponent = ((amax_bits + 0x1FFFFF) >> 23) - 8
        bits = tl.maximum(exponent, 1) << 23
    else:
        amax = amax_bits.to(tl.float32, bitcast=True)
        bits = tl.maximum(tl.div_rn(amax, _MAX).to(tl.int32, bitcast=True), _TINY_BITS)
    bits = tl.where(amax_bits >= INFINITY_BITS, NAN_BITS, bits)
    return tl.where(amax_bits == 0, _ONE_BITS, bits)


@triton.jit
def factor_of(amax_bits, scale_bits, POW2: tl.constexpr):
    """The factor that :func:`quotient` needs for a block: the inverse of its scale, or the scale."""
    if POW2:
        # The reciprocal of a power of two is exact, and the product with it equals the quotient.
        scale_bits = tl.where(amax_bits >= INFINITY_BITS, NAN_BITS, (254 << 23) - scale_bits)
    return scale_bits.to(tl.float32, bitcast=True)


@triton.jit
def quotient(x, factor, POW2: tl.constexpr):
    if POW2:
        return x * factor
    return tl.div_rn(x, tl.zeros_like(x) + factor)


@triton.jit
def e4m3_bytes(x, HARDWARE: tl.constexpr):
    """Bytes (uint8) of the E4M3 values nearest to float32 ``x``, ties to even; no magnitude may round above 448. In the
    interpreter a float32 addition rounds, as in ``blockwise.round_to_grid_``."""
    if HARDWARE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude_bits = bits & 0x7FFFFFFF
    magnitude = magnitude_bits.to(tl.float32, bitcast=True)
    # 1.5 * 2^20 times the largest power of two not above |x|, and at least times the smallest normal number, 2^-6.
    shift = tl.maximum(magnitude_bits & INFINITY_BITS, (127 - 6) << 23).to(tl.float32, bitcast=True) * 1572864.0
    rounded = (magnitude + shift) - shift
    normal = (rounded.to(tl.int32, bitcast=True) >> 20) - ((127 - 7) << 3)
    subnormal = (rounded * 512.0).to(tl.int32)
    byte = tl.where(rounded >= 0.015625, normal, subnormal)
    byte = tl.where(magnitude_bits > INFINITY_BITS, 0x7F, byte)
    return (sign | byte).to(tl.uint8)


@triton.jit
def quantized_rows(x, POW2: tl.constexpr, HARDWARE: tl.constexpr):
    """(bytes [R, 128], bits of scales int32 [R]) of rows of one block each, float32 [R, 128]."""
    amax_bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    scale_bits = bits_of_scale(amax_bits, POW2)
    factor = factor_of(amax_bits, scale_bits, POW2)[:, None]
    return e4m3_bytes(quotient(x, factor, POW2), HARDWARE), scale_bits


@triton.jit
def e4m3_values(byte, HARDWARE: tl.constexpr):
    if HARDWARE:
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    bits = byte.to(tl.int32)
    magnitude = bits & 0x7F
    normal = ((magnitude << 20) + ((127 - 7) << 23)).to(tl.float32, bitcast=True)
    number = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    number = tl.where(magnitude == 0x7F, float("nan"), number)
    return tl.where(bits >= 0x80, -number, number)


@triton.jit
def rounded_to_bf16(x, HARDWARE: tl.constexpr):
    """The BF16 values nearest to float32 ``x``, ties to even."""
    if HARDWARE:
        return x.to(tl.bfloat16)
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return tl.where((bits & 0x7FFFFFFF) > INFINITY_BITS, x, rounded).to(tl.bfloat16)
