"""The changes to vLLM that a batch-invariant engine needs, with vLLM's own kernels replaced."""

import pytest
import torch

from megatron_fp8rl.rollout.vllm_plugin import patches


def test_a_residual_sum_is_rounded_and_then_normalized(monkeypatch):
    from vllm.model_executor.layers import layernorm

    calls = []

    def kernel(x, weight, eps):
        calls.append(eps)
        return torch.nn.functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)

    monkeypatch.setattr(layernorm, "rms_norm_batch_invariant", kernel)
    patches.make_residual_norms_batch_invariant()
    generator = torch.Generator().manual_seed(0)
    x, stream, weight = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((7, 96), (7, 96), (96,)))
    before = x.clone(), stream.clone()
    found, summed = layernorm.rms_norm_batch_invariant(x, weight, 1e-5, residual=stream)
    assert torch.equal(summed, (x.float() + stream.float()).bfloat16())
    assert torch.equal(found, kernel(summed, weight, 1e-5)) and calls == [1e-5, 1e-5]
    assert torch.equal(x, before[0]) and torch.equal(stream, before[1])
    assert torch.equal(layernorm.rms_norm_batch_invariant(x, weight, 1e-5), kernel(x, weight, 1e-5))


@pytest.mark.parametrize("rounds", [True, False])
def test_experts_on_deep_gemm_are_accepted_where_scales_are_powers_of_two(rounds, monkeypatch):
    from vllm.model_executor.layers.fused_moe.experts import triton_deep_gemm_moe as module
    from vllm.utils import deep_gemm

    experts = module.TritonOrDeepGemmExperts
    monkeypatch.setattr(experts, "_supports_batch_invariance", staticmethod(lambda: False))
    monkeypatch.setattr(deep_gemm, "is_deep_gemm_e8m0_used", lambda: rounds)
    patches.accept_deep_gemm_experts()
    assert experts._supports_batch_invariance() is rounds
