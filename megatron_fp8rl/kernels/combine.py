"""Combine expert outputs as DeepGEMM engines and CPU engines do: a router-weighted sum, rounded once.

Used if engines run on a CPU or have ``precision.kernels.engine_experts = deep_gemm``. Other engines round each weighted
output to BF16 before adding; for those, the experts apply the router weights and ``dispatcher.py`` sums.

Router weights can only be applied after the all-to-all has gathered a token's rows. Gradients are still those of
weighted outputs. Backward copies the sum's gradient to each row, and the experts apply router weights there and compute
their gradients. If several ranks divide an engine's experts, each rounds its partial sum, and so does this module. Both
ends add the partial sums in the order of the ranks (``ordered_sum.py``).

Shapes: T = tokens of this rank, E = experts, K = experts per token, H = hidden size; rows: T * K, the tokens of the
first expert in order, followed by those of the second, and so on.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_fp8rl.kernels import float64
from megatron_fp8rl.kernels.ordered_sum import add_in_order


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
    def forward(ctx: Any, outputs: Tensor, rows_TK: Tensor, *weights_TK: Tensor) -> Tensor:
        ctx.save_for_backward(rows_TK)
        parts = [_sum(outputs, rows_TK, weights) for weights in weights_TK]
        return parts[0] if len(parts) == 1 else add_in_order(torch.stack(parts))

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:
        (rows_TK,) = ctx.saved_tensors
        tokens = torch.empty_like(rows_TK.flatten())
        tokens[rows_TK.flatten()] = torch.arange(len(tokens), device=tokens.device) // rows_TK.shape[1]
        return grad_TH.index_select(0, tokens), *[None] * (len(ctx.needs_input_grad) - 1)


def weighted_in_combine(outputs: Tensor, weights: Tensor) -> Tensor:
    """Identity on outputs [rows, H] with the gradient of outputs * weights [rows]: combine applies the weights."""
    return _WeightedLater.apply(outputs, weights)


def combine_experts(
    outputs: Tensor, weights_TE: Tensor, routing_map_TE: Tensor, top_k: int, num_parts: int = 1
) -> Tensor:
    """outputs [rows, H] -> [T, H]: weighted sum of each token's outputs, in float32, rounded once per part.

    A token's experts are summed in the engine's order: descending weight, ties broken by the lower expert index.
    ``num_parts``: ranks that divide an engine's experts in order; each part's sum is rounded before they are added.
    """
    weights_TK, experts_TK = slots(weights_TE.detach(), routing_map_TE, top_k)
    weights = [weights_TK]
    if num_parts > 1:
        parts_TK = experts_TK * num_parts // weights_TE.shape[1]
        weights = [weights_TK.masked_fill(parts_TK != part, 0.0) for part in range(num_parts)]
    return _Sum.apply(outputs, rows_of(experts_TK), *weights)


def slots(weights_TE: Tensor, routing_map_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """(weights float32 [T, K], experts int64 [T, K]) of each token, in descending order of weight."""
    ordered = weights_TE.float().masked_fill(~routing_map_TE, -1.0).sort(dim=1, descending=True, stable=True)
    return ordered.values[:, :top_k].contiguous(), ordered.indices[:, :top_k].contiguous()


def rows_of(experts_TK: Tensor) -> Tensor:
    """int64 [T, K]: the row where the dispatcher places a token's copy for each of these experts."""
    order = experts_TK.flatten().argsort(stable=True)  # an expert occurs once per token, so ties are in token order
    rows = torch.empty_like(order)
    rows[order] = torch.arange(len(order), device=order.device)
    return rows.view_as(experts_TK)


def _sum(outputs: Tensor, rows_TK: Tensor, weights_TK: Tensor) -> Tensor:
    if outputs.is_cuda:
        from megatron_fp8rl.kernels.triton import batch_invariant

        return batch_invariant.weighted_sum(outputs.contiguous(), rows_TK, weights_TK)
    return float64.combine(outputs[rows_TK], weights_TK)
