"""The data movement of grouped experts on a GPU: expert_reference.py in Triton, with memory read and written once.

The functions, their inputs and their outputs are those of expert_kernels.py. A program works on 128 rows of one expert
times 128 features: the rows' blocks and the columns' blocks of both quantizations. Programs of row blocks behind the
last expert end at once, and leave memory as they find it.

Triton's interpreter truncates where it converts to BF16 and rounds FP8 its own way: without HARDWARE integers round.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp8rl.fp8.blockwise import BLOCK, Scales
from megatron_fp8rl.fp8.kernels import _INFINITY_BITS, _NAN_BITS, _e4m3_bytes, _scale_bits
from megatron_fp8rl.trainer.expert_kernels import Layout, Quantized, SwigluGradients

_HARDWARE = os.environ.get("TRITON_INTERPRET") != "1"
_SIDE: tl.constexpr = tl.constexpr(BLOCK)

# Warps of a program. Two orientations hold a tile twice, and the backward pass three tiles of inputs.
_WARPS_OF_ROWS = 4
_WARPS_OF_BOTH = 8
_WARPS_OF_BACKWARD = 16
_UNPERMUTE_ROWS, _UNPERMUTE_COLUMNS, _UNPERMUTE_WARPS = 16, 512, 8


@triton.jit
def _build_layout(
    tokens_per_expert, offsets, padded_counts, experts, rows, positions, num_tokens, num_rows,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Program b fills rows [128 b, 128 b + 128), which are of one expert, and the positions of as many tokens."""
    expert = tl.arange(0, EXPERTS)
    counts = tl.load(tokens_per_expert + expert, mask=expert < NUM_EXPERTS, other=0).to(tl.int32)
    padded = (counts + _SIDE - 1) // _SIDE * _SIDE
    ends = tl.cumsum(counts, 0)
    padded_ends = tl.cumsum(padded, 0)
    block = tl.program_id(0)
    if block == 0:
        tl.store(offsets, 0)
        tl.store(offsets + 1 + expert, padded_ends, mask=expert < NUM_EXPERTS)
        tl.store(padded_counts + expert, padded, mask=expert < NUM_EXPERTS)

    place = block * _SIDE + tl.arange(0, _SIDE)
    mine = tl.sum((padded_ends <= block * _SIDE).to(tl.int32), axis=0)
    is_mine = expert == mine  # of no expert behind the last
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
def _rounded_to_bf16(x, HARDWARE: tl.constexpr):
    """The BF16 numbers nearest to float32 ``x``, ties to even."""
    if HARDWARE:
        return x.to(tl.bfloat16)
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return tl.where((bits & 0x7FFFFFFF) > _INFINITY_BITS, x, rounded).to(tl.bfloat16)


@triton.jit
def _quantized_bytes(x, amax_bits, scale_bits, POW2: tl.constexpr, HARDWARE: tl.constexpr):
    """E4M3 bytes of BF16 ``x`` in blocks whose largest magnitude and scale are given, broadcast over x."""
    x = x.to(tl.float32)
    if POW2:
        # The reciprocal of a power of two is exact, and so is the product with it where the quotient is.
        inverse_bits = tl.where(amax_bits >= _INFINITY_BITS, _NAN_BITS, (254 << 23) - scale_bits)
        return _e4m3_bytes(x * inverse_bits.to(tl.float32, bitcast=True), HARDWARE)
    scale = tl.zeros_like(x) + scale_bits.to(tl.float32, bitcast=True)
    return _e4m3_bytes(tl.div_rn(x, scale), HARDWARE)


