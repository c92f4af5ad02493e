"""Softmax routers in Triton: :func:`megatron_fp8rl.kernels.routing.routed_scores` and its gradient, one launch each.

A program has some tokens and all E experts. Experts are chosen by descending softmax numerator, ties by the lower
index, as in the engine's kernel; the weights are computed in float32.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp8rl.kernels.triton.slots import sizes, tokens_and_experts

_TOKENS = 16  # of a program


@triton.jit
def _numerators(logits, inside, exists):
    """exp(logit - the token's largest), and 0 beyond the last expert."""
    x = tl.where(exists, tl.load(logits, mask=inside, other=0.0).to(tl.float32), float("-inf"))
    return tl.exp(x - tl.max(x, axis=1)[:, None])


@triton.jit(do_not_specialize=["num_tokens"])
def _route(
    logits,
    scores,
    num_tokens,
    factor,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    MOST: tl.constexpr,
    NORMALIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token, expert, inside = tokens_and_experts(num_tokens, NUM_EXPERTS, EXPERTS, TOKENS)
    place, exists = token * NUM_EXPERTS + expert, expert < NUM_EXPERTS
    share = _numerators(logits + place, inside, exists)
    left = tl.where(exists, share, -1.0)
    for _ in tl.static_range(MOST):
        best = tl.argmax(left, axis=1, tie_break_left=True)[:, None]
        left = tl.where(expert == best, -1.0, left)
    chosen = exists & (left < 0)
    total = tl.sum(tl.where(chosen, share, 0.0) if NORMALIZE else share, axis=1)[:, None]
    tl.store(scores + place, tl.where(chosen, share / total * factor, -1.0), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _route_backward(
    grad,
    scores,
    logits,
    out,
    num_tokens,
    factor,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """d logit = p (g - sum(p g)) for the softmax p times ``factor`` over its normalization."""
    token, expert, inside = tokens_and_experts(num_tokens, NUM_EXPERTS, EXPERTS, TOKENS)
    place, exists = token * NUM_EXPERTS + expert, expert < NUM_EXPERTS
    score = tl.load(scores + place, mask=inside, other=-1.0)
    chosen = score >= 0
    g = tl.where(chosen, tl.load(grad + place, mask=inside, other=0.0), 0.0)
    if NORMALIZE:
        p = tl.where(chosen, score, 0.0)
    else:
        share = _numerators(logits + place, inside, exists)
        p = share / tl.sum(share, axis=1)[:, None] * factor
    number = p * (g - tl.sum(p * g, axis=1)[:, None] / factor)
    tl.store(out + place, number.to(out.dtype.element_ty), mask=inside)


def routed_scores(logits_TE: Tensor, top_k: int, normalize: bool, factor: float) -> Tensor:
    return _Routed.apply(logits_TE.contiguous(), top_k, normalize, factor)


class _Routed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, top_k: int, normalize: bool, factor: float) -> Tensor:
        scores_TE = torch.empty(logits_TE.shape, dtype=torch.float32, device=logits_TE.device)
        ctx.factor, ctx.how = factor, sizes(logits_TE, _TOKENS) | {"NORMALIZE": normalize}
        with torch.cuda.device_of(logits_TE):
            _route[(triton.cdiv(len(scores_TE), _TOKENS),)](
                logits_TE, scores_TE, len(scores_TE), factor, MOST=top_k, **ctx.how, num_warps=4
            )
        ctx.save_for_backward(logits_TE, scores_TE)
        return scores_TE

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, ...]:
        logits_TE, scores_TE = ctx.saved_tensors
        out = torch.empty_like(logits_TE)
        with torch.cuda.device_of(grad_TE):
            _route_backward[(triton.cdiv(len(out), _TOKENS),)](
                grad_TE.contiguous(), scores_TE, logits_TE, out, len(out), ctx.factor, **ctx.how, num_warps=4
            )
        return out, None, None, None
