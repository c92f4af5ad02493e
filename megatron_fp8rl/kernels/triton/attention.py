"""Causal attention as one function of a query, its keys and values: decoding over a paged cache, and packed sequences.

Decoding (Triton) and packed sequences (``cuda/packed_attention.cu``) give a query the same bits. Neither the batch, nor
the pages, nor the position in a chunk changes them:

- keys are read in tiles of ``TILE`` tokens at fixed positions, and each tile is one pair of matrix products;
- ``SPLIT`` tokens at fixed positions are one part, with its own maximum and sums; parts are added from left to right;
- the sum of exponentials of a tile is a sum of integers, which does not depend on an order.

With a ``window`` a query sees so many last keys, with its own. Maxima then start at -1e30 instead of minus infinity. A
tile or part without a visible key has weights of 0 and leaves maximum and sums unchanged, so it may be skipped.

The cache has keys and values in E4M3 times powers of two. Products are FP16, which represents every E4M3 number, and
queries and probabilities more precisely than BF16. Even and odd features of a key are multiplied one after the other.
Sums are float32.

Decoding saves arithmetic per cached byte. Keys are the rows of its products, and the few queries of a group the 8 or 16
columns. Bytes are read in pairs of features, because 16-bit matrices can be transposed on the way from shared memory.
Heads of 96 features are computed as 128 features, of which the last 32 are zeros.

Shapes: S = sequences, T = queries of all sequences, K = keys of all sequences, Q = query heads, G = groups (key and
value heads), D = features of a head.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp8rl.kernels.cuda import launch
from megatron_fp8rl.kernels.triton.bits import HARDWARE, rounded_to_bf16

HEAD_DIMS = (64, 96, 128, 256)
MAX_GROUP = 16  # query heads of a group
TILE = 128  # keys of one product
SPLIT = launch.PART  # keys of a part
# (programs without cuts, parts of a program): enough programs for the 132 processors of a Hopper GPU.
_PARTS = ((512, 4), (128, 2), (0, 1))

_LEAST: tl.constexpr = tl.constexpr(-1e30)  # the first maximum with a window
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_ONE: tl.constexpr = tl.constexpr(0x3F800000)  # the bits of 1.0
_UNIT: tl.constexpr = tl.constexpr(2.0**-23)  # the last bit of numbers from 1 to 2


@triton.jit
def _halves(pairs, HARDWARE: tl.constexpr):
    """Pairs of E4M3 bytes as int16 -> (lower bytes, upper bytes), each as FP16."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 turned;
            .reg .b16 lower, upper;
            prmt.b32 turned, $2, 0, 0x3120;
            mov.b32 {lower, upper}, turned;
            cvt.rn.f16x2.e4m3x2 $0, lower;
            cvt.rn.f16x2.e4m3x2 $1, upper;
            }
            """,
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    # Moved to their place, sign, exponent and mantissa are FP16 of 2^-8 times the number, also where it is subnormal.
    bits = pairs.to(tl.int32)
    lower = (((bits << 8) & 0x8000) | ((bits << 7) & 0x3F80)).to(tl.uint16)
    upper = ((bits & 0x8000) | ((bits >> 1) & 0x3F80)).to(tl.uint16)
    return lower.to(tl.float16, bitcast=True) * 256.0, upper.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def _pairs_of(place, pair, mask, D: tl.constexpr):
    """Load pairs of features; ``pair`` broadcasts to ``place``. Those behind a head of ``D`` features are zeros."""
    if triton.next_power_of_2(D) != D:
        is_pair = pair < D // 2
        return tl.load(place, mask=is_pair if mask is None else is_pair & mask, other=0)
    return tl.load(place) if mask is None else tl.load(place, mask=mask, other=0)


@triton.jit
def _weights(scores, factor, largest, total, AXIS: tl.constexpr):
    """(weights, factor of earlier sums, largest, total) after a tile. ``AXIS``: the keys of ``scores``."""
    new_largest = tl.maximum(largest, tl.max(scores, AXIS) * factor)
    shrink = tl.math.exp2(largest - new_largest)
    zero = tl.zeros_like(scores)
    weights = tl.math.exp2(tl.fma(scores, zero + factor, zero - tl.expand_dims(new_largest, AXIS)))
    # From 1 to 2 all numbers have the same last bit, so their bits are integers that add without rounding.
    units = tl.sum((weights + 1.0).to(tl.int32, bitcast=True) - _ONE, AXIS)
    total = tl.fma(total, shrink, units.to(tl.float32) * _UNIT)
    return weights, shrink, new_largest, total


@triton.jit
def _fold(largest, total, part_largest, part_total):
    """(largest, total, factor of the sums so far, factor of the part's sums) with one more part."""
    new_largest = tl.maximum(largest, part_largest)
    shrink, weight = tl.math.exp2(largest - new_largest), tl.math.exp2(part_largest - new_largest)
    return new_largest, tl.fma(part_total, weight, total * shrink), shrink, weight


@triton.jit
def _added(sums, part_sums, shrink, weight):
    return tl.fma(part_sums, tl.zeros_like(sums) + weight, sums * shrink)


@triton.jit
def _decode(
    query, cache, pages, lengths, key_scale, value_scale, out, parts, norms, softmax_scale, query_stride, page_stride,
    token_stride, head_stride, table_stride, num_parts, PAGE: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr,
    COLUMNS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, EACH: tl.constexpr, HARDWARE: tl.constexpr,
    WINDOW: tl.constexpr = 0,
):  # fmt: skip
    """Program (s, g, i): ``EACH`` parts of sequence s for the queries of group g. ``cache`` and its strides are in
    pairs of bytes. ``parts`` float32 [S, parts, Q, D] and ``norms`` float32 [2, S, parts, Q]: maximum and sum. With a
    ``WINDOW``, parts are counted from the first one with a visible key."""
    sequence, group, block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length, first = tl.load(lengths + sequence), block * (SPLIT * EACH)
    lowest: tl.constexpr = _LEAST if WINDOW else float("-inf")
    rest = length  # tokens from the first part on
    if WINDOW:
        visible = tl.maximum(length - WINDOW, 0)
        skipped = visible // SPLIT
        rest -= skipped * SPLIT
    if first > 0 and first >= rest:
        return
    if WINDOW:
        first += skipped * SPLIT
    num_heads = tl.num_programs(1) * GROUP
    W: tl.constexpr = triton.next_power_of_2(D)
    pair, column = tl.arange(0, W // 2), tl.arange(0, COLUMNS)
    head, is_head = group * GROUP + column, (column < GROUP)[None, :]
    if W != D:
        is_head &= (pair < D // 2)[:, None]
    place = query + sequence * query_stride + head[None, :] * D + 2 * pair[:, None]
    to_log2 = softmax_scale * _LOG2_E
    even = (tl.load(place, mask=is_head, other=0.0).to(tl.float32) * to_log2).to(tl.float16)
    odd = (tl.load(place + 1, mask=is_head, other=0.0).to(tl.float32) * to_log2).to(tl.float16)
    factor = tl.load(key_scale)
    cache += group * head_stride
    largest, total = tl.full([COLUMNS], lowest, tl.float32), tl.zeros([COLUMNS], tl.float32)
    sum_even, sum_odd = tl.zeros([W // 2, COLUMNS], tl.float32), tl.zeros([W // 2, COLUMNS], tl.float32)
    for part in range(first // SPLIT, tl.minimum(tl.cdiv(length, SPLIT), first // SPLIT + EACH)):
        part_largest, part_total = tl.full([COLUMNS], lowest, tl.float32), tl.zeros([COLUMNS], tl.float32)
        part_even, part_odd = tl.zeros([W // 2, COLUMNS], tl.float32), tl.zeros([W // 2, COLUMNS], tl.float32)
        end = tl.minimum(length, (part + 1) * SPLIT)
        begin = part * SPLIT
        if WINDOW:
            begin = tl.maximum(begin, visible // TILE * TILE)
        for start in range(begin, end, TILE):
            token = start + tl.arange(0, TILE)
            is_token = (token < end)[:, None]
            token = tl.minimum(token, end - 1)  # memory of this sequence
            if WINDOW:
                is_token &= (token >= visible)[:, None]
                token = tl.maximum(token, visible)
            page = tl.load(pages + sequence * table_stride + token // PAGE).to(tl.int64)
            row = cache + page * page_stride + (token % PAGE) * token_stride
            key_even, key_odd = _halves(_pairs_of(row[:, None] + pair[None, :], pair[None, :], None, D), HARDWARE)
            scores = tl.where(is_token, tl.dot(key_odd, odd, tl.dot(key_even, even)), float("-inf"))
            weights, shrink, part_largest, part_total = _weights(scores, factor, part_largest, part_total, 0)
            values = _pairs_of(row[None, :] + D // 2 + pair[:, None], pair[:, None], None, D)
            value_even, value_odd = _halves(values, HARDWARE)
            part_even = tl.dot(value_even, weights.to(tl.float16), part_even * shrink[None, :])
            part_odd = tl.dot(value_odd, weights.to(tl.float16), part_odd * shrink[None, :])
        if rest <= SPLIT * EACH:
            largest, total, shrink, weight = _fold(largest, total, part_largest, part_total)
            sum_even = _added(sum_even, part_even, shrink[None, :], weight[None, :])
            sum_odd = _added(sum_odd, part_odd, shrink[None, :], weight[None, :])
        else:
            result = (sequence * num_parts + part) * num_heads + head
            if WINDOW:
                result -= skipped * num_heads
            tl.store(parts + result[None, :] * D + 2 * pair[:, None], part_even, mask=is_head)
            tl.store(parts + result[None, :] * D + 2 * pair[:, None] + 1, part_odd, mask=is_head)
            tl.store(norms + result, part_largest, mask=column < GROUP)
            second = tl.num_programs(0).to(tl.int64) * num_parts * num_heads
            tl.store(norms + second + result, part_total, mask=column < GROUP)
    if rest <= SPLIT * EACH:
        scale = tl.where(total > 0, tl.load(value_scale) / total, 0.0)[None, :]
        whole = out + (sequence * num_heads + head)[None, :] * D + 2 * pair[:, None]
        tl.store(whole, rounded_to_bf16(sum_even * scale, HARDWARE), mask=is_head)
        tl.store(whole + 1, rounded_to_bf16(sum_odd * scale, HARDWARE), mask=is_head)


@triton.jit
def _merge(
    lengths, value_scale, out, parts, norms, num_parts,
    D: tl.constexpr, SPLIT: tl.constexpr, EACH: tl.constexpr, HARDWARE: tl.constexpr, WINDOW: tl.constexpr = 0,
):  # fmt: skip
    """Program (s, q): the parts of query head q of sequence s, from left to right."""
    sequence, head, num_heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    length = tl.load(lengths + sequence)
    lowest: tl.constexpr = _LEAST if WINDOW else float("-inf")
    if WINDOW:
        length -= tl.maximum(length - WINDOW, 0) // SPLIT * SPLIT
    if length <= SPLIT * EACH:
        return
    W: tl.constexpr = triton.next_power_of_2(D)
    feature = tl.arange(0, W)
    is_feature = feature < D if W != D else None
    second = tl.num_programs(0).to(tl.int64) * num_parts * num_heads
    largest, total = tl.full([1], lowest, tl.float32), tl.zeros([1], tl.float32)
    sums = tl.zeros([W], tl.float32)
    for part in range(tl.cdiv(length, SPLIT)):
        row = (sequence * num_parts + part) * num_heads + head
        norm = norms + row + tl.arange(0, 1)
        largest, total, shrink, weight = _fold(largest, total, tl.load(norm), tl.load(norm + second))
        sums = _added(sums, tl.load(parts + row * D + feature, mask=is_feature), shrink, weight)
    scale = tl.load(value_scale) / total
    result = out + (sequence * num_heads + head) * D + feature
    tl.store(result, rounded_to_bf16(sums * scale, HARDWARE), mask=is_feature)


def _check(query: Tensor, num_groups: int) -> int:
    """Query heads of a group. Raises ValueError for other shapes than :func:`decode` supports."""
    _, num_heads, head_dim = query.shape
    group = num_heads // num_groups
    if head_dim not in HEAD_DIMS or not 0 < group <= MAX_GROUP or query.stride()[1:] != (head_dim, 1):
        raise ValueError(f"queries {list(query.shape)} in {num_groups} groups: not supported by this kernel")
    return group


def decode(
    query: Tensor, cache: Tensor, pages: Tensor, lengths: Tensor, key_scale: Tensor, value_scale: Tensor,
    softmax_scale: float, out: Tensor, parts_of_a_program: int | None = None, window: int | None = None,
) -> None:  # fmt: skip
    """Fill ``out``, BF16 [S, Q, D], contiguous; zeros for a sequence without tokens.

    ``query`` BF16 [S, Q, D] with adjacent heads; ``cache`` bytes [pages, tokens of a page, G, 2 D] of any strides, key
    before value; ``pages`` int32 [S or more, pages of a sequence]; ``lengths`` int32 [S or more], including the new
    token, whose key and value are in the cache; scales float32 with one element, powers of two. The bits do not depend
    on ``parts_of_a_program``. With a ``window``, pages before it are not read. Raises ValueError unless D is one of
    :data:`HEAD_DIMS` and a group has at most :data:`MAX_GROUP` query heads.
    """
    num_sequences, num_heads, head_dim = query.shape
    group = _check(query, cache.shape[2])
    if num_sequences == 0:
        return
    paired = cache.view(torch.int16)
    programs = num_sequences * cache.shape[2]
    each = parts_of_a_program or next(parts for least, parts in _PARTS if programs >= least)
    most = math.ceil(pages.shape[1] * cache.shape[1] / SPLIT)  # parts of a sequence
    if window is not None:
        most = min(most, math.ceil((window - 1) / SPLIT) + 1)
    blocks = max(1, math.ceil(most / each))
    num_parts = blocks * each
    parts, norms = out, out  # not used by one block
    if blocks > 1:
        parts = torch.empty(num_sequences, num_parts, num_heads, head_dim, dtype=torch.float32, device=out.device)
        norms = torch.empty(2, num_sequences, num_parts, num_heads, dtype=torch.float32, device=out.device)
    with torch.cuda.device_of(query):
        _decode[(num_sequences, cache.shape[2], blocks)](
            query, paired, pages, lengths, key_scale, value_scale, out, parts, norms, softmax_scale, query.stride(0),
            paired.stride(0), paired.stride(1), paired.stride(2), pages.stride(0), num_parts, PAGE=cache.shape[1],
            D=head_dim, GROUP=group, COLUMNS=max(8, triton.next_power_of_2(group)), TILE=TILE, SPLIT=SPLIT, EACH=each,
            HARDWARE=HARDWARE, WINDOW=window or 0, num_warps=8 if head_dim == 256 else 4,
            num_stages=2 if head_dim == 256 else 3,
        )  # fmt: skip
        if blocks > 1:
            _merge[(num_sequences, num_heads)](
                lengths, value_scale, out, parts, norms, num_parts, D=head_dim, SPLIT=SPLIT, EACH=each,
                HARDWARE=HARDWARE, WINDOW=window or 0, num_warps=1 if head_dim == 64 else 4,
            )  # fmt: skip


def packed(
    query: Tensor, keys: Tensor, values: Tensor, key_scale: Tensor, value_scale: Tensor, softmax_scale: float, *,
    cu_queries: Tensor, key_starts: Tensor, num_keys: Tensor, max_queries: int, window: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Causal attention over packed sequences: (BF16 [T, Q, D], natural log-sum-exp float32 [Q, T]).

    ``query`` BF16 [T, Q, D] with adjacent heads; ``keys`` and ``values`` FP16 [K, G, W] from :func:`read_pages` or
    :func:`read_rows`; ``cu_queries`` int32 [S + 1] cumulative; ``key_starts`` and ``num_keys`` int32 [S or more]. The
    last query of a sequence sees all its keys, or the last ``window`` of them. Each query has the bits of
    :func:`decode`. Raises ValueError for shapes that :func:`decode` does not support.
    """
    num_tokens, num_heads, head_dim = query.shape
    _check(query, keys.shape[1])
    if padding := keys.shape[2] - head_dim:
        query = torch.nn.functional.pad(query, (0, padding))
    out = torch.empty(query.shape, dtype=torch.bfloat16, device=query.device)
    log_sums = torch.empty(num_heads, num_tokens, dtype=torch.float32, device=query.device)
    launch.packed_attention(
        query, keys, values, cu_queries, key_starts, num_keys, key_scale, value_scale, softmax_scale, max_queries, out,
        log_sums, window or 0,
    )  # fmt: skip
    return (out[..., :head_dim].contiguous() if padding else out), log_sums


@triton.jit
def _read_pages(
    cache, pages, starts, lengths, firsts, keys, values, page_stride, token_stride, head_stride, table_stride,
    PAGE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Program (i, g, s): ``BLOCK`` tokens of group g of sequence s. ``cache`` as in :func:`_decode`."""
    group, sequence = tl.program_id(1), tl.program_id(2)
    W: tl.constexpr = triton.next_power_of_2(D)
    token, pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, W // 2)[None, :]
    is_token = token < tl.load(lengths + sequence)
    if firsts is not None:
        is_token &= token >= tl.load(firsts + sequence)
    page = tl.load(pages + sequence.to(tl.int64) * table_stride + token // PAGE, mask=is_token, other=0).to(tl.int64)
    row = (cache + page * page_stride + (token % PAGE) * token_stride + group * head_stride)[:, None] + pair
    key_even, key_odd = _halves(_pairs_of(row, pair, is_token[:, None], D), HARDWARE)
    value_even, value_odd = _halves(_pairs_of(row + D // 2, pair, is_token[:, None], D), HARDWARE)
    place = ((tl.load(starts + sequence) + token).to(tl.int64) * tl.num_programs(1) + group)[:, None] * W
    tl.store(keys + place + pair, key_even, mask=is_token[:, None])
    tl.store(keys + place + W // 2 + pair, key_odd, mask=is_token[:, None])
    tl.store(values + place + 2 * pair, value_even, mask=is_token[:, None])
    tl.store(values + place + 2 * pair + 1, value_odd, mask=is_token[:, None])


def read_pages(
    cache: Tensor, pages: Tensor, starts: Tensor, lengths: Tensor, num_tokens: int, max_length: int,
    firsts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Copy sequences out of a cache as :func:`packed` reads them: (keys, values), FP16 [num_tokens, G, W].

    W is D, or 128 for D = 96, with zeros behind the even and behind the odd features of a key.

    ``cache`` and ``pages`` as for :func:`decode`; sequence s has ``lengths[s]`` tokens, int32, from row ``starts[s]``
    on. The even features of a key stand before the odd ones. Values of no sequence are zeros. ``firsts`` int32 [S]: the
    first tokens that a window sees; earlier ones are not read, and their values are zeros.
    """
    _, page_tokens, num_groups, width = cache.shape
    shape = num_tokens, num_groups, triton.next_power_of_2(width // 2)
    keys = torch.empty(shape, dtype=torch.float16, device=cache.device)
    values, paired = torch.zeros_like(keys), cache.view(torch.int16)
    with torch.cuda.device_of(cache):
        _read_pages[(triton.cdiv(max_length, 64), num_groups, len(pages))](
            paired, pages, starts, lengths, firsts, keys, values, paired.stride(0), paired.stride(1), paired.stride(2),
            pages.stride(0), PAGE=page_tokens, D=width // 2, BLOCK=64, HARDWARE=HARDWARE, num_warps=4,
        )  # fmt: skip
    return keys, values


@triton.jit
def _fp16(pairs, factor):
    """Pairs of BF16 numbers as int32 -> (lower, upper), each as FP16, times ``factor``."""
    lower, upper = (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)
    return (lower * factor).to(tl.float16), (upper * factor).to(tl.float16)


@triton.jit
def _read_rows(key, value, key_scale, value_scale, keys, values, num_rows, D: tl.constexpr, BLOCK: tl.constexpr):
    """``key``, ``value`` and ``values`` as int32: pairs of features."""
    W: tl.constexpr = triton.next_power_of_2(D)
    row, pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, W // 2)[None, :]
    is_row, place = (row < num_rows)[:, None], (row * (D // 2))[:, None] + pair
    even, odd = _fp16(_pairs_of(key + place, pair, is_row, D), 1.0 / tl.load(key_scale))
    to = keys + (row * W)[:, None] + pair
    tl.store(to, even, mask=is_row)
    tl.store(to + W // 2, odd, mask=is_row)
    even, odd = _fp16(_pairs_of(value + place, pair, is_row, D), 1.0 / tl.load(value_scale))
    lower, upper = even.to(tl.uint16, bitcast=True).to(tl.int32), odd.to(tl.uint16, bitcast=True).to(tl.int32)
    tl.store(values + (row * (W // 2))[:, None] + pair, lower | (upper << 16), mask=is_row)


def read_rows(key: Tensor, value: Tensor, key_scale: Tensor, value_scale: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`read_pages`, from contiguous BF16 [K, G, D] that a cache holds exactly: E4M3 times a power of two."""
    num_rows, head_dim = key.shape[0] * key.shape[1], key.shape[2]
    shape = *key.shape[:2], triton.next_power_of_2(head_dim)
    keys, values = (torch.empty(shape, dtype=torch.float16, device=x.device) for x in (key, value))
    with torch.cuda.device_of(key):
        pairs, value_pairs, out_pairs = (x.view(torch.int32) for x in (key, value, values))
        _read_rows[(triton.cdiv(num_rows, 64),)](
            pairs, value_pairs, key_scale, value_scale, keys, out_pairs, num_rows, D=head_dim, BLOCK=64, num_warps=4
        )  # fmt: skip
    return keys, values
