"""MoE routing: expert choice and router weights for all routers of :class:`RouterConfig`.

Megatron-Core's routing differs from the published models. It scores a group of experts by its best ``top-k / groups per
token`` experts; the models use two. It always divides sigmoid scores by their sum, except for one expert per token. It
updates the correction bias after every step; here the bias is a constant part of the policy.

Logits are rounded as in the engine, whose router is a linear in the dtype of the activations, except for GLM-4.5's in
FP32. Rounded logits often tie. vLLM's GPU kernel breaks ties by the lower expert index, its CPU path like torch.topk.
To match a batch-invariant engine, a GPU computes router weights with vLLM's kernel if vLLM is installed. Another order
of the softmax sum changes the last bits of FP32. Such an engine computes sigmoid routers with our functions.

Shapes: T = tokens of this rank, E = experts, K = experts of a token.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_utils import (
    compute_routing_scores_for_aux_loss,
    get_tokens_per_expert_and_token_count,
    switch_load_balancing_loss_func,
)
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_fp8rl.config import RouterConfig
from megatron_fp8rl.kernels import engine_ops, float64
from megatron_fp8rl.kernels.backend import runs_triton
from megatron_fp8rl.kernels.routing import choose_experts, routed_scores
from megatron_fp8rl.trainer.compat.megatron import ConstantBiasRouter
from megatron_fp8rl.trainer.model.packed_sequences import PackedSequences, Routes
from megatron_fp8rl.upstream import patches


def _is_plain(router: RouterConfig) -> bool:
    return router.score == "softmax" and router.num_groups == 1 and not router.correction_bias


def engine_router_weights(logits_TE: Tensor, weights_TK: Tensor, experts_TK: Tensor, router: RouterConfig) -> Tensor:
    """The engine's bits of ``weights_TK``, with the gradient of ours. Unchanged if vLLM has no kernel for this router,
    and for tokens where it chooses different experts, as it may if logits are NaN."""
    if not _is_plain(router) or engine_ops.vllm_topk_softmax() is None:
        return weights_TK
    values_TK, ids_TK = engine_ops.topk_softmax(logits_TE.detach().bfloat16(), weights_TK.shape[1], router.normalize)
    same_T1 = (ids_TK == experts_TK).all(dim=1, keepdim=True)
    value = torch.where(same_T1, values_TK * router.scaling_factor, weights_TK.detach())
    return Replaced.apply(weights_TK, value)


class Replaced(torch.autograd.Function):
    """Straight-through: returns the second argument and passes its gradient to the first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return grad, None


