"""The engine's norm behind a residual sum, with vLLM's batch-invariant kernel replaced by torch."""

import torch

from megatron_fp8rl.rollout.vllm_plugin import invariant_norm


def test_the_sum_is_rounded_and_then_normalized(monkeypatch):
    from vllm.model_executor.layers import layernorm

    calls = []

    def kernel(x, weight, eps):
        calls.append(eps)
        return torch.nn.functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)

    monkeypatch.setattr(layernorm, "rms_norm_batch_invariant", kernel)
    invariant_norm.register()
    generator = torch.Generator().manual_seed(0)
    x, stream, weight = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((7, 96), (7, 96), (96,)))
    before = x.clone(), stream.clone()
    found, summed = layernorm.rms_norm_batch_invariant(x, weight, 1e-5, residual=stream)
    assert torch.equal(summed, (x.float() + stream.float()).bfloat16())
    assert torch.equal(found, kernel(summed, weight, 1e-5)) and calls == [1e-5, 1e-5]
    assert torch.equal(x, before[0]) and torch.equal(stream, before[1])
    assert torch.equal(layernorm.rms_norm_batch_invariant(x, weight, 1e-5), kernel(x, weight, 1e-5))
