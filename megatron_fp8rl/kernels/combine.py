"""Combines a token's experts as an engine on DeepGEMM does: router weights enter the sum, which is rounded once.

In: expert outputs without router weights, in the dispatcher's order. Out: the sum of each token. Runs on every trainer
rank whose engines have ``rollout.moe_backend = deep_gemm``. All other engines round each weighted output to BF16 before
they add; in that case the experts apply the router weights, and ``dispatcher.py`` adds.

Router weights can be applied only after the all-to-all has brought a token's rows together, so the experts pass their
outputs on unweighted. Gradients are those of weighted outputs: the sum hands its gradient to each row of a token, and
the experts, which know the weights of their rows, apply them there and compute the weights' gradients.

Shapes: T = tokens of this rank, E = experts, K = experts per token, H = hidden size; rows: T * K, first the tokens of
the first expert in order, then those of the second.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _WeightedLater(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(outputs, weights)
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        outputs, weights = ctx.saved_tensors
        wide = grad.to(weights.dtype)
        return (wide * weights[:, None]).to(outputs.dtype), (wide * outputs).sum(dim=1)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, rows_TK: Tensor, weights_TK: Tensor) -> Tensor:
        ctx.save_for_backward(rows_TK)
        return _sum(outputs, rows_TK, weights_TK)

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, None, None]:
        (rows_TK,) = ctx.saved_tensors
        tokens = torch.empty_like(rows_TK.flatten())
        tokens[rows_TK.flatten()] = torch.arange(len(tokens), device=tokens.device) // rows_TK.shape[1]
        return grad_TH.index_select(0, tokens), None, None


def weighted_in_combine(outputs: Tensor, weights: Tensor) -> Tensor:
    """outputs [rows, H] unchanged, with the gradients of outputs * weights [rows]: combine applies the weights."""
    return _WeightedLater.apply(outputs, weights)


def combine_experts(outputs: Tensor, weights_TE: Tensor, goes_TE: Tensor, top_k: int) -> Tensor:
    """outputs [rows, H] -> [T, H]: sums of a token's outputs times its weights, in float32, rounded once.

    A token's experts come in the engine's order, the largest weight first, and of equal ones the lower expert. The
    gradient of an output is that of its token's sum: see :func:`weighted_in_combine`.
    """
    weights_TK, experts_TK = slots(weights_TE.detach(), goes_TE, top_k)
    return _Sum.apply(outputs, rows_of(experts_TK), weights_TK)


def slots(weights_TE: Tensor, goes_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """(weights float32 [T, K], experts int64 [T, K]) of each token, the largest weight first."""
    ordered = weights_TE.float().masked_fill(~goes_TE, -1.0).sort(dim=1, descending=True, stable=True)
    return ordered.values[:, :top_k].contiguous(), ordered.indices[:, :top_k].contiguous()


def rows_of(experts_TK: Tensor) -> Tensor:
    """int64 [T, K]: where the dispatcher puts a token's copy for each of these experts."""
    order = experts_TK.flatten().argsort(stable=True)  # a token has an expert once, so ties are in the tokens' order
    rows = torch.empty_like(order)
    rows[order] = torch.arange(len(order), device=order.device)
    return rows.view_as(experts_TK)


def _sum(outputs: Tensor, rows_TK: Tensor, weights_TK: Tensor) -> Tensor:
    if outputs.is_cuda:
        from megatron_fp8rl.kernels.triton import batch_invariant

        return batch_invariant.weighted_sum(outputs.contiguous(), rows_TK, weights_TK)
    total = outputs.new_zeros(len(rows_TK), outputs.shape[1], dtype=torch.float32)
    for rows, weights in zip(rows_TK.unbind(1), weights_TK.unbind(1)):
        total += outputs[rows].float() * weights[:, None]
    return total.to(outputs.dtype)
