"""Weights on a GPU quantized in one pass for both of their products, y = x W^T and dx = g W: BF16 is read once.

Bytes and scales are those of ``blockwise.quantize_weight``; transposed, a block of 128x128 is the same block. Import
this module only for CUDA tensors, or under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp8rl.fp8.blockwise import BLOCK, Scales
from megatron_fp8rl.trainer.expert_tiles import SIDE, load_pair, store_block

_HARDWARE = os.environ.get("TRITON_INTERPRET") != "1"
_WARPS = 8


class BothWays(NamedTuple):
    """E4M3 matrices, the same transposed, and the float32 scales of their blocks."""

    data: Tensor  # [E, N, K]
    transposed: Tensor  # [E, K, N]
    scale: Tensor  # [E, N / 128, K / 128]


@triton.jit
def _quantize_both(
    weights, data, turned, scales, num_rows, num_columns, POW2: tl.constexpr, HARDWARE: tl.constexpr
):
    """One axis of programs: blocks of a row of blocks, rows of blocks of a matrix, matrices."""
    across = num_columns // SIDE
    down = num_rows // SIDE
    block = tl.program_id(0)
    column = block % across * SIDE
    row = (block // across % down).to(tl.int64) * SIDE
    first = (block // (across * down)).to(tl.int64) * num_rows * num_columns
    place = (row + tl.arange(0, SIDE // 4) * 4)[:, None] * num_columns + column + tl.arange(0, SIDE)[None, :]
    source = weights + first + place
    x = load_pair(source, source + num_columns, None, None)
    y = load_pair(source + 2 * num_columns, source + 3 * num_columns, None, None)
    store_block(
        x, y, row, column, num_rows, num_columns, data + first, turned + first // 4, scales + block, POW2, HARDWARE
    )


def quantize_both(weights_ENK: Tensor, scales: Scales) -> BothWays:
    """Quantize contiguous BF16 matrices whose sizes are multiples of 128, in one launch; ValueError for others."""
    num_matrices, num_rows, num_columns = weights_ENK.shape
    if weights_ENK.dtype != torch.bfloat16 or not weights_ENK.is_contiguous() or (num_rows | num_columns) % BLOCK:
        raise ValueError(
            f"weights_ENK have to be contiguous bfloat16 with N and K multiples of {BLOCK}, not "
            f"{weights_ENK.dtype} {list(weights_ENK.shape)} with strides {weights_ENK.stride()}"
        )
    device, down, across = weights_ENK.device, num_rows // BLOCK, num_columns // BLOCK
    made = BothWays(
        torch.empty(num_matrices, num_rows, num_columns, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(num_matrices, num_columns, num_rows, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(num_matrices, down, across, device=device),
    )
    with torch.cuda.device_of(weights_ENK):
        _quantize_both[(num_matrices * down * across,)](
            weights_ENK, made.data.view(torch.uint8), made.transposed.view(torch.int32), made.scale.view(torch.int32),
            num_rows, num_columns, POW2=scales == "pow2", HARDWARE=_HARDWARE, num_warps=_WARPS,
        )  # fmt: skip
    return made
