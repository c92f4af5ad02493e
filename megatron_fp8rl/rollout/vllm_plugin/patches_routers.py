"""Sigmoid routers of batch-invariant engines on a GPU: the trainer's functions give logits, experts and weights.

In: hidden states in BF16. Out: router weights and experts with the trainer's bits, in the order in which it adds a
token's experts. vLLM chooses a kernel of the gate by the number of tokens, and its fused kernels add and order in
their own ways. Runs in workers of engines whose model has such a router (GLM-4.5, MiniMax-M2, DeepSeek-V3).
"""

from typing import Any

import torch
from torch import Tensor

from megatron_fp8rl.config import RouterConfig
from megatron_fp8rl.kernels.combine import slots
from megatron_fp8rl.kernels.routing import choose_experts
from megatron_fp8rl.upstream import patches


@patches(
    "vllm",
    why="replaces _compute_routing of GroupedTopKRouter and FusedTopKBiasRouter, whose kernels round weights "
    "differently from the trainer; Glm4MoE.forward and GateLinear.forward, whose products depend on the batch; and "
    "moves the router's factor from MoERunner's sum of experts, which it rounds again, to the weights",
    remove_when="vLLM has a hook for the function of a router",
    optional=True,
)
def route_as_the_trainer() -> None:
    """Use ``kernels/routing.py``. Raises ImportError or AttributeError if this vLLM has other classes."""
    from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.models.glm4_moe import Glm4MoE

    from megatron_fp8rl.kernels.triton import batch_invariant

    build = MoERunner.__init__

    def build_without_factor(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        self.router.routed_scaling_factor *= self.routed_scaling_factor
        self.routed_scaling_factor = 1.0

    def multiply(weight: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
        # Published weights are BF16 numbers, so nothing is rounded.
        return batch_invariant.linear(rows.contiguous(), weight.bfloat16(), dtype)

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        rows = hidden_states.view(-1, hidden_states.shape[-1])
        logits = multiply(self.gate.weight, rows, torch.float32)
        return self.experts(hidden_states=rows, router_logits=logits).view(hidden_states.shape)

    def multiply_by_gate(self: Any, x: Tensor) -> tuple[Tensor, None]:
        return multiply(self.weight, x, self.out_dtype or x.dtype), None

    for router in (GroupedTopKRouter, FusedTopKBiasRouter):
        router._compute_routing = choose
    Glm4MoE.forward = forward
    GateLinear.forward = multiply_by_gate
    MoERunner.__init__ = build_without_factor


def choose(router: Any, hidden_states: Tensor, router_logits: Tensor, *args: Any, **kwargs: Any) -> tuple:
    """(weights float32 [T, K], experts int32 [T, K]) in descending order of weight, of a router of vLLM."""
    how = RouterConfig(
        score=router.scoring_func,
        num_groups=getattr(router, "num_expert_group", 1),
        groups_per_token=getattr(router, "topk_group", 1),
        scaling_factor=router.routed_scaling_factor,
        normalize=router.renormalize,
    )
    weights, experts = choose_experts(router_logits, router.top_k, how, router.e_score_correction_bias)
    weights_TE = torch.zeros_like(router_logits, dtype=torch.float32).scatter(1, experts, weights)
    goes_TE = torch.zeros_like(router_logits, dtype=torch.bool).scatter(1, experts, True)
    weights, experts = slots(weights_TE, goes_TE, router.top_k)
    return weights, experts.int()
