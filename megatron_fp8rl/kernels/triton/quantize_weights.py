"""Quantizes the weights of all experts on a GPU in one launch, without an address table from the host.

Data and scales are those of ``blockwise.quantize_weight``. Import only for CUDA tensors, or under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp8rl.kernels.blockwise import BLOCK, Scales
from megatron_fp8rl.kernels.triton.bits import HARDWARE
from megatron_fp8rl.kernels.triton.tiles import SIDE, load_pair, store_block

_WARPS = 8


@triton.jit
def _quantize_weights(weights, data, scales, num_rows, num_columns, POW2: tl.constexpr, HARDWARE: tl.constexpr):
    """One grid axis over (matrix, row of blocks, block)."""
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
    store_block(x, y, data + first + place, num_columns, scales + block, POW2, HARDWARE)


def can_quantize(weights_ENK: Tensor) -> bool:
    """Whether :func:`quantize_weights` accepts them: contiguous BF16 matrices of whole blocks."""
    is_whole = not any(size % BLOCK for size in weights_ENK.shape[1:])
    return weights_ENK.dtype == torch.bfloat16 and weights_ENK.is_contiguous() and is_whole


def quantize_weights(weights_ENK: Tensor, scales: Scales) -> tuple[Tensor, Tensor]:
    """(data float8_e4m3fn [E, N, K], scale float32 [E, N/128, K/128]) of contiguous BF16 [E, N, K], N and K multiples
    of 128; ValueError for others."""
    if not can_quantize(weights_ENK):
        raise ValueError(
            f"weights_ENK have to be contiguous bfloat16 with N and K multiples of {BLOCK}, not "
            f"{weights_ENK.dtype} {list(weights_ENK.shape)} with strides {weights_ENK.stride()}"
        )
    num_matrices, num_rows, num_columns = weights_ENK.shape
    data = torch.empty(weights_ENK.shape, dtype=torch.float8_e4m3fn, device=weights_ENK.device)
    scale = torch.empty(num_matrices, num_rows // BLOCK, num_columns // BLOCK, device=weights_ENK.device)
    with torch.cuda.device_of(weights_ENK):
        _quantize_weights[(scale.numel(),)](
            weights_ENK, data.view(torch.uint8), scale.view(torch.int32), num_rows, num_columns,
            POW2=scales == "pow2", HARDWARE=HARDWARE, num_warps=_WARPS,
        )  # fmt: skip
    return data, scale
