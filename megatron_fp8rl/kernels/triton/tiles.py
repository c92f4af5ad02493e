"""Tiles of 128 features in Triton: BF16 values quantized rowwise and columnwise without moving single bytes.

A tile of 4 Q rows is two matrices ``x`` and ``y`` of 32-bit words [Q, 128]. Word i of a feature contains BF16 values of
two rows, the first in its lower half. In x these are rows 4 i and 4 i + 1, in y rows 4 i + 2 and 4 i + 3. So one thread
makes four adjacent bytes of columnwise data, a tile is transposed in words, and amax takes two rows at a time. A
columnwise block has 128 rows, Q = 32; without columnwise data any Q works.

HARDWARE means that a GPU runs this: PTX instructions compute what Triton cannot express. Triton's interpreter, which
rounds conversions differently, computes the same values from integers.
"""

import triton
import triton.language as tl

from megatron_fp8rl.kernels.triton.bits import INFINITY_BITS, NAN_BITS, bits_of_scale, e4m3_bytes, factor_of, quotient
from megatron_fp8rl.kernels.types import BLOCK

SIDE: tl.constexpr = tl.constexpr(BLOCK)
_MAGNITUDES: tl.constexpr = tl.constexpr(0x7FFF7FFF)
_UPPER: tl.constexpr = tl.constexpr(-65536)

_PTX_PAIR: tl.constexpr = tl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
_PTX_MAX: tl.constexpr = tl.constexpr("max.u16x2 $0, $1, $2;")
# A subnormal result can be 0, because 1 is added to it.
_PTX_EXP: tl.constexpr = tl.constexpr("{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 $0, t; }")
_PTX_SIGMOID: tl.constexpr = tl.constexpr(
    "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; "
    "rcp.approx.ftz.f32 $0, t; }"
)
_PTX_PRODUCT: tl.constexpr = tl.constexpr("mul.rn.bf16x2 $0, $1, $2;")
_PTX_BYTES: tl.constexpr = tl.constexpr(
    "{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; "
    "mov.b32 $0, {l, h}; }"
)


@triton.jit
def low(words):
    return (words << 16).to(tl.float32, bitcast=True)


@triton.jit
def high(words):
    return (words & _UPPER).to(tl.float32, bitcast=True)


