"""Expert choice and router weights, the same function at both ends, for all routers of :class:`RouterConfig`.

Runs on trainer ranks, in engines on a CPU, and in batch-invariant engines with sigmoid routers on a GPU. Shapes: T =
tokens, E = experts, K = experts of a token.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_fp8rl.config import RouterConfig
from megatron_fp8rl.kernels.backend import runs_triton

_SCORED_PER_GROUP = 2  # a group's score is the sum of its two best experts (DeepSeek-V3)


def choose_experts(
    logits_TE: Tensor,
    top_k: int,
    router: RouterConfig,
    bias_E: Tensor | None,
    replay: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(router weights FP32 [T, K], experts int64 [T, K]); only the weights are differentiable.

    ``bias_E`` is added to the scores only for choosing. ``replay`` maps the chosen experts, int64 [T, K], to the used
    ones, whose weights are computed in the same way.
    """
    logits_TE = logits_TE.float()
    scores_TE = logits_TE.sigmoid() if router.score == "sigmoid" else logits_TE.softmax(dim=-1)
    wanted_TE = scores_TE.detach() if bias_E is None else scores_TE.detach() + bias_E
    if router.num_groups > 1:
        wanted_TE = wanted_TE.masked_fill(~_in_best_groups(wanted_TE, router), float("-inf"))
    experts_TK = _best(wanted_TE, top_k)
    if replay is not None:
        experts_TK = replay(experts_TK)
    if router.score == "softmax" and router.normalize:
        weights_TK = logits_TE.gather(1, experts_TK).softmax(dim=-1)  # same result, without underflow
    else:
        weights_TK = scores_TE.gather(1, experts_TK)
        if router.normalize:
            weights_TK = weights_TK / (_sum(weights_TK) + 1e-20)
    return weights_TK * router.scaling_factor, experts_TK


def routed_scores(logits_TE: Tensor, top_k: int, router: RouterConfig) -> Tensor:
    """float32 [T, E]: the weights of :func:`choose_experts` where a token goes, -1 elsewhere; differentiable.

    For softmax without groups and bias. Gradients have the dtype of ``logits_TE``. On a GPU the last bits of the
    weights differ from those of :func:`choose_experts`, because sums have another order.
    """
    if runs_triton(logits_TE):
        from megatron_fp8rl.kernels.triton import route  # imports Triton

        return route.routed_scores(logits_TE, top_k, router.normalize, router.scaling_factor)
    weights_TK, experts_TK = choose_experts(logits_TE, top_k, router, None)
    return torch.full(logits_TE.shape, -1.0, device=logits_TE.device).scatter(1, experts_TK, weights_TK)


def _best(wanted_TE: Tensor, top_k: int) -> Tensor:
    """int64 [T, K]: the experts with the highest scores; ties are broken as in the engine."""
    if wanted_TE.is_cuda:  # copy, so that backward does not keep the indices of all experts
        return wanted_TE.sort(dim=-1, descending=True, stable=True).indices[:, :top_k].contiguous()
    return wanted_TE.topk(top_k, dim=-1).indices


def _sum(weights_TK: Tensor) -> Tensor:
    """[T, 1]; on a GPU from the first to the last expert, because a reduction's order may depend on T."""
    if weights_TK.is_cuda:
        return functools.reduce(torch.add, weights_TK.split(1, dim=-1))
    return weights_TK.sum(dim=-1, keepdim=True)


def _in_best_groups(wanted_TE: Tensor, router: RouterConfig) -> Tensor:
    """bool [T, E]: whether the expert is in one of the token's ``groups_per_token`` best groups."""
    groups = wanted_TE.unflatten(1, (router.num_groups, -1))
    group_scores = groups.topk(_SCORED_PER_GROUP, dim=-1).values.sum(dim=-1)
    best = _best(group_scores, router.groups_per_token)
    chosen = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, best, True)
    return chosen.repeat_interleave(groups.shape[-1], dim=1)
