"""Sigmoid routers of a GPU engine with the trainer's functions, against transformers."""

from types import SimpleNamespace

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from megatron_fp8rl import upstream
from megatron_fp8rl.kernels.combine import slots
from tests.tolerances import ROUTER_FLOAT32

pytestmark = pytest.mark.skipif(not upstream.applies("route_as_the_trainer"), reason="refused with this vLLM")
TOKENS, HIDDEN, EXPERTS, TOP_K, FACTOR = 200, 16, 12, 4, 2.5


@pytest.fixture
def patched(monkeypatch):
    """vLLM's classes with the patch, until the test ends. The constructor of a runner sets its arguments only."""
    from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.models.glm4_moe import Glm4MoE

    from megatron_fp8rl.rollout.vllm_plugin.patches_routers import route_as_the_trainer

    names = {kind: "_compute_routing" for kind in (GroupedTopKRouter, FusedTopKBiasRouter)}
    names |= {kind: "forward" for kind in (Glm4MoE, GateLinear)}
    for kind, name in names.items():
        monkeypatch.setattr(kind, name, getattr(kind, name))
    monkeypatch.setattr(MoERunner, "__init__", lambda self, **arguments: vars(self).update(arguments))
    route_as_the_trainer()
    return {kind.__name__: kind for kind in (*names, MoERunner)}


@pytest.mark.parametrize("num_groups, best", [(1, 1), (4, 2), (0, 0)])
@pytest.mark.parametrize("normalize", [True, False])
def test_routers_choose_as_published_in_the_order_of_the_trainers_sum(num_groups, best, normalize, patched):
    """No groups: vLLM's other router, of MiniMax-M2."""
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        n_group=num_groups or 1,
        topk_group=best or 1,
        norm_topk_prob=normalize,
        routed_scaling_factor=FACTOR,
    )
    module, generator = DeepseekV3TopkRouter(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.normal_(0.0, 0.3, generator=generator)
        logits, wanted, chosen = module(torch.randn(TOKENS, HIDDEN, generator=generator))
    groups = dict(num_expert_group=num_groups, topk_group=best) if num_groups else {}
    router = patched["GroupedTopKRouter" if num_groups else "FusedTopKBiasRouter"](
        top_k=TOP_K,
        global_num_experts=EXPERTS,
        renormalize=normalize,
        scoring_func="sigmoid",
        e_score_correction_bias=module.e_score_correction_bias,
        **groups,
    )
    runner = patched["MoERunner"](router=router, routed_scaling_factor=FACTOR)
    assert (router.routed_scaling_factor, runner.routed_scaling_factor) == (FACTOR, 1.0)
    weights, experts = router.select_experts(hidden_states=None, router_logits=logits, topk_indices_dtype=torch.int32)
    assert (weights.dtype, experts.dtype) == (torch.float32, torch.int32)
    dense = torch.zeros(TOKENS, EXPERTS).scatter(1, experts.long(), weights)
    torch.testing.assert_close(dense, torch.zeros(TOKENS, EXPERTS).scatter(1, chosen, wanted.float()), **ROUTER_FLOAT32)
    in_order = slots(dense, dense > 0, TOP_K)
    assert torch.equal(in_order[0], weights) and torch.equal(in_order[1], experts.long())


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_gates_multiply_bf16_numbers_and_round_as_published(dtype, patched, monkeypatch):
    """Whole numbers, whose sums are exact in float32 and not in BF16. DeepSeek-V3's logits are BF16 (``dtype`` None),
    those of GLM-4.5 and MiniMax-M2 float32."""
    from megatron_fp8rl.kernels.triton import batch_invariant

    def linear(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        assert x.dtype == weight.dtype == torch.bfloat16
        return (x.double() @ weight.double().t()).to(dtype)

    monkeypatch.setattr(batch_invariant, "linear", linear)
    generator, seen = torch.Generator().manual_seed(1), []
    x, weight = (torch.randint(-100, 101, (num, 64), generator=generator).float() for num in (5, EXPERTS))
    gate = SimpleNamespace(weight=weight, out_dtype=dtype)
    logits, bias = patched["GateLinear"].forward(gate, x.bfloat16())
    assert bias is None and logits.dtype == (dtype or torch.bfloat16)
    assert torch.equal(logits, (x @ weight.t()).to(logits.dtype))
    layer = SimpleNamespace(
        gate=gate, experts=lambda hidden_states, router_logits: seen.append(router_logits) or hidden_states
    )
    assert torch.equal(patched["Glm4MoE"].forward(layer, x.bfloat16()), x.bfloat16())
    assert seen[0].dtype == torch.float32 and torch.equal(seen[0], x @ weight.t())
