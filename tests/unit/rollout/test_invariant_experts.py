"""vLLM's experts on DeepGEMM in a batch-invariant engine: accepted where they never change kernels."""

import pytest


@pytest.mark.parametrize("rounds", [True, False])
def test_they_are_accepted_where_scales_are_powers_of_two(rounds, monkeypatch):
    from vllm.model_executor.layers.fused_moe.experts import triton_deep_gemm_moe as module
    from vllm.utils import deep_gemm

    from megatron_fp8rl.rollout.vllm_plugin import invariant_experts

    experts = module.TritonOrDeepGemmExperts
    monkeypatch.setattr(experts, "_supports_batch_invariance", staticmethod(lambda: False))
    monkeypatch.setattr(deep_gemm, "is_deep_gemm_e8m0_used", lambda: rounds)
    invariant_experts.register()
    assert experts._supports_batch_invariance() is rounds
