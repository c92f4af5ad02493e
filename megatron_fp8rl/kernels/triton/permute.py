"""The data movement of grouped experts in Triton: fused_moe_torch.py with memory read once and written once.

SwiGLU's backward is a CUDA kernel (cuda/launch.py) for FP8 with power-of-two scales, rowwise and columnwise. A program
processes a tile of triton/tiles.py: 128 features of one expert's 128 rows, or of fewer rows without a columnwise copy.
Grids use only the first axis, because the others allow at most 65,535 programs.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp8rl.kernels.cuda import launch
from megatron_fp8rl.kernels.triton.bits import HARDWARE
from megatron_fp8rl.kernels.triton.packed import pack, packed_pair  # noqa: F401  pack is a function of fused_moe.py
from megatron_fp8rl.kernels.triton.tiles import (
    SIDE,
    activations,
    high,
    in_order,
    load_pair,
    low,
    pair,
    store_bf16,
    store_columns,
    store_rows,
    two_rows_backward,
)
from megatron_fp8rl.kernels.types import BLOCK, ExpertPermutation, Packed, Quantized, Scales, SwigluGradients

_IN_BLOCKS, _IN_MATRIX = tl.constexpr(1), tl.constexpr(2)  # forms of columns; 0: none


class _Launch(NamedTuple):
    """A tile of 4 ``quads`` rows, and its launch parameters."""

    quads: int
    num_warps: int
    maxnreg: int | None = None  # registers per thread, if limiting them increases occupancy
    gathered: int = 1  # tiles side by side, whose rows are gathered

    def options(self, columns: bool) -> dict[str, int | None]:
        assert not columns or 4 * self.quads == BLOCK
        return {"Q": self.quads, "num_warps": self.num_warps, "maxnreg": self.maxnreg}


# Measured on an H200, on experts and on dense layers: few warps with many registers are fastest.
_QUANTIZE_ROWS = _Launch(8, 2, gathered=2)
_QUANTIZE_BOTH = _Launch(32, 4, 168)
_SWIGLU_ROWS = _Launch(8, 2)
_SWIGLU_BOTH = _Launch(32, 16)
_BACKWARD = _Launch(32, 4, 255)  # some registers spill, yet it is fastest
_UNPERMUTE_ROWS, _UNPERMUTE_COLUMNS, _UNPERMUTE_WARPS = 8, 512, 4


@triton.jit(do_not_specialize=["num_tokens"])
def _build_layout(
    tokens_per_expert, offsets, padded_counts, experts, rows, positions, num_tokens, num_rows,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Program b fills rows [128 b, 128 b + 128), all of one expert, and the positions of as many tokens."""
    expert = tl.arange(0, EXPERTS)
    counts = tl.load(tokens_per_expert + expert, mask=expert < NUM_EXPERTS, other=0).to(tl.int32)
    padded = (counts + SIDE - 1) // SIDE * SIDE
    ends = tl.cumsum(counts, 0)
    padded_ends = tl.cumsum(padded, 0)
    block = tl.program_id(0)
    if block == 0:
        tl.store(offsets, 0)
        tl.store(offsets + 1 + expert, padded_ends, mask=expert < NUM_EXPERTS)
        tl.store(padded_counts + expert, padded, mask=expert < NUM_EXPERTS)

    place = block * SIDE + tl.arange(0, SIDE)
    mine = tl.sum((padded_ends <= block * SIDE).to(tl.int32), axis=0)
    is_mine = expert == mine  # all false in blocks after the last expert
    count = tl.sum(tl.where(is_mine, counts, 0), axis=0)
    first_token = tl.sum(tl.where(is_mine, ends - counts, 0), axis=0)
    first_row = tl.sum(tl.where(is_mine, padded_ends - padded, 0), axis=0)
    token = first_token + place - first_row
    taken = (place - first_row < count) & (place < num_rows) & (token < num_tokens)
    tl.store(experts + place, tl.where(taken, mine, -1), mask=place < num_rows)
    tl.store(rows + place, tl.where(taken, token, -1), mask=place < num_rows)
    tl.store(positions + token, place, mask=taken)
    tl.store(positions + place, -1, mask=(place >= tl.sum(counts, axis=0)) & (place < num_tokens))