@triton.jit
def _bf16_bits(x):
    """Bits of the BF16 value nearest to float32 ``x``, ties to even, in the upper half of a word."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & _UPPER
    return tl.where((bits & 0x7FFFFFFF) > INFINITY_BITS, NAN_BITS, rounded)


@triton.jit
def pair(a, b, HARDWARE: tl.constexpr):
    """Words of the BF16 values nearest to float32 ``a`` and ``b``."""
    if HARDWARE:
        return tl.inline_asm_elementwise(_PTX_PAIR, "=r,f,f", [a, b], dtype=tl.int32, is_pure=True, pack=1)
    return ((_bf16_bits(a) >> 16) & 0xFFFF) | _bf16_bits(b)


@triton.jit
def exp_of_negative(x, HARDWARE: tl.constexpr):
    """exp(-x) of float32, to which 1 is added: the values of ``tl.exp``, but 0 in place of subnormal ones."""
    if HARDWARE:
        return tl.inline_asm_elementwise(_PTX_EXP, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return tl.exp(-x)


@triton.jit
def silu_and_sigmoid(x, HARDWARE: tl.constexpr):
    """Both of float32 ``x``, by division by 1 + exp(-x); below -87, where that exceeds 2^126, 0."""
    if HARDWARE:
        sigmoid = tl.inline_asm_elementwise(_PTX_SIGMOID, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
        return x * sigmoid, sigmoid
    divisor = 1.0 + tl.exp(-x)
    return x / divisor, 1.0 / divisor


@triton.jit
def product(a, b, HARDWARE: tl.constexpr):
    """Words of the products of BF16 values, rounded to BF16."""
    if HARDWARE:
        return tl.inline_asm_elementwise(_PTX_PRODUCT, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)
    return pair(low(a) * low(b), high(a) * high(b), HARDWARE)


@triton.jit
def load_pair(a, b, is_a, is_b):
    """Words of BF16 values at pointers ``a`` and ``b``; zeros where the optional masks are false."""
    first = tl.load(a, mask=is_a, other=None if is_a is None else 0.0).to(tl.int16, bitcast=True).to(tl.int32)
    second = tl.load(b, mask=is_b, other=None if is_b is None else 0.0).to(tl.int16, bitcast=True).to(tl.int32)
    return (first & 0xFFFF) | (second << 16)


@triton.jit
def activations(gates, ups, HARDWARE: tl.constexpr):
    """Words of silu(gate), rounded to BF16, times up, rounded to BF16."""
    g0, g1 = low(gates), high(gates)
    # The operations of vLLM's kernel in the same compiler, so that their approximations are the same.
    silu = pair(g0 / (1.0 + exp_of_negative(g0, HARDWARE)), g1 / (1.0 + exp_of_negative(g1, HARDWARE)), HARDWARE)
    return pair(low(silu) * low(ups), high(silu) * high(ups), HARDWARE)


@triton.jit
def _gradients(gate, up, grad, silu, sigmoid):  # of up and of gate, float32
    return grad * silu, grad * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))


@triton.jit
def two_rows_backward(dy, h, probs, t0, t1, place, feature, width, WEIGHTED: tl.constexpr, HARDWARE: tl.constexpr):
    """Words of the activation, dup and dgate of rows ``place`` and ``place + 1``, and their sums for dprobs."""
    is_0, is_1 = (t0 >= 0)[:, None], (t1 >= 0)[:, None]
    gate = h + place[:, None] * (2 * width) + feature[None, :]
    of_dy = dy + place[:, None] * width + feature[None, :]
    gates = load_pair(gate, gate + 2 * width, is_0, is_1)
    ups = load_pair(gate + width, gate + 3 * width, is_0, is_1)
    grads = load_pair(of_dy, of_dy + width, is_0, is_1)
    g0, g1, y0, y1 = low(gates), high(gates), low(grads), high(grads)
    silu0, sigmoid0 = silu_and_sigmoid(g0, HARDWARE)
    silu1, sigmoid1 = silu_and_sigmoid(g1, HARDWARE)
    activation = product(pair(silu0, silu1, HARDWARE), ups, HARDWARE)
    sum0, sum1 = place, place
    if WEIGHTED:
        p0 = tl.load(probs + t0, mask=t0 >= 0, other=0.0)[:, None]
        p1 = tl.load(probs + t1, mask=t1 >= 0, other=0.0)[:, None]
        sum0 = tl.sum(low(activation) * y0, axis=1)
        sum1 = tl.sum(high(activation) * y1, axis=1)
        activation = pair(low(activation) * p0, high(activation) * p1, HARDWARE)
        y0, y1 = y0 * p0, y1 * p1
    up0, gate0 = _gradients(g0, low(ups), y0, silu0, sigmoid0)
    up1, gate1 = _gradients(g1, high(ups), y1, silu1, sigmoid1)
    return activation, pair(up0, up1, HARDWARE), pair(gate0, gate1, HARDWARE), sum0, sum1


@triton.jit
def in_order(a, b, c, d):
    """[4 Q] from values of rows 4 i, 4 i + 1, 4 i + 2 and 4 i + 3, each [Q]."""
    return tl.join(tl.join(a, c), tl.join(b, d)).reshape(4 * a.shape[0])


@triton.jit
def _larger_of(a, b):
    return tl.inline_asm_elementwise(_PTX_MAX, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _larger(a, b, HARDWARE: tl.constexpr):
    """The larger magnitude in each half. On the bits, which order magnitudes and put NaN above infinity."""
    if HARDWARE:
        return _larger_of(a, b)
    return tl.maximum(a & 0xFFFF, b & 0xFFFF) | tl.maximum(a & _UPPER, b & _UPPER)


@triton.jit
def _largest(words, AXIS: tl.constexpr, HARDWARE: tl.constexpr):
    if HARDWARE:
        return tl.reduce(words, AXIS, _larger_of)
    return tl.max(words & 0xFFFF, axis=AXIS) | tl.max(words & _UPPER, axis=AXIS)


@triton.jit
def _bytes_of_four(a, b, c, d, HARDWARE: tl.constexpr):
    """Words of the E4M3 values nearest to four float32 ones, the first in the lowest byte."""
    if HARDWARE:
        return tl.inline_asm_elementwise(_PTX_BYTES, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)
    lower = e4m3_bytes(a, False).to(tl.int32) | (e4m3_bytes(b, False).to(tl.int32) << 8)
    return lower | (e4m3_bytes(c, False).to(tl.int32) << 16) | (e4m3_bytes(d, False).to(tl.int32) << 24)


@triton.jit
def _store_row(x, amax_bits, place, POW2: tl.constexpr, HARDWARE: tl.constexpr):
    """Quantize and store each row of float32 ``x`` [Q, 128]; return the bits of the row scales."""
    scale_bits = bits_of_scale(amax_bits, POW2)
    factor = factor_of(amax_bits, scale_bits, POW2)
    tl.store(place, e4m3_bytes(quotient(x, factor[:, None], POW2), HARDWARE))
    return scale_bits


@triton.jit
def store_rows(
    x, y, row, column, num_rows, num_columns, data, scales, Q: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr
):
    """Write a tile quantized rowwise: bytes [num_rows, num_columns], and bits of scales [num_columns / 128, num_rows].
    row: the tile's first, int64; column: its first feature."""
    place = data + (row + tl.arange(0, Q) * 4)[:, None] * num_columns + column + tl.arange(0, SIDE)[None, :]
    m = _largest(x & _MAGNITUDES, 1, HARDWARE)
    n = _largest(y & _MAGNITUDES, 1, HARDWARE)
    a = _store_row(low(x), m << 16, place, POW2, HARDWARE)
    b = _store_row(high(x), m & _UPPER, place + num_columns, POW2, HARDWARE)
    c = _store_row(low(y), n << 16, place + 2 * num_columns, POW2, HARDWARE)
    d = _store_row(high(y), n & _UPPER, place + 3 * num_columns, POW2, HARDWARE)
    first = (column // SIDE).to(tl.int64) * num_rows + row
    tl.store(scales + first + tl.arange(0, 4 * Q), in_order(a, b, c, d))


@triton.jit
def store_columns(
    x,
    y,
    row,
    column,
    num_rows,
    num_columns,
    data,
    scales,
    IN_MATRIX: tl.constexpr,
    POW2: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Write 128 rows quantized columnwise: bytes [num_rows / 128, num_columns, 128], as words, and their lines' scales.
    row: the tile's first, int64. A tile is contiguous, or with IN_MATRIX part of a matrix [num_columns, num_rows]."""
    feature = column + tl.arange(0, SIDE)
    m = _largest(_larger(x & _MAGNITUDES, y & _MAGNITUDES, HARDWARE), 0, HARDWARE)
    amax_bits = tl.maximum(m << 16, m & _UPPER)
    scale_bits = bits_of_scale(amax_bits, POW2)
    line = row // SIDE * num_columns + feature
    tl.store(scales + line, scale_bits)
    factor = factor_of(amax_bits, scale_bits, POW2)[None, :]
    words = _bytes_of_four(
        quotient(low(x), factor, POW2),
        quotient(high(x), factor, POW2),
        quotient(low(y), factor, POW2),
        quotient(high(y), factor, POW2),
        HARDWARE,
    )
    if IN_MATRIX:
        place = feature[:, None].to(tl.int64) * (num_rows // 4) + tl.arange(0, SIDE // 4)[None, :]
        tl.store(data + row // 4 + place, tl.trans(words))
    else:
        # Four words are a piece of 16 bytes, stored at piece ^ (feature % 8); the compiler cannot prove that they are
        # adjacent.
        word = tl.arange(0, SIDE // 4)[None, :] ^ (feature % 8 * 4)[:, None]
        word = tl.max_contiguous(tl.multiple_of(word, [1, 4]), [1, 4])
        tl.store(data + line[:, None] * (SIDE // 4) + word, tl.trans(words))


@triton.jit
def store_bf16(x, y, row, column, num_columns, out, Q: tl.constexpr):
    """Write the values of a tile to BF16 [rows, num_columns], whose bits ``out`` points to."""
    place = out + (row + tl.arange(0, Q) * 4)[:, None] * num_columns + column + tl.arange(0, SIDE)[None, :]
    tl.store(place, x.to(tl.int16))
    tl.store(place + num_columns, (x >> 16).to(tl.int16))
    tl.store(place + 2 * num_columns, y.to(tl.int16))
    tl.store(place + 3 * num_columns, (y >> 16).to(tl.int16))


@triton.jit
def store_block(x, y, place, num_columns, scale, POW2: tl.constexpr, HARDWARE: tl.constexpr):
    """Write a block of 128x128 as bytes, rows 4 i to ``place`` [32, 128] and the others below; and its one scale."""
    m = _largest(_larger(x & _MAGNITUDES, y & _MAGNITUDES, HARDWARE), 1, HARDWARE)
    amax_bits = tl.max(tl.maximum(m << 16, m & _UPPER), axis=0)
    scale_bits = bits_of_scale(amax_bits, POW2)
    tl.store(scale, scale_bits)
    factor = factor_of(amax_bits, scale_bits, POW2)
    tl.store(place, e4m3_bytes(quotient(low(x), factor, POW2), HARDWARE))
    tl.store(place + num_columns, e4m3_bytes(quotient(high(x), factor, POW2), HARDWARE))
    tl.store(place + 2 * num_columns, e4m3_bytes(quotient(low(y), factor, POW2), HARDWARE))
    tl.store(place + 3 * num_columns, e4m3_bytes(quotient(high(y), factor, POW2), HARDWARE))
