"""Rotary embedding on a GPU: reads queries and keys once and writes them once, forward and backward.

The bits are torch's: products and sums are rounded to float32 one by one, and the result is rounded once. Backward
rotates by -angle and swaps the half-split and interleaved layouts.

Shapes: T = packed tokens, H = heads, D = features of a head, R = rotated features, r = R / 2.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp8rl.kernels.triton.bits import HARDWARE, rounded_to_bf16

_HEADS = 16  # of a program, at most


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
