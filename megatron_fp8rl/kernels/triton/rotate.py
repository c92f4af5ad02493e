"""Rotary embedding on a GPU: reads queries and keys once and writes them once, forward and backward.

The bits are torch's: products and sums are rounded to float32 one by one, and the result is rounded once. Backward
rotates by -angle and swaps the half-split and interleaved layouts. :func:`split_heads` also splits a fused projection.
If whole heads are rotated, it computes the RMSNorm of query and key heads too: in one launch instead of about fifteen.

Shapes: T = packed tokens, H = heads, D = features of a head, R = rotated features, r = R / 2. A projection has G groups
of Q query heads, a key head and a value head: W = G (Q + 2) D.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp8rl.kernels.triton.bits import HARDWARE, rounded_to_bf16
from megatron_fp8rl.kernels.triton.norm import inverse_rms, magnitude_bits, power_below, squares

_HEADS = 16  # of a program that rotates, at most
_TOKENS = 16  # of a program that splits


@triton.jit
def _rotate_heads(
    x, cos, sin, out, num_heads, token_stride, head_stride,
    WIDTH: tl.constexpr, FIRST: tl.constexpr, HALF: tl.constexpr, HALF_UP: tl.constexpr, WIDTH_UP: tl.constexpr,
    IN_STEP: tl.constexpr, IN_RIGHT: tl.constexpr, OUT_STEP: tl.constexpr, OUT_RIGHT: tl.constexpr,
    BACKWARD: tl.constexpr, HEADS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Program (t, h) rotates some heads of token t. Pair i of a head is features FIRST + i STEP and RIGHT after it."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF_UP)
    is_head = (head < num_heads)[:, None]
    inside = is_head & (pair < HALF)[None, :]
    source = x + token * token_stride + head[:, None] * head_stride
    target = out + (token * num_heads + head[:, None]) * WIDTH
    read, write = FIRST + pair[None, :] * IN_STEP, FIRST + pair[None, :] * OUT_STEP
    left = tl.load(source + read, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(source + read + IN_RIGHT, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + token * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    s = tl.load(sin + token * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    if BACKWARD:
        s = -s
    tl.store(target + write, rounded_to_bf16(left * c - right * s, HARDWARE), mask=inside)
    tl.store(target + write + OUT_RIGHT, rounded_to_bf16(right * c + left * s, HARDWARE), mask=inside)
    if WIDTH > 2 * HALF:
        feature = tl.arange(0, WIDTH_UP)[None, :]
        is_other = is_head & (feature < WIDTH) & ((feature < FIRST) | (feature >= FIRST + 2 * HALF))
        tl.store(target + feature, tl.load(source + feature, mask=is_other), mask=is_other)


def rotate(x_THD: Tensor, cos_T1r: Tensor, sin_T1r: Tensor, first_feature: int, interleaved: bool) -> Tensor:
    """:meth:`rotary.Rotary.rotate` of BF16 heads, differentiable in them; cosines and sines float32."""
    return _Rotate.apply(x_THD, cos_T1r, sin_T1r, first_feature, interleaved)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_THD: Tensor, cos_T1r: Tensor, sin_T1r: Tensor, first_feature: int, interleaved: bool
    ) -> Tensor:
        ctx.save_for_backward(cos_T1r, sin_T1r)
        ctx.layout = first_feature, interleaved
        return _launch(x_THD, cos_T1r, sin_T1r, first_feature, interleaved, backward=False)

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple:
        return _launch(grad_THD, *ctx.saved_tensors, *ctx.layout, backward=True), None, None, None, None


def _launch(
    x_THD: Tensor, cos_T1r: Tensor, sin_T1r: Tensor, first_feature: int, interleaved: bool, *, backward: bool
) -> Tensor:
    num_tokens, num_heads, width = x_THD.shape
    half = cos_T1r.shape[-1]
    x_THD = x_THD if x_THD.stride(2) == 1 else x_THD.contiguous()
    out = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    if not x_THD.numel():
        return out
    halves, pairs = (1, half), (2, 1)  # (offset between pairs, offset between the two features of a pair)
    came, leaves = (halves, pairs) if backward else (pairs, halves)
    came, leaves = (came, leaves) if interleaved else (halves, halves)
    heads = min(_HEADS, triton.next_power_of_2(num_heads))
    with torch.cuda.device_of(x_THD):
        # No fusion: an FMA rounds once, and torch's multiplication and addition round twice.
        _rotate_heads[(num_tokens, triton.cdiv(num_heads, heads))](
            x_THD, cos_T1r.contiguous(), sin_T1r.contiguous(), out, num_heads, x_THD.stride(0), x_THD.stride(1),
            WIDTH=width, FIRST=first_feature, HALF=half,
            HALF_UP=triton.next_power_of_2(half), WIDTH_UP=triton.next_power_of_2(width),
            IN_STEP=came[0], IN_RIGHT=came[1], OUT_STEP=leaves[0], OUT_RIGHT=leaves[1],
            BACKWARD=backward, HEADS=heads, HARDWARE=HARDWARE, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


@triton.jit
def _inverse_rms(left, right, eps, HALF: tl.constexpr):
    """float32 [tokens, 1]: one over the root mean square of each row of the two halves, as in ``norm.py``."""
    largest_bits = tl.max(tl.maximum(magnitude_bits(left), magnitude_bits(right)), axis=1)
    power_bits = power_below(largest_bits)[:, None]
    total = tl.sum(squares(left, power_bits) + squares(right, power_bits), axis=1)
    return inverse_rms(total, largest_bits, 2 * HALF, eps)[:, None]


@triton.jit
def _write_head(
    source, target, weight, c, s, inside, eps, HALF: tl.constexpr, NORM: tl.constexpr, HARDWARE: tl.constexpr
):
    """One head of some tokens: normed, rounded, rotated and rounded again."""
    left = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        pair = tl.arange(0, HALF)[None, :]
        inverse = _inverse_rms(left, right, eps, HALF)
        left = rounded_to_bf16(left * inverse * tl.load(weight + pair).to(tl.float32), HARDWARE).to(tl.float32)
        right = rounded_to_bf16(right * inverse * tl.load(weight + HALF + pair).to(tl.float32), HARDWARE).to(tl.float32)
    tl.store(target, rounded_to_bf16(left * c - right * s, HARDWARE), mask=inside)
    tl.store(target + HALF, rounded_to_bf16(right * c + left * s, HARDWARE), mask=inside)


@triton.jit
def _write_gradient(
    source, grad, target, weight, c, s, inside, eps, HALF: tl.constexpr, NORM: tl.constexpr, HARDWARE: tl.constexpr
):
    """The gradient of one head of some tokens; returns each token's part of the weight gradient's halves, float32."""
    left = tl.load(grad, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(grad + HALF, mask=inside, other=0.0).to(tl.float32)
    turned = rounded_to_bf16(left * c + right * s, HARDWARE).to(tl.float32)
    right = rounded_to_bf16(right * c - left * s, HARDWARE).to(tl.float32)
    left = turned
    of_left, of_right = tl.zeros_like(left), tl.zeros_like(right)
    if NORM:
        pair = tl.arange(0, HALF)[None, :]
        x_left = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        x_right = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
        inverse = _inverse_rms(x_left, x_right, eps, HALF)
        x_left, x_right = x_left * inverse, x_right * inverse
        of_left, of_right = left * x_left, right * x_right
        left, right = left * tl.load(weight + pair).to(tl.float32), right * tl.load(weight + HALF + pair).to(tl.float32)
        along = (tl.sum(left * x_left + right * x_right, axis=1) / (2 * HALF))[:, None]
        left, right = (left - x_left * along) * inverse, (right - x_right * along) * inverse
    tl.store(target, rounded_to_bf16(left, HARDWARE), mask=inside)
    tl.store(target + HALF, rounded_to_bf16(right, HARDWARE), mask=inside)
    return of_left, of_right


@triton.jit(do_not_specialize=["num_tokens"])
def _split_heads(
    mixed, query, key, value, query_weight, key_weight, cos, sin, dmixed, dweights, num_tokens, num_groups, eps,
    QUERIES: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr, NORM: tl.constexpr, BACKWARD: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """Program (b, g) processes the heads of group g of some tokens. Backward reads gradients from ``query``, ``key``
    and ``value``; each program writes a row [2, D] of ``dweights``."""
    WIDTH: tl.constexpr = 2 * HALF
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    group = tl.program_id(1)
    pair = tl.arange(0, HALF)[None, :]
    inside = (token < num_tokens)[:, None] & (pair < HALF)
    angle = token[:, None] * HALF + pair
    c, s = tl.load(cos + angle, mask=inside, other=0.0), tl.load(sin + angle, mask=inside, other=0.0)
    row = (token * num_groups + group)[:, None]
    first = row * ((QUERIES + 2) * WIDTH) + pair
    of_query = row * (QUERIES * WIDTH) + pair
    of_key = row * WIDTH + pair
    last = first + (QUERIES + 1) * WIDTH
    if BACKWARD:
        of_left, of_right = tl.zeros([TOKENS, HALF], tl.float32), tl.zeros([TOKENS, HALF], tl.float32)
        for i in range(QUERIES):
            added_left, added_right = _write_gradient(
                mixed + first + i * WIDTH, query + of_query + i * WIDTH, dmixed + first + i * WIDTH, query_weight, c, s,
                inside, eps, HALF, NORM, HARDWARE,
            )  # fmt: skip
            of_left += added_left
            of_right += added_right
        key_left, key_right = _write_gradient(
            mixed + last - WIDTH,
            key + of_key,
            dmixed + last - WIDTH,
            key_weight,
            c,
            s,
            inside,
            eps,
            HALF,
            NORM,
            HARDWARE,
        )
        tl.store(dmixed + last, tl.load(value + of_key, mask=inside), mask=inside)
        tl.store(dmixed + last + HALF, tl.load(value + of_key + HALF, mask=inside), mask=inside)
        if NORM:
            half = tl.arange(0, HALF)
            sums = dweights + (tl.program_id(0) * num_groups + group) * 2 * WIDTH + half
            tl.store(sums, tl.sum(of_left, axis=0))
            tl.store(sums + HALF, tl.sum(of_right, axis=0))
            tl.store(sums + WIDTH, tl.sum(key_left, axis=0))
            tl.store(sums + WIDTH + HALF, tl.sum(key_right, axis=0))
    else:
        for i in range(QUERIES):
            _write_head(
                mixed + first + i * WIDTH,
                query + of_query + i * WIDTH,
                query_weight,
                c,
                s,
                inside,
                eps,
                HALF,
                NORM,
                HARDWARE,
            )
        _write_head(mixed + last - WIDTH, key + of_key, key_weight, c, s, inside, eps, HALF, NORM, HARDWARE)
        tl.store(value + of_key, tl.load(mixed + last, mask=inside), mask=inside)
        tl.store(value + of_key + HALF, tl.load(mixed + last + HALF, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _norm_and_rotate(
    heads, query_weight, key_weight, positions, table, num_tokens, row_stride, eps, QUERIES: tl.constexpr,
    HALF: tl.constexpr, TOKENS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Program (b, h) overwrites head h of some tokens."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    pair = tl.arange(0, HALF)[None, :]
    inside = (token < num_tokens)[:, None] & (pair < HALF)
    angle = tl.load(positions + token, mask=token < num_tokens, other=0)[:, None] * (2 * HALF) + pair
    c = tl.load(table + angle, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(table + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    place = heads + token[:, None] * row_stride + tl.program_id(1) * (2 * HALF) + pair
    weight = query_weight if tl.program_id(1) < QUERIES else key_weight
    _write_head(place, place, weight, c, s, inside, eps, HALF, True, HARDWARE)


def norm_and_rotate_(
    projection_TW: Tensor, num_queries: int, num_keys: int, norms: tuple[Tensor, Tensor], eps: float,
    positions_T: Tensor, table_PD: Tensor,
) -> None:  # fmt: skip
    """Overwrite the query and key heads of an engine's projection with the bits that :func:`split_heads` computes.

    BF16 [T, W] has all query heads, then all key heads, then values. ``norms``: BF16 weights [D]. ``table_PD`` has
    cosines and sines [D / 2] of each position, BF16 or float32; ``positions_T`` are its rows, int64. D is a power of 2.
    """
    num_tokens, width = len(projection_TW), table_PD.shape[1]
    if not num_tokens:
        return
    with torch.cuda.device_of(projection_TW):
        _norm_and_rotate[(triton.cdiv(num_tokens, _TOKENS), num_queries + num_keys)](
            projection_TW, *norms, positions_T, table_PD.contiguous(), num_tokens, projection_TW.stride(0), eps,
            QUERIES=num_queries, HALF=width // 2, TOKENS=_TOKENS, HARDWARE=HARDWARE, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip


def split_heads(
    mixed_TW: Tensor, num_groups: int, norms: tuple[Tensor, Tensor] | None, eps: float, cos_T1r: Tensor, sin_T1r: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries [T, G Q, D], rotated keys [T, G, D] and values [T, G, D], BF16 and contiguous, of BF16 [T, W].

    ``norms``: BF16 weights [D] of the RMSNorm of query and key heads; their gradients are summed in float32. Rotated
    pairs are halves of a head; ``cos_T1r`` and ``sin_T1r`` are float32, and r is half of D, a power of two.
    """
    return _SplitHeads.apply(mixed_TW.contiguous(), *(norms or (None, None)), num_groups, eps, cos_T1r, sin_T1r)


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mixed_TW: Tensor, query_weight: Tensor | None, key_weight: Tensor | None, num_groups: int, eps: float,
        cos_T1r: Tensor, sin_T1r: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        num_tokens, width = mixed_TW.shape[0], 2 * cos_T1r.shape[-1]
        queries = mixed_TW.shape[1] // (num_groups * width) - 2
        heads = num_groups * queries, num_groups, num_groups
        query, key, value = (mixed_TW.new_empty(num_tokens, number, width) for number in heads)
        # Without norms, backward does not read the rotated heads.
        ctx.save_for_backward(None if query_weight is None else mixed_TW, query_weight, key_weight, cos_T1r, sin_T1r)
        ctx.shape = num_groups, queries, eps
        _launch_split(
            mixed_TW, (query, key, value), (query_weight, key_weight), cos_T1r, sin_T1r, None, None, ctx.shape
        )
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *grads_THD: Tensor) -> tuple:
        mixed_TW, *weights, cos_T1r, sin_T1r = ctx.saved_tensors
        num_groups, queries, _ = ctx.shape
        num_tokens, width = len(cos_T1r), 2 * cos_T1r.shape[-1]
        grads = tuple(grad.contiguous() for grad in grads_THD)
        dmixed_TW = grads[0].new_empty(num_tokens, num_groups * (queries + 2) * width)
        sums = None
        if weights[0] is not None:
            rows = triton.cdiv(num_tokens, _TOKENS) * num_groups
            sums = dmixed_TW.new_empty(rows, 2, width, dtype=torch.float32)
        mixed_TW = dmixed_TW if mixed_TW is None else mixed_TW
        _launch_split(mixed_TW, grads, weights, cos_T1r, sin_T1r, dmixed_TW, sums, ctx.shape)
        of_weights = (None, None) if sums is None else sums.sum(0).to(weights[0].dtype).unbind()
        return dmixed_TW, *of_weights, None, None, None, None


def _launch_split(
    mixed_TW: Tensor, heads: tuple[Tensor, ...], weights: Sequence[Tensor | None], cos_T1r: Tensor, sin_T1r: Tensor,
    dmixed_TW: Tensor | None, sums: Tensor | None, shape: tuple[int, int, float],
) -> None:  # fmt: skip
    num_groups, queries, eps = shape
    num_tokens = len(cos_T1r)
    if not num_tokens:
        return
    with torch.cuda.device_of(cos_T1r):
        _split_heads[(triton.cdiv(num_tokens, _TOKENS), num_groups)](
            mixed_TW, *heads, *weights, cos_T1r.contiguous(), sin_T1r.contiguous(), dmixed_TW, sums, num_tokens,
            num_groups, eps, QUERIES=queries, HALF=cos_T1r.shape[-1], TOKENS=_TOKENS, NORM=weights[0] is not None,
            BACKWARD=dmixed_TW is not None, HARDWARE=HARDWARE, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