@triton.jit
def _store_tile(
    x, y, row, column, num_rows, num_columns, data, row_scales, columns_data, column_scales, bf16,
    Q: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BF16: tl.constexpr, POW2: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Write a tile, with zeros in padding, to the requested outputs."""
    if ROWS:
        store_rows(x, y, row, column, num_rows, num_columns, data, row_scales, Q, POW2, HARDWARE)
    if COLUMNS:
        in_matrix: tl.constexpr = COLUMNS == _IN_MATRIX
        store_columns(x, y, row, column, num_rows, num_columns, columns_data, column_scales, in_matrix, POW2, HARDWARE)
    if BF16:
        store_bf16(x, y, row, column, num_columns, bf16, Q)


@triton.jit
def _quantize(
    x, probs, rows, experts, data, row_scales, columns_data, column_scales, bf16, num_rows, num_columns, width,
    Q: tl.constexpr, WEIGHTED: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BF16: tl.constexpr, POW2: tl.constexpr, TOGETHER: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    of_columns = num_rows // (4 * Q) * TOGETHER  # tiles over all rows, so that gathered rows are in L2
    inside = tl.program_id(0) % of_columns
    row = (inside // TOGETHER).to(tl.int64) * (4 * Q)
    column = (tl.program_id(0) // of_columns * TOGETHER + inside % TOGETHER) * SIDE
    expert = tl.load(experts + row // SIDE * SIDE)
    place = row + tl.arange(0, Q) * 4
    t0, t1 = tl.load(rows + place), tl.load(rows + place + 1)
    t2, t3 = tl.load(rows + place + 2), tl.load(rows + place + 3)
    if expert >= 0:
        if PACKED:
            a = packed_pair(x, t0, t1, column, num_columns, width, HARDWARE)
            b = packed_pair(x, t2, t3, column, num_columns, width, HARDWARE)
        else:
            feature = x + column + tl.arange(0, SIDE)[None, :]
            s0 = t0.to(tl.int64)[:, None] * num_columns
            s1 = t1.to(tl.int64)[:, None] * num_columns
            s2 = t2.to(tl.int64)[:, None] * num_columns
            s3 = t3.to(tl.int64)[:, None] * num_columns
            a = load_pair(feature + s0, feature + s1, (t0 >= 0)[:, None], (t1 >= 0)[:, None])
            b = load_pair(feature + s2, feature + s3, (t2 >= 0)[:, None], (t3 >= 0)[:, None])
        if WEIGHTED:
            p0 = tl.load(probs + t0, mask=t0 >= 0, other=0.0)[:, None]
            p1 = tl.load(probs + t1, mask=t1 >= 0, other=0.0)[:, None]
            p2 = tl.load(probs + t2, mask=t2 >= 0, other=0.0)[:, None]
            p3 = tl.load(probs + t3, mask=t3 >= 0, other=0.0)[:, None]
            a = pair(low(a) * p0, high(a) * p1, HARDWARE)
            b = pair(low(b) * p2, high(b) * p3, HARDWARE)
        _store_tile(
            a, b, row, column, num_rows, num_columns,
            data, row_scales, columns_data, column_scales, bf16, Q, ROWS, COLUMNS, BF16, POW2, HARDWARE,
        )  # fmt: skip


@triton.jit
def _swiglu_quantize(
    h, experts, data, row_scales, columns_data, column_scales, bf16, num_rows, width,
    Q: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BF16: tl.constexpr, POW2: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // (width // SIDE)).to(tl.int64) * (4 * Q)
    column = tl.program_id(0) % (width // SIDE) * SIDE
    expert = tl.load(experts + row // SIDE * SIDE)
    place = row + tl.arange(0, Q) * 4
    e0, e1 = tl.load(experts + place)[:, None], tl.load(experts + place + 1)[:, None]
    e2, e3 = tl.load(experts + place + 2)[:, None], tl.load(experts + place + 3)[:, None]
    if expert >= 0:
        gate = h + place[:, None] * (2 * width) + column + tl.arange(0, SIDE)[None, :]
        up = gate + width
        gates = load_pair(gate, gate + 2 * width, e0 >= 0, e1 >= 0)
        ups = load_pair(up, up + 2 * width, e0 >= 0, e1 >= 0)
        a = activations(gates, ups, HARDWARE)
        gates = load_pair(gate + 4 * width, gate + 6 * width, e2 >= 0, e3 >= 0)
        ups = load_pair(up + 4 * width, up + 6 * width, e2 >= 0, e3 >= 0)
        b = activations(gates, ups, HARDWARE)
        _store_tile(
            a, b, row, column, num_rows, width,
            data, row_scales, columns_data, column_scales, bf16, Q, ROWS, COLUMNS, BF16, POW2, HARDWARE,
        )  # fmt: skip


@triton.jit
def _swiglu_backward_quantize(
    dy, h, probs, rows, experts, data, row_scales, columns_data, column_scales, bf16,
    a_columns, a_scales, a_bf16, dprobs, num_rows, width,
    Q: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BF16: tl.constexpr,
    A_COLUMNS: tl.constexpr, A_BF16: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """dprobs is float32 [F / 128, P]: the sums over the features of a program."""
    row = (tl.program_id(0) // (width // SIDE)).to(tl.int64) * (4 * Q)
    column = tl.program_id(0) % (width // SIDE) * SIDE
    expert = tl.load(experts + row // SIDE * SIDE)
    place = row + tl.arange(0, Q) * 4
    t0, t1 = tl.load(rows + place), tl.load(rows + place + 1)
    t2, t3 = tl.load(rows + place + 2), tl.load(rows + place + 3)
    if expert >= 0:
        feature = column + tl.arange(0, SIDE)
        a, up_a, gate_a, s0, s1 = two_rows_backward(dy, h, probs, t0, t1, place, feature, width, WEIGHTED, HARDWARE)
        place += 2
        b, up_b, gate_b, s2, s3 = two_rows_backward(dy, h, probs, t2, t3, place, feature, width, WEIGHTED, HARDWARE)
        if WEIGHTED:
            sums = dprobs + (column // SIDE).to(tl.int64) * num_rows + row
            tl.store(sums + tl.arange(0, 4 * Q), in_order(s0, s1, s2, s3))
        if A_COLUMNS or A_BF16:
            _store_tile(
                a, b, row, column, num_rows, width,
                data, row_scales, a_columns, a_scales, a_bf16, Q, False, A_COLUMNS, A_BF16, POW2, HARDWARE,
            )  # fmt: skip
        _store_tile(
            up_a, up_b, row, width + column, num_rows, 2 * width,
            data, row_scales, columns_data, column_scales, bf16, Q, ROWS, COLUMNS, BF16, POW2, HARDWARE,
        )  # fmt: skip
        _store_tile(
            gate_a, gate_b, row, column, num_rows, 2 * width,
            data, row_scales, columns_data, column_scales, bf16, Q, ROWS, COLUMNS, BF16, POW2, HARDWARE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def _sum_for_tokens(sums, positions, out, num_tokens, num_rows, num_parts, SIZE: tl.constexpr):
    token = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    row = tl.load(positions + token, mask=token < num_tokens, other=-1)
    total = tl.zeros([SIZE], tl.float32)
    for _ in range(num_parts):
        total += tl.load(sums + row, mask=row >= 0, other=0.0)
        sums += num_rows
    tl.store(out + token, total, mask=token < num_tokens)


@triton.jit(do_not_specialize=["num_tokens"])
def _unpermute(
    y, probs, positions, out, num_tokens, num_columns,
    WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(num_columns, COLUMNS)
    token = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    row = tl.load(positions + token, mask=token < num_tokens, other=-1).to(tl.int64)[:, None]
    inside = column < num_columns
    tile = tl.load(y + row * num_columns + column, mask=(row >= 0) & inside, other=0.0)
    if WEIGHTED:
        prob = tl.load(probs + token, mask=token < num_tokens, other=0.0)[:, None]
        # A token without a row is zero whatever its probability.
        weighted = tl.where(row >= 0, tile.to(tl.float32) * prob, 0.0)
        tile = weighted.to(tl.bfloat16) if HARDWARE else high(pair(weighted, weighted, False)).to(tl.bfloat16)
    tl.store(out + token[:, None] * num_columns + column, tile, mask=(token < num_tokens)[:, None] & inside)


def layout_tensors(tokens_per_expert: Tensor, num_tokens: int, num_rows: int) -> tuple[Tensor, ...]:
    num_experts = len(tokens_per_expert)
    sizes = (num_experts + 1, num_experts, num_rows, num_rows, num_tokens)
    tensors = tuple(torch.empty(size, dtype=torch.int32, device=tokens_per_expert.device) for size in sizes)
    with torch.cuda.device_of(tokens_per_expert):
        _build_layout[(max(1, triton.cdiv(max(num_rows, num_tokens), BLOCK)),)](
            tokens_per_expert.contiguous(), *tensors, num_tokens, num_rows,
            NUM_EXPERTS=num_experts, EXPERTS=triton.next_power_of_2(num_experts), num_warps=4,
        )  # fmt: skip
    return tensors


def _outputs(
    layout: ExpertPermutation, num_columns: int, device: torch.device, rows: bool, columns: bool, bf16: bool
) -> Quantized:
    num_rows, num_blocks = layout.num_rows, layout.num_rows // BLOCK
    data = scales = None

    def empty(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    if columns:
        data = empty(num_columns, num_rows) if layout.in_matrix else empty(num_blocks, num_columns, BLOCK)
        scales = empty(num_blocks, num_columns, dtype=torch.float32)
        scales = scales.t() if layout.in_matrix else scales
    return Quantized(
        rows=empty(num_rows, num_columns) if rows else None,
        row_scales=empty(num_columns // BLOCK, num_rows, dtype=torch.float32).t() if rows else None,
        columns=data,
        column_scales=scales,
        bf16=empty(num_rows, num_columns, dtype=torch.bfloat16) if bf16 else None,
    )


def _form(columns: bool, layout: ExpertPermutation) -> int:
    return 0 if not columns else (_IN_MATRIX if layout.in_matrix else _IN_BLOCKS).value


def _pointers(out: Quantized, unused: Tensor) -> tuple[Tensor, ...]:
    """(rows, row scales, columns, column scales, bf16) for a kernel: bytes, words of columns, and bits of the rest."""

    def pointer(x: Tensor | None, dtype: torch.dtype) -> Tensor:
        return unused if x is None else x.view(dtype)

    return (
        pointer(out.rows, torch.uint8),
        pointer(None if out.row_scales is None else out.row_scales.t(), torch.int32),
        pointer(out.columns, torch.int32),
        pointer(out.column_scales, torch.int32),
        pointer(out.bf16, torch.int16),
    )


def permute_quantize(
    x_TK: Tensor | Packed, layout: ExpertPermutation, scales: Scales, *, rows: bool, columns: bool, bf16: bool,
    probs: Tensor | None,
) -> Quantized:  # fmt: skip
    is_packed = isinstance(x_TK, Packed)
    num_columns, x = (x_TK.num_features, x_TK.data) if is_packed else (x_TK.shape[1], x_TK)
    out = _outputs(layout, num_columns, x.device, rows, columns, bf16)
    num_tiles, how = num_columns // BLOCK, _QUANTIZE_BOTH if columns else _QUANTIZE_ROWS
    if layout.num_rows:
        with torch.cuda.device_of(x):
            _quantize[(num_tiles * (layout.num_rows // (4 * how.quads)),)](
                x, x if probs is None else probs, layout.rows if layout.sources is None else layout.sources,
                layout.experts, *_pointers(out, x), layout.num_rows, num_columns, x.shape[1],
                WEIGHTED=probs is not None, PACKED=is_packed, ROWS=rows, COLUMNS=_form(columns, layout), BF16=bf16,
                POW2=scales == "pow2", TOGETHER=math.gcd(num_tiles, how.gathered), HARDWARE=HARDWARE,
                **how.options(columns),
            )  # fmt: skip
    return out


def swiglu_quantize(
    h_P2F: Tensor, layout: ExpertPermutation, scales: Scales, *, rows: bool, columns: bool, bf16: bool
) -> Quantized:
    width = h_P2F.shape[1] // 2
    out = _outputs(layout, width, h_P2F.device, rows, columns, bf16)
    how = _SWIGLU_BOTH if columns else _SWIGLU_ROWS
    if layout.num_rows:
        with torch.cuda.device_of(h_P2F):
            _swiglu_quantize[(width // BLOCK * (layout.num_rows // (4 * how.quads)),)](
                h_P2F, layout.experts, *_pointers(out, h_P2F), layout.num_rows, width,
                ROWS=rows, COLUMNS=_form(columns, layout), BF16=bf16, POW2=scales == "pow2", HARDWARE=HARDWARE,
                **how.options(columns),
            )  # fmt: skip
    return out


def swiglu_backward_quantize(
    dy_PF: Tensor, h_P2F: Tensor, layout: ExpertPermutation, scales: Scales, *, rows: bool, columns: bool, bf16: bool,
    activation_columns: bool, activation_bf16: bool, probs: Tensor | None,
) -> SwigluGradients:  # fmt: skip
    width, device = dy_PF.shape[1], h_P2F.device
    dh = _outputs(layout, 2 * width, device, rows, columns, bf16=False)
    dh = replace(dh, bf16=h_P2F) if bf16 else dh  # a program reads values before it overwrites them
    activation = _outputs(layout, width, device, False, activation_columns, activation_bf16)
    sums = None if probs is None else torch.empty(width // BLOCK, layout.num_rows, device=device)
    is_fp8 = rows and columns and activation_columns and not (bf16 or activation_bf16)
    if layout.num_rows and is_fp8 and not layout.in_matrix and scales == "pow2" and launch.is_hopper(device):
        launch.swiglu_backward(
            dy_PF, h_P2F, probs, layout.rows, layout.experts,
            (dh.rows, dh.row_scales, dh.columns, dh.column_scales),
            (activation.columns, activation.column_scales), sums,
        )  # fmt: skip
    elif layout.num_rows:
        with torch.cuda.device_of(h_P2F):
            _swiglu_backward_quantize[(width // BLOCK * (layout.num_rows // BLOCK),)](
                dy_PF, h_P2F, h_P2F if probs is None else probs, layout.rows, layout.experts,
                *_pointers(dh, h_P2F), *_pointers(activation, h_P2F)[2:], h_P2F if sums is None else sums,
                layout.num_rows, width, WEIGHTED=probs is not None, ROWS=rows, COLUMNS=_form(columns, layout),
                BF16=bf16, A_COLUMNS=_form(activation_columns, layout), A_BF16=activation_bf16, POW2=scales == "pow2",
                HARDWARE=HARDWARE, **_BACKWARD.options(columns),
            )  # fmt: skip
    return SwigluGradients(dh, activation, None if sums is None else _of_tokens(sums, layout))


def _of_tokens(sums: Tensor, layout: ExpertPermutation) -> Tensor:
    """float32 [T]: the total of partial sums [n, P] for each token; 0 for a token without a row."""
    if not layout.num_rows:
        return sums.new_zeros(layout.num_tokens)
    out = sums.new_empty(layout.num_tokens)
    with torch.cuda.device_of(sums):
        _sum_for_tokens[(triton.cdiv(layout.num_tokens, 512),)](
            sums, layout.positions, out, layout.num_tokens, layout.num_rows, len(sums), SIZE=512, num_warps=4
        )
    return out


def unpermute(y_PN: Tensor, layout: ExpertPermutation, probs: Tensor | None) -> Tensor:
    num_tokens, num_columns = layout.num_tokens, y_PN.shape[1]
    out = y_PN.new_empty(num_tokens, num_columns)
    if num_tokens:
        grid = (triton.cdiv(num_columns, _UNPERMUTE_COLUMNS) * triton.cdiv(num_tokens, _UNPERMUTE_ROWS),)
        with torch.cuda.device_of(y_PN):
            _unpermute[grid](
                y_PN, y_PN if probs is None else probs, layout.positions, out, num_tokens, num_columns,
                WEIGHTED=probs is not None, ROWS=_UNPERMUTE_ROWS, COLUMNS=_UNPERMUTE_COLUMNS, HARDWARE=HARDWARE,
                num_warps=_UNPERMUTE_WARPS,
            )  # fmt: skip
    return out