def rounded_linear(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden [..., H] times weight [E, H] in their dtype, as FP32 [..., E]. FP32 output gradients are multiplied as the
    sum of two BF16 numbers, which keeps 16 bits of mantissa."""
    return _RoundedLinear.apply(hidden, weight)


class _RoundedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return F.linear(hidden, weight).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        grad_TE, hidden_TH = grad.flatten(0, -2), hidden.flatten(0, -2)
        if hidden.dtype != torch.bfloat16 or not hidden.is_cuda:
            dx = (grad_TE @ weight.float()).to(hidden.dtype)
            return dx.view(hidden.shape), (grad_TE.t() @ hidden_TH.float()).to(weight.dtype)
        parts_T2E = bf16_parts(grad_TE)
        dx = parts_T2E @ weight.repeat(2, 1)
        of_parts = torch.mm(parts_T2E.t(), hidden_TH, out_dtype=torch.float32)
        return dx.view(hidden.shape), of_parts.unflatten(0, (2, -1)).sum(0).to(weight.dtype)


def bf16_parts(x_TE: Tensor) -> Tensor:
    """BF16 [T, 2 E]: rounded FP32 ``x_TE``, then rounding errors; the relative error of their sum is at most 2**-17."""
    num = x_TE.shape[1]
    parts = x_TE.new_empty(len(x_TE), 2 * num, dtype=torch.bfloat16)
    parts[:, :num] = x_TE
    torch.sub(x_TE, parts[:, :num], out=parts[:, num:])
    return parts


@patches(
    "megatron-core",
    why="overrides forward, gating and routing: Megatron-Core chooses experts differently than the published models, "
    "and needs two dozen launches",
    remove_when="moe_utils scores groups by two experts and normalizes like the model",
)
class Router(ConstantBiasRouter):
    """Megatron-Core's router with the expert choice of this module. ``rounds``: round logits to the activations' dtype.

    ``match_engine``: on a GPU, sum in the order of a batch-invariant engine. ``gathers``: the dispatcher needs scores.
    ``routes``: recorded experts for the current microbatch, instead of the router's choice."""

    routes: Routes | None = None

    def __init__(
        self,
        config: Any,
        *,
        router: RouterConfig,
        rounds: bool,
        match_engine: bool = False,
        gathers: bool = False,
        **kwargs: Any,
    ):
        super().__init__(config, **kwargs)
        self.router, self.rounds, self.match_engine = router, rounds, match_engine
        self.has_scores = gathers and not match_engine and _is_plain(router) and not self.is_aux_loss_enabled()
        if router.correction_bias:
            self.add_correction_bias()

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """hidden [S, B, H] -> router weights and routing map as in :meth:`routing`.

        If tokens are gathered and Triton runs: scores [T, E] and None, in two launches."""
        if not self.has_scores or self.routes is not None or not runs_triton(input):
            return super().forward(input, padding_mask)
        return routed_scores(self.gating(input).view(-1, self.num_experts), self.topk, self.router), None

    def gating(self, hidden: Tensor) -> Tensor:
        """hidden [S, B, H] -> logits, FP32 [S, B, E], rounded to the dtype of ``hidden`` if the engine does so."""
        if hidden.is_cuda and self.rounds and not self.match_engine:
            return self._biased(rounded_linear(hidden, self.weight), hidden.dtype)
        logits = super().gating(hidden)
        if not hidden.is_cuda:
            rows = hidden.detach().flatten(0, -2).to(hidden.dtype if self.rounds else torch.float32)
            value = self._biased(float64.matmul(rows, self.weight.detach().t()).view(logits.shape), rows.dtype).detach()
            return Replaced.apply(logits, value.to(logits.dtype))
        if not self.match_engine:
            return logits
        if hidden.dtype == torch.bfloat16:
            from megatron_fp8rl.kernels.triton import batch_invariant

            rows = hidden.detach().reshape(-1, hidden.shape[-1]).contiguous()
            dtype = rows.dtype if self.rounds else torch.float32
            value = batch_invariant.linear(rows, self.weight.detach(), dtype).view(logits.shape)
            value = self._biased(value, hidden.dtype).detach()
        else:
            value = logits.detach().to(hidden.dtype)
        return Replaced.apply(logits, value.to(logits.dtype))

    def _biased(self, logits: Tensor, dtype: torch.dtype) -> Tensor:
        """``logits`` of ``dtype`` with the bias, if the router has one, rounded again."""
        return logits if self.bias is None else (logits + self.bias).to(dtype).to(logits.dtype)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """logits [S, B, E] -> (router weights [T, E], 0 where not routed; routing map, bool [T, E]), T = S * B.
        ``padding_mask``, bool [S, B], is True at padding, which is routed but not counted as load."""
        logits = logits.view(-1, self.num_experts)
        replay = None if self.routes is None else partial(self.routes.experts, self.layer_number - 1)
        weights_TK, experts_TK = choose_experts(logits, self.topk, self.router, self.expert_bias, replay)
        if self.match_engine and self.rounds and logits.is_cuda:
            weights_TK = engine_router_weights(logits, weights_TK, experts_TK, self.router)
        weights = torch.zeros_like(logits).scatter(1, experts_TK, weights_TK.to(logits.dtype))
        goes = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts_TK, True)
        if self.training and torch.is_grad_enabled() and self.is_aux_loss_enabled():
            weights = self._with_balancing_loss(weights, logits, padding_mask)
        return weights, goes

    def _with_balancing_loss(self, weights: Tensor, logits: Tensor, padding_mask: Tensor | None) -> Tensor:
        """Collective over tensor and context parallel ranks: attach Megatron-Core's load-balancing loss to ``weights``.
        Its ``_apply_aux_loss`` weights each rank by its tokens instead of the microbatch's, which differ with padding.
        A microbatch with only padding has a loss of 0, not 0 / 0."""
        padding_T = None if padding_mask is None else padding_mask.reshape(-1)
        wanted, scores = compute_routing_scores_for_aux_loss(
            logits, self.topk, self.score_function, padding_mask=padding_T
        )
        per_expert, _, num_tokens = get_tokens_per_expert_and_token_count(
            wanted, self.tp_cp_group, self.topk, with_padding_mask=True
        )
        coefficient, num_tokens = self.get_aux_loss_coeff("aux_loss"), num_tokens.clamp(min=1)
        loss = switch_load_balancing_loss_func(
            scores, per_expert, num_tokens, self.topk, self.config.num_moe_experts, coefficient
        )
        return self.attach_and_log_load_balancing_loss(
            weights,
            coefficient,
            loss,
            "load_balancing_loss",
            self.tp_cp_group,
            valid_token_count=num_tokens / self.tp_cp_group.size(),
        )


@patches(
    "megatron-core",
    why="overrides forward: the experts of a layer do not get the packed-sequence parameters",
    remove_when="TransformerLayer passes packed_seq_params to MoELayer",
)
class RoutedLayer(TransformerLayer):
    """A Megatron-Core layer that passes its microbatch's routes to its experts, also when it is recomputed."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        packed = kwargs.get("packed_seq_params")
        self.mlp.routes = packed.routes if isinstance(packed, PackedSequences) else None
        return super().forward(*args, **kwargs)