@triton.jit
def _store_tile(
    x, block, column, num_rows, num_columns, offsets, expert, data, row_scales, columns_data, column_scales, bf16,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BF16: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Write BF16 ``x`` [128 rows, 128 features], zeros in padding, to the outputs that are wanted.

    block: of 128 rows, int64; column: first feature. Scales are stored as the bits of float32 numbers.
    """
    row = block * _SIDE + tl.arange(0, _SIDE)
    feature = column + tl.arange(0, _SIDE)
    place = row[:, None] * num_columns + feature[None, :]
    if BF16:
        tl.store(bf16 + place, x)
    # On the bits, because they order magnitudes and put NaN above infinity, which a maximum of floats would drop.
    magnitude = x.to(tl.int16, bitcast=True) & 0x7FFF
    if ROWS:
        amax_bits = tl.max(magnitude, axis=1).to(tl.int32) << 16
        scale_bits = _scale_bits(amax_bits, POW2)
        tl.store(row_scales + (column // _SIDE).to(tl.int64) * num_rows + row, scale_bits)
        tl.store(data + place, _quantized_bytes(x, amax_bits[:, None], scale_bits[:, None], POW2, HARDWARE))
    if COLUMNS:
        amax_bits = tl.max(magnitude, axis=0).to(tl.int32) << 16
        scale_bits = _scale_bits(amax_bits, POW2)
        tl.store(column_scales + block * num_columns + feature, scale_bits)
        found = _quantized_bytes(x, amax_bits[None, :], scale_bits[None, :], POW2, HARDWARE)
        first = tl.multiple_of(tl.load(offsets + expert), _SIDE)
        width = tl.multiple_of(tl.load(offsets + expert + 1) - first, _SIDE)
        token = block * _SIDE - first + tl.arange(0, _SIDE)
        base = columns_data + first.to(tl.int64) * num_columns
        tl.store(base + feature[:, None].to(tl.int64) * width + token[None, :], tl.trans(found))


@triton.jit
def _quantize(
    x, probs, rows, experts, offsets, data, row_scales, columns_data, column_scales, bf16, num_rows, num_columns,
    GATHER: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BF16: tl.constexpr,
    POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * _SIDE
    expert = tl.load(experts + block * _SIDE)
    if expert >= 0:
        row = block * _SIDE + tl.arange(0, _SIDE)
        source = tl.load(rows + row).to(tl.int64)
        inside = source >= 0
        place = (source if GATHER else row)[:, None] * num_columns + column + tl.arange(0, _SIDE)[None, :]
        tile = tl.load(x + place, mask=inside[:, None], other=0.0)
        if WEIGHTED:
            prob = tl.load(probs + source, mask=inside, other=0.0)
            tile = _rounded_to_bf16(tile.to(tl.float32) * prob[:, None], HARDWARE)
        _store_tile(
            tile, block, column, num_rows, num_columns, offsets, expert,
            data, row_scales, columns_data, column_scales, bf16, ROWS, COLUMNS, BF16, POW2, HARDWARE,
        )  # fmt: skip


@triton.jit
def _swiglu_quantize(
    h, experts, offsets, data, row_scales, columns_data, column_scales, bf16, num_rows, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BF16: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * _SIDE
    expert = tl.load(experts + block * _SIDE)
    if expert >= 0:
        row = block * _SIDE + tl.arange(0, _SIDE)
        inside = (tl.load(experts + row) >= 0)[:, None]
        place = row[:, None] * (2 * width) + column + tl.arange(0, _SIDE)[None, :]
        gate = tl.load(h + place, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(h + place + width, mask=inside, other=0.0).to(tl.float32)
        # The operations of vLLM's kernel in the same compiler, so that their approximations are the same.
        silu = _rounded_to_bf16(gate / (1.0 + tl.exp(-gate)), HARDWARE).to(tl.float32)
        _store_tile(
            _rounded_to_bf16(silu * up, HARDWARE), block, column, num_rows, width, offsets, expert,
            data, row_scales, columns_data, column_scales, bf16, ROWS, COLUMNS, BF16, POW2, HARDWARE,
        )  # fmt: skip


@triton.jit
def _swiglu_backward_quantize(
    dy, h, probs, rows, experts, offsets, data, row_scales, columns_data, column_scales, bf16,
    a_columns, a_scales, a_bf16, dprobs, num_rows, width,
    WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BF16: tl.constexpr,
    A_COLUMNS: tl.constexpr, A_BF16: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """dprobs is float32 [F / 128, P]: the sums over the features of a program."""
    block = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * _SIDE
    expert = tl.load(experts + block * _SIDE)
    if expert >= 0:
        row = block * _SIDE + tl.arange(0, _SIDE)
        token = tl.load(rows + row).to(tl.int64)
        inside = (token >= 0)[:, None]
        feature = column + tl.arange(0, _SIDE)[None, :]
        place = row[:, None] * (2 * width) + feature
        place_of_dy = row[:, None] * width + feature
        prob = 1.0
        if WEIGHTED:
            prob = tl.load(probs + token, mask=token >= 0, other=0.0)[:, None]
        if A_COLUMNS or A_BF16 or WEIGHTED:
            gate = tl.load(h + place, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(h + place + width, mask=inside, other=0.0).to(tl.float32)
            silu = _rounded_to_bf16(gate / (1.0 + tl.exp(-gate)), HARDWARE).to(tl.float32)
            activation = _rounded_to_bf16(silu * up, HARDWARE)
            if WEIGHTED:
                grad = tl.load(dy + place_of_dy, mask=inside, other=0.0).to(tl.float32)
                sums = tl.sum(activation.to(tl.float32) * grad, axis=1)
                tl.store(dprobs + (column // _SIDE).to(tl.int64) * num_rows + row, sums)
                activation = _rounded_to_bf16(activation.to(tl.float32) * prob, HARDWARE)
            _store_tile(
                activation, block, column, num_rows, width, offsets, expert,
                data, row_scales, a_columns, a_scales, a_bf16, False, A_COLUMNS, A_BF16, POW2, HARDWARE,
            )  # fmt: skip
        # Read again, from a cache, for each output: the registers of a program do not hold inputs beside outputs.
        gate = tl.load(h + place, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(dy + place_of_dy, mask=inside, other=0.0).to(tl.float32) * prob
        d_up = _rounded_to_bf16(grad * (gate * (1.0 / (1.0 + tl.exp(-gate)))), HARDWARE)
        _store_tile(
            d_up, block, width + column, num_rows, 2 * width, offsets, expert,
            data, row_scales, columns_data, column_scales, bf16, ROWS, COLUMNS, BF16, POW2, HARDWARE,
        )  # fmt: skip
        gate = tl.load(h + place, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(h + place + width, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(dy + place_of_dy, mask=inside, other=0.0).to(tl.float32) * prob
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        d_gate = _rounded_to_bf16(grad * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid))), HARDWARE)
        _store_tile(
            d_gate, block, column, num_rows, 2 * width, offsets, expert,
            data, row_scales, columns_data, column_scales, bf16, ROWS, COLUMNS, BF16, POW2, HARDWARE,
        )  # fmt: skip


@triton.jit
def _unpermute(
    y, probs, positions, out, num_tokens, num_columns,
    WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    # One axis of programs, of which there may be more than the 65,535 that the others hold.
    blocks = tl.cdiv(num_columns, COLUMNS)
    token = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    row = tl.load(positions + token, mask=token < num_tokens, other=-1).to(tl.int64)[:, None]
    inside = column < num_columns
    tile = tl.load(y + row * num_columns + column, mask=(row >= 0) & inside, other=0.0)
    if WEIGHTED:
        prob = tl.load(probs + token, mask=token < num_tokens, other=0.0)[:, None]
        # A token without a row is zero whatever its probability is.
        weighted = tl.where(row >= 0, tile.to(tl.float32) * prob, 0.0)
        tile = _rounded_to_bf16(weighted, HARDWARE)
    tl.store(out + token[:, None] * num_columns + column, tile, mask=(token < num_tokens)[:, None] & inside)


def layout_tensors(tokens_per_expert: Tensor, num_tokens: int, num_rows: int) -> tuple[Tensor, ...]:
    """(offsets, padded_counts, experts, rows, positions) of a ``Layout``, in one launch."""
    num_experts = len(tokens_per_expert)
    sizes = (num_experts + 1, num_experts, num_rows, num_rows, num_tokens)
    tensors = tuple(torch.empty(size, dtype=torch.int32, device=tokens_per_expert.device) for size in sizes)
    grid = (max(1, triton.cdiv(max(num_rows, num_tokens), BLOCK)),)
    with torch.cuda.device_of(tokens_per_expert):
        _build_layout[grid](
            tokens_per_expert.contiguous(), *tensors, num_tokens, num_rows,
            NUM_EXPERTS=num_experts, EXPERTS=triton.next_power_of_2(num_experts), num_warps=4,
        )  # fmt: skip
    return tensors


def _outputs(
    layout: Layout, num_columns: int, device: torch.device, rows: bool, columns: bool, bf16: bool
) -> Quantized:
    """Memory for the orientations that are wanted."""
    num_rows, num_blocks = layout.num_rows, layout.num_rows // BLOCK

    def empty(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return Quantized(
        rows=empty(num_rows, num_columns) if rows else None,
        row_scales=empty(num_columns // BLOCK, num_rows, dtype=torch.float32).t() if rows else None,
        columns=empty(num_rows * num_columns) if columns else None,
        column_scales=empty(num_blocks, num_columns, dtype=torch.float32).t() if columns else None,
        bf16=empty(num_rows, num_columns, dtype=torch.bfloat16) if bf16 else None,
    )


def _pointers(out: Quantized, unused: Tensor) -> tuple[Tensor, ...]:
    """(rows, row scales, columns, column scales, bf16) for a kernel: bytes, and the bits of scales."""

    def pointer(x: Tensor | None, dtype: torch.dtype) -> Tensor:
        return unused if x is None else x.view(dtype)

    return (
        pointer(out.rows, torch.uint8),
        pointer(None if out.row_scales is None else out.row_scales.t(), torch.int32),
        pointer(out.columns, torch.uint8),
        pointer(None if out.column_scales is None else out.column_scales.t(), torch.int32),
        pointer(out.bf16, torch.bfloat16),
    )


def _warps(columns: bool) -> int:
    return _WARPS_OF_BOTH if columns else _WARPS_OF_ROWS


def _run_quantize(
    x: Tensor, layout: Layout, scales: Scales, rows: bool, columns: bool, bf16: bool, probs: Tensor | None, gather: bool
) -> Quantized:
    out = _outputs(layout, x.shape[1], x.device, rows, columns, bf16)
    if layout.num_rows:
        with torch.cuda.device_of(x):
            _quantize[(x.shape[1] // BLOCK, layout.num_rows // BLOCK)](
                x, x if probs is None else probs, layout.rows, layout.experts, layout.offsets, *_pointers(out, x),
                layout.num_rows, x.shape[1], GATHER=gather, WEIGHTED=probs is not None,
                ROWS=rows, COLUMNS=columns, BF16=bf16, POW2=scales == "pow2", HARDWARE=_HARDWARE,
                num_warps=_warps(columns),
            )  # fmt: skip
    return out


def permute_quantize(
    x_TK: Tensor, layout: Layout, scales: Scales, *, rows: bool, columns: bool, bf16: bool, probs: Tensor | None
) -> Quantized:
    return _run_quantize(x_TK, layout, scales, rows, columns, bf16, probs, gather=True)


def quantize_rows_columns(x_PK: Tensor, layout: Layout, scales: Scales, *, rows: bool, columns: bool) -> Quantized:
    return _run_quantize(x_PK, layout, scales, rows, columns, False, None, gather=False)


def swiglu_quantize(
    h_P2F: Tensor, layout: Layout, scales: Scales, *, rows: bool, columns: bool, bf16: bool
) -> Quantized:
    width = h_P2F.shape[1] // 2
    out = _outputs(layout, width, h_P2F.device, rows, columns, bf16)
    if layout.num_rows:
        with torch.cuda.device_of(h_P2F):
            _swiglu_quantize[(width // BLOCK, layout.num_rows // BLOCK)](
                h_P2F, layout.experts, layout.offsets, *_pointers(out, h_P2F), layout.num_rows, width,
                ROWS=rows, COLUMNS=columns, BF16=bf16, POW2=scales == "pow2", HARDWARE=_HARDWARE,
                num_warps=_WARPS_OF_BOTH,
            )  # fmt: skip
    return out


def swiglu_backward_quantize(
    dy_PF: Tensor, h_P2F: Tensor, layout: Layout, scales: Scales, *, rows: bool, columns: bool, bf16: bool,
    activation_columns: bool, activation_bf16: bool, probs: Tensor | None,
) -> SwigluGradients:  # fmt: skip
    width, device = dy_PF.shape[1], h_P2F.device
    dh = _outputs(layout, 2 * width, device, rows, columns, bf16)
    activation = _outputs(layout, width, device, False, activation_columns, activation_bf16)
    sums = None if probs is None else torch.empty(width // BLOCK, layout.num_rows, device=device)
    if layout.num_rows:
        with torch.cuda.device_of(h_P2F):
            _swiglu_backward_quantize[(width // BLOCK, layout.num_rows // BLOCK)](
                dy_PF, h_P2F, h_P2F if probs is None else probs, layout.rows, layout.experts, layout.offsets,
                *_pointers(dh, h_P2F), *_pointers(activation, h_P2F)[2:], h_P2F if sums is None else sums,
                layout.num_rows, width, WEIGHTED=probs is not None, ROWS=rows, COLUMNS=columns, BF16=bf16,
                A_COLUMNS=activation_columns, A_BF16=activation_bf16, POW2=scales == "pow2", HARDWARE=_HARDWARE,
                num_warps=_WARPS_OF_BACKWARD,
            )  # fmt: skip
    return SwigluGradients(dh, activation, None if sums is None else _of_tokens(sums, layout))


def _of_tokens(sums: Tensor, layout: Layout) -> Tensor:
    """The total of partial sums [n, P] for each token; 0 for one that has no row."""
    if not layout.num_rows:
        return sums.new_zeros(layout.num_tokens)
    found = sums.sum(0)[layout.positions.clamp(min=0)]
    return torch.where(layout.positions >= 0, found, 0.0)


def unpermute(y_PN: Tensor, layout: Layout, probs: Tensor | None) -> Tensor:
    num_tokens, num_columns = layout.num_tokens, y_PN.shape[1]
    out = y_PN.new_empty(num_tokens, num_columns)
    if num_tokens:
        grid = (triton.cdiv(num_columns, _UNPERMUTE_COLUMNS) * triton.cdiv(num_tokens, _UNPERMUTE_ROWS),)
        with torch.cuda.device_of(y_PN):
            _unpermute[grid](
                y_PN, y_PN if probs is None else probs, layout.positions, out, num_tokens, num_columns,
                WEIGHTED=probs is not None, ROWS=_UNPERMUTE_ROWS, COLUMNS=_UNPERMUTE_COLUMNS, HARDWARE=_HARDWARE,
                num_warps=_UNPERMUTE_WARPS,
            )  # fmt: skip
    return out
