"""Attention of one new token per sequence over a paged KV cache in E4M3, with queries in BF16.

Keys and values are rounded only in the cache. Products are FP16, which represents every E4M3 number, and queries and
probabilities more precisely than BF16; sums are float32. FlashAttention 3 in E4M3 also rounds queries and
probabilities. The kernel saves arithmetic per cached byte:

- keys are the rows of matrix products, and the few queries of a group the 8 columns, so that no product is only
  padding;
- bytes are read in pairs of features, because 16-bit matrices can be transposed on the way from shared memory. A pair
  becomes an even and an odd FP16 number in registers; even and odd features are multiplied separately.

A sequence is split into parts of ``SPLIT`` tokens, whose results are merged; shorter sequences are written directly.
The split depends on the number of sequences, not on their lengths.

Shapes: S = sequences, Q = query heads, G = groups (key and value heads), D = features of a head.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp8rl.kernels.triton.bits import HARDWARE, rounded_to_bf16

HEAD_DIMS = (64, 128)
MAX_GROUP = 16  # query heads of a group
_TILE = 128  # tokens that a program reads at a time
# (programs without cuts, tokens of a part): enough programs for the 132 processors of a Hopper GPU.
_SPLITS = ((512, 2048), (128, 1024), (0, 512))


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
def _attend(
    query, cache, pages, lengths, key_scale, value_scale, out, parts, norms, softmax_scale, query_stride, page_stride,
    token_stride, head_stride, table_stride, PAGE: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr,
    COLUMNS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Program (s, g, i): part i of sequence s for the queries of group g. ``cache`` and its strides are in pairs of
    bytes. ``parts`` float32 [S, parts, Q, D], ``norms``: the logarithm to base 2 of their sums of exponentials."""
    sequence, group, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length, first = tl.load(lengths + sequence), part * SPLIT
    if first > 0 and first >= length:
        return
    end = tl.minimum(length, first + SPLIT)
    pair, column = tl.arange(0, D // 2), tl.arange(0, COLUMNS)
    head, is_head = group * GROUP + column, (column < GROUP)[None, :]
    place = query + sequence * query_stride + head[None, :] * D + 2 * pair[:, None]
    to_log2 = softmax_scale * 1.4426950408889634
    even = (tl.load(place, mask=is_head, other=0.0).to(tl.float32) * to_log2).to(tl.float16)
    odd = (tl.load(place + 1, mask=is_head, other=0.0).to(tl.float32) * to_log2).to(tl.float16)
    of_scores = tl.load(key_scale)
    largest = tl.full([COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    sum_even, sum_odd = tl.zeros([D // 2, COLUMNS], tl.float32), tl.zeros([D // 2, COLUMNS], tl.float32)
    cache += group * head_stride
    for start in range(first, end, TILE):
        token = start + tl.arange(0, TILE)
        is_token = (token < end)[:, None]
        token = tl.minimum(token, end - 1)  # memory of this sequence
        page = tl.load(pages + sequence * table_stride + token // PAGE).to(tl.int64)
        row = cache + page * page_stride + (token % PAGE) * token_stride
        key_even, key_odd = _halves(tl.load(row[:, None] + pair[None, :]), HARDWARE)
        scores = tl.dot(key_odd, odd, tl.dot(key_even, even)) * of_scores
        scores = tl.where(is_token, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 0))
        weights, shrink = tl.math.exp2(scores - new_largest[None, :]), tl.math.exp2(largest - new_largest)
        total, largest = total * shrink + tl.sum(weights, 0), new_largest
        value_even, value_odd = _halves(tl.load(row[None, :] + D // 2 + pair[:, None]), HARDWARE)
        sum_even = tl.dot(value_even, weights.to(tl.float16), sum_even * shrink[None, :])
        sum_odd = tl.dot(value_odd, weights.to(tl.float16), sum_odd * shrink[None, :])
    scale = tl.where(total > 0, tl.load(value_scale) / total, 0.0)[None, :]
    num_heads = tl.num_programs(1) * GROUP
    if length <= SPLIT:
        whole = out + (sequence * num_heads + head)[None, :] * D + 2 * pair[:, None]
        tl.store(whole, rounded_to_bf16(sum_even * scale, HARDWARE), mask=is_head)
        tl.store(whole + 1, rounded_to_bf16(sum_odd * scale, HARDWARE), mask=is_head)
    else:
        result = (sequence * tl.num_programs(2) + part) * num_heads + head
        own = parts + result[None, :] * D + 2 * pair[:, None]
        tl.store(own, sum_even * scale, mask=is_head)
        tl.store(own + 1, sum_odd * scale, mask=is_head)
        tl.store(norms + result, largest + tl.math.log2(total), mask=column < GROUP)


@triton.jit
def _merge(
    lengths, out, parts, norms, num_parts,
    D: tl.constexpr, MOST: tl.constexpr, SPLIT: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Program (s, q): the parts of query head q of sequence s, weighted by their sums of exponentials."""
    sequence, head, num_heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    length = tl.load(lengths + sequence)
    if length <= SPLIT:
        return
    part, feature = tl.arange(0, MOST), tl.arange(0, D)
    is_part = part * SPLIT < length
    row = (sequence * num_parts + part) * num_heads + head
    norm = tl.load(norms + row, mask=is_part, other=float("-inf"))
    weight = tl.math.exp2(norm - tl.max(norm, 0))
    numbers = tl.load(parts + row[:, None] * D + feature[None, :], mask=is_part[:, None], other=0.0)
    merged = tl.sum(numbers * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + (sequence * num_heads + head) * D + feature, rounded_to_bf16(merged, HARDWARE))


def decode(
    query: Tensor, cache: Tensor, pages: Tensor, lengths: Tensor, key_scale: Tensor, value_scale: Tensor,
    softmax_scale: float, out: Tensor,
) -> None:  # fmt: skip
    """Fill ``out``, BF16 [S, Q, D], contiguous; zeros for a sequence without tokens.

    ``query`` BF16 [S, Q, D] with adjacent heads; ``cache`` bytes [pages, tokens of a page, G, 2 D] of any strides, key
    before value; ``pages`` int32 [S or more, pages of a sequence]; ``lengths`` int32 [S or more], including the new
    token, whose key and value are in the cache; scales float32 with one element. Raises ValueError unless D is one of
    :data:`HEAD_DIMS` and a group has at most :data:`MAX_GROUP` query heads.
    """
    num_sequences, num_heads, head_dim = query.shape
    group = num_heads // cache.shape[2]
    if (
        head_dim not in HEAD_DIMS
        or not 0 < group <= MAX_GROUP
        or not out.is_contiguous()
        or query.stride(1) != head_dim
    ):
        raise ValueError(f"queries {list(query.shape)} over a cache {list(cache.shape)}: not supported by this kernel")
    if num_sequences == 0:
        return
    paired = cache.view(torch.int16)
    programs = num_sequences * cache.shape[2]
    split = next(tokens for least, tokens in _SPLITS if programs >= least)
    num_parts = max(1, math.ceil(pages.shape[1] * cache.shape[1] / split))
    parts, norms = out, out  # not used by one part
    if num_parts > 1:
        parts = torch.empty(num_sequences, num_parts, num_heads, head_dim, dtype=torch.float32, device=out.device)
        norms = torch.empty(num_sequences, num_parts, num_heads, dtype=torch.float32, device=out.device)
    with torch.cuda.device_of(query):
        _attend[(num_sequences, cache.shape[2], num_parts)](
            query, paired, pages, lengths, key_scale, value_scale, out, parts, norms, softmax_scale, query.stride(0),
            paired.stride(0), paired.stride(1), paired.stride(2), pages.stride(0), PAGE=cache.shape[1], D=head_dim,
            GROUP=group, COLUMNS=max(8, triton.next_power_of_2(group)), TILE=_TILE, SPLIT=split, HARDWARE=HARDWARE,
            num_warps=4, num_stages=3,
        )  # fmt: skip
        if num_parts > 1:
            _merge[(num_sequences, num_heads)](
                lengths, out, parts, norms, num_parts, D=head_dim, MOST=triton.next_power_of_2(num_parts), SPLIT=split,
                HARDWARE=HARDWARE, num_warps=4,
            )  # fmt: skip
