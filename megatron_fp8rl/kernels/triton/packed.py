"""Rows in FP8 followed by their scales, in Triton: ``fused_moe.pack`` in one launch, and reading such rows in a tile.

Values equal ``blockwise.quantize_activation`` with power-of-two scales; a scale is one byte, its exponent.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp8rl.kernels.triton.bits import HARDWARE, e4m3_values, quantized_rows
from megatron_fp8rl.kernels.triton.tiles import SIDE, pair

_ROWS = 16  # of a program


@triton.jit(do_not_specialize=["num_rows"])
def _pack(x, out, num_rows, num_columns, width, ROWS: tl.constexpr, HARDWARE: tl.constexpr):
    blocks = num_columns // SIDE
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(0) % blocks
    inside = row < num_rows
    feature = block * SIDE + tl.arange(0, SIDE)[None, :]
    numbers = tl.load(x + row[:, None] * num_columns + feature, mask=inside[:, None], other=0.0).to(tl.float32)
    byte, scale_bits = quantized_rows(numbers, True, HARDWARE)
    place = out + row * width
    tl.store(place[:, None] + feature, byte, mask=inside[:, None])
    tl.store(place + num_columns + block, ((scale_bits >> 23) & 0xFF).to(tl.uint8), mask=inside)


@triton.jit
def _values(x, row, column, num_columns, width, HARDWARE: tl.constexpr):
    """float32 [rows, 128]: 128 features of packed rows, zeros where ``row`` is negative."""
    place = x + row.to(tl.int64)[:, None] * width
    is_row = (row >= 0)[:, None]
    byte = tl.load(place + column + tl.arange(0, SIDE)[None, :], mask=is_row, other=0)
    exponent = tl.load(place + num_columns + column // SIDE, mask=is_row, other=1).to(tl.int32)
    return e4m3_values(byte, HARDWARE) * (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def packed_pair(x, a, b, column, num_columns, width, HARDWARE: tl.constexpr):
    """:func:`tiles.load_pair` of packed rows ``a`` and ``b``: their values are BF16 exactly."""
    first = _values(x, a, column, num_columns, width, HARDWARE)
    return pair(first, _values(x, b, column, num_columns, width, HARDWARE), HARDWARE)


def pack(x_TH: Tensor, width: int) -> Tensor:
    """See ``fused_moe.pack``: uint8 [T, width]."""
    num_rows, num_columns = x_TH.shape
    out = torch.empty(num_rows, width, dtype=torch.uint8, device=x_TH.device)
    if num_rows:
        with torch.cuda.device_of(x_TH):
            _pack[(triton.cdiv(num_rows, _ROWS) * (num_columns // SIDE.value),)](
                x_TH, out, num_rows, num_columns, width, ROWS=_ROWS, HARDWARE=HARDWARE, num_warps=4
            )
    return out
