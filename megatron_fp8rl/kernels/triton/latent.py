"""Latent attention in the absorbed form on a GPU: one kernel for decoding, parts of prompts and packed sequences.

A row is one query of one head; all heads have the same keys, and values are the first features of keys. Neither the
batch, nor the pages, nor the other rows of a program change the bits of a row:

- keys are read in tiles of ``_TILE`` tokens at fixed positions, in order, and each tile is one pair of products;
- a tile without a visible key multiplies sums by 1 and adds zeros.

So a program may read tiles that some of its rows do not see. Sums are float32; weights are rounded to BF16.

Shapes: S = sequences, T = queries of all sequences, H = heads, L = features of a latent vector, R = rotated features.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp8rl.kernels.triton.bits import HARDWARE, rounded_to_bf16

_ROWS, _TILE = 64, 32  # rows of a program, keys of a product
_TERMS, _COLUMNS = 64, 128  # of the products by head
_LOG2_E = 1 / math.log(2)


@triton.jit
def _added(a, b, total, HARDWARE: tl.constexpr):
    """total + a b; Triton's interpreter multiplies no BF16 numbers."""
    if HARDWARE:
        return tl.dot(a, b, total)
    return tl.dot(a.to(tl.float32), b.to(tl.float32), total)


@triton.jit
def _attend(
    query, cache, pages, cu_queries, num_keys, out, to_log2, page_stride, token_stride, table_stride,
    H: tl.constexpr, L: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Program (i, s): ``ROWS`` rows of sequence s."""
    sequence, begin = tl.program_id(1).to(tl.int64), tl.program_id(0) * ROWS
    first = tl.load(cu_queries + sequence)
    num_queries = tl.load(cu_queries + sequence + 1) - first
    num_rows = num_queries * H
    if begin >= num_rows:
        return
    length = tl.load(num_keys + sequence)
    row = begin + tl.arange(0, ROWS)
    is_row = (row < num_rows)[:, None]
    row = tl.minimum(row, num_rows - 1)
    own = length - num_queries + row // H  # the last key that a row sees
    end = length - num_queries + (tl.minimum(begin + ROWS, num_rows) - 1) // H + 1
    feature, turned = tl.arange(0, L)[None, :], L + tl.arange(0, R)[None, :]
    place = (first.to(tl.int64) * H + row)[:, None]
    plain, rotated = tl.load(query + place * (L + R) + feature), tl.load(query + place * (L + R) + turned)
    largest, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, L], tl.float32)
    for start in range(0, end, TILE):
        token = start + tl.arange(0, TILE)
        is_seen = token[None, :] <= own[:, None]
        token = tl.minimum(token, length - 1)  # memory of this sequence
        page = tl.load(pages + sequence * table_stride + token // PAGE).to(tl.int64)
        key = (cache + page * page_stride + (token % PAGE) * token_stride)[:, None]
        mixed = tl.load(key + feature)
        scores = _added(plain, tl.trans(mixed), tl.zeros([ROWS, TILE], tl.float32), HARDWARE)
        scores = _added(rotated, tl.trans(tl.load(key + turned)), scores, HARDWARE)
        scores = tl.where(is_seen, scores * to_log2, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.math.exp2(largest - new_largest)
        weights = tl.math.exp2(scores - new_largest[:, None])
        total = total * shrink + tl.sum(weights, 1)
        sums = _added(rounded_to_bf16(weights, HARDWARE), mixed, sums * shrink[:, None], HARDWARE)
        largest = new_largest
    tl.store(out + place * L + feature, rounded_to_bf16(sums / total[:, None], HARDWARE), mask=is_row)


def attend(
    query: Tensor, cache: Tensor, pages: Tensor, cu_queries: Tensor, num_keys: Tensor, max_queries: int,
    softmax_scale: float, out: Tensor,
) -> None:  # fmt: skip
    """Fill ``out``, BF16 [T, H, L], contiguous.

    ``query`` BF16 [T, H, L + R], contiguous; ``cache`` BF16 [pages, tokens of a page, L + R] with adjacent features;
    ``pages`` int32 [S or more, pages of a sequence]; ``cu_queries`` int32 [S + 1], cumulative; ``num_keys`` int32 [S or
    more], with the keys of the queries, which are a sequence's last ones. L and R are powers of two.
    """
    num_heads, num_values = query.shape[1], out.shape[2]
    grid = triton.cdiv(max_queries * num_heads, _ROWS), len(cu_queries) - 1
    with torch.cuda.device_of(query):
        _attend[grid](
            query, cache, pages, cu_queries, num_keys, out, softmax_scale * _LOG2_E, cache.stride(0), cache.stride(1),
            pages.stride(0), H=num_heads, L=num_values, R=query.shape[2] - num_values, PAGE=cache.shape[1], ROWS=_ROWS,
            TILE=_TILE, HARDWARE=HARDWARE, num_warps=8, num_stages=2,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _by_head(
    x, matrix, out, num_rows, row_stride, head_stride, matrix_stride, term_stride, column_stride, N,
    K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Program (i, j, h): rows times columns of head h."""
    row, head = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(2).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = (row < num_rows)[:, None], (column < N)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, K, TERMS):
        term = begin + tl.arange(0, TERMS)
        left = x + row[:, None] * row_stride + head * head_stride + term[None, :]
        right = matrix + head * matrix_stride + term[:, None] * term_stride + column[None, :] * column_stride
        left, right = tl.load(left, mask=is_row, other=0.0), tl.load(right, mask=is_column, other=0.0)
        total = _added(left, right, total, HARDWARE)
    place = (row[:, None] * tl.num_programs(2) + head) * N + column[None, :]
    tl.store(out + place, rounded_to_bf16(total, HARDWARE), mask=is_row & is_column)


def by_head(x_THK: Tensor, matrices_HKN: Tensor) -> Tensor:
    """BF16 [T, H, N]: each head's rows times its matrix, terms added in blocks of 64 and rounded once.

    BF16 inputs of any strides, except that the features of ``x`` are adjacent. Raises ValueError unless K is a multiple
    of 64.
    """
    (num_rows, num_heads, size), num_columns = x_THK.shape, matrices_HKN.shape[2]
    if size % _TERMS or x_THK.stride(2) != 1:
        raise ValueError(f"products by head of {list(x_THK.shape)}: not supported by this kernel")
    out = x_THK.new_empty(num_rows, num_heads, num_columns)
    if num_rows:
        grid = triton.cdiv(num_rows, _ROWS), triton.cdiv(num_columns, _COLUMNS), num_heads
        with torch.cuda.device_of(x_THK):
            _by_head[grid](
                x_THK, matrices_HKN, out, num_rows, x_THK.stride(0), x_THK.stride(1), *matrices_HKN.stride(),
                num_columns, K=size, ROWS=_ROWS, COLUMNS=_COLUMNS, TERMS=_TERMS, HARDWARE=HARDWARE, num_warps=4,
            )  # fmt: skip
    return out
