"""Bit-exact counterparts of the engine's batch-invariant router GEMM and expert sum.

The bits are those of vLLM's Triton kernels; the GEMM is that of ``engine.batch_invariant``. They add the same terms in
the same order regardless of the rest of the batch:

    product    x W^T in tiles of 128 x 128, terms added in float32 in blocks of 64, rounded once
    experts    a token's outputs slot by slot: total = fma(output, weight, total) in float32, rounded once

Thread layouts follow from block sizes, warps and dtypes. They equal the engine's and must not be tuned separately.

Shapes: T = rows, H = columns; K = terms of a product or sum, N = outputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE, _TERMS = 128, 64
_PRODUCT_WARPS, _PRODUCT_STAGES = 8, 3
_SUM_BLOCK, _SUM_WARPS = 1024, 2


@triton.jit(do_not_specialize=["num_rows"])
def _product(x, weight, out, num_rows, num_outputs, num_terms, TILE: tl.constexpr, TERMS: tl.constexpr):
    """Program (t, n) computes a tile of x [T, K] times weight [N, K] transposed."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    output = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_row, is_output = row < num_rows, output < num_outputs
    total = tl.zeros([TILE, TILE], dtype=tl.float32)
    for first in range(0, num_terms, TERMS):
        term = first + tl.arange(0, TERMS)
        inside = term < num_terms
        left = tl.load(x + row[:, None] * num_terms + term[None, :], mask=is_row[:, None] & inside[None, :], other=0.0)
        right = tl.load(
            weight + output[None, :] * num_terms + term[:, None], mask=is_output[None, :] & inside[:, None], other=0.0
        )
        total = tl.dot(left, right, total)
    place = row[:, None] * num_outputs + output[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def _weighted_sum(outputs, rows, weights, out, num_columns, TERMS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for term in range(0, TERMS):
        row = tl.load(rows + token * TERMS + term).to(tl.int64)
        weight = tl.load(weights + token * TERMS + term)
        value = tl.load(outputs + row * num_columns + column, mask=inside, other=0.0)
        total += value.to(tl.float32) * weight
    tl.store(out + token * num_columns + column, total.to(out.dtype.element_ty), mask=inside)


def linear(x_TK: Tensor, weight_NK: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[T, N] = x W^T in ``dtype``, by default that of both, contiguous; the engine's dtype is BF16."""
    num_rows, num_outputs = x_TK.shape[0], weight_NK.shape[0]
    out = x_TK.new_empty(num_rows, num_outputs, dtype=dtype or x_TK.dtype)
    if num_rows:
        with torch.cuda.device_of(x_TK):
            _product[(triton.cdiv(num_rows, _TILE), triton.cdiv(num_outputs, _TILE))](
                x_TK,
                weight_NK,
                out,
                num_rows,
                num_outputs,
                x_TK.shape[1],
                TILE=_TILE,
                TERMS=_TERMS,
                num_warps=_PRODUCT_WARPS,
                num_stages=_PRODUCT_STAGES,
            )
    return out


def weighted_sum(outputs: Tensor, rows_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """[T, H] in the dtype of ``outputs`` [any, H]: sums of rows times float32 weights; all contiguous."""
    (num_tokens, num_terms), num_columns = rows_TK.shape, outputs.shape[1]
    out = outputs.new_empty(num_tokens, num_columns)
    if num_tokens:
        block = min(triton.next_power_of_2(num_columns), _SUM_BLOCK)
        with torch.cuda.device_of(outputs):
            _weighted_sum[(num_tokens, triton.cdiv(num_columns, block))](
                outputs, rows_TK, weights_TK, out, num_columns, TERMS=num_terms, BLOCK=block, num_warps=_SUM_WARPS
            )
    return out
