"""Transformer Engine's permutation of tokens on a GPU: the function of Megatron-Core's own, with sums rounded once."""

from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.precision.hardware import installed_packages
from tests.helpers.training import alone, continue_training, run_config
from tests.tolerances import LAYOUT_FLOAT32

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif("transformer_engine" not in installed_packages(), reason="needs Transformer Engine"),
]


def test_updates_are_those_without_it(monkeypatch):
    from megatron_fp8rl.trainer.model import build
    from megatron_fp8rl.trainer.model.dispatcher import has_fused_permutation
    from megatron_fp8rl.trainer.policy import Policy

    cfg = run_config()  # parameters in FP32
    cfg = replace(cfg, precision=replace(cfg.precision, kernels={"trainer": "emulated"}))
    actual = []
    with alone(cfg) as parallel:
        assert has_fused_permutation(parallel.device)
        for fused in (True, False):
            monkeypatch.setattr(build, "has_fused_permutation", lambda device: fused)
            policy = Policy.build(cfg, parallel)
            assert policy.models[0].config.moe_permute_fusion is fused
            metrics, logprobs = continue_training(policy, 2)
            actual.append((metrics, logprobs, {name: p.detach().clone() for name, p in policy.named_parameters()}))
    (metrics, logprobs, weights), (other_metrics, other_logprobs, other_weights) = actual
    for ours, theirs in zip(metrics, other_metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    for name, values in logprobs.items():
        torch.testing.assert_close(values, other_logprobs[name], **LAYOUT_FLOAT32)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, other_weights[name], rtol=1e-4, atol=1e-5, msg=lambda m: f"{name}: {m}")


def test_sums_are_rounded_once_and_the_same_in_every_run():
    from megatron.core.transformer.moe.moe_utils import permute, unpermute

    num_tokens, num_experts, top_k, hidden = 512, 128, 8, 2048
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(num_tokens, hidden, device="cuda", generator=generator).bfloat16().requires_grad_()
    chosen = torch.rand(num_tokens, num_experts, device="cuda", generator=generator).topk(top_k, dim=1).indices
    goes = torch.zeros(num_tokens, num_experts, dtype=torch.bool, device="cuda").scatter(1, chosen, True)
    weights = (torch.rand(num_tokens, num_experts, device="cuda", generator=generator) * goes).requires_grad_()
    runs = []
    for _ in range(2):
        rows, probs, where, *_ = permute(x, goes, probs=weights, num_out_tokens=num_tokens * top_k, fused=True)
        outputs = (rows * probs[:, None]).bfloat16().detach()
        summed = unpermute(outputs, where, restore_shape=x.shape, routing_map=goes, fused=True)
        grad = torch.autograd.grad((rows.double() * outputs.double()).sum() + probs.sum(), (x, weights))
        runs.append((rows, outputs, summed, *grad))
    assert all(torch.equal(*pair) for pair in zip(*runs))
    rows, outputs, summed, dx, dweights = runs[0]
    _expert, token = goes.t().nonzero(as_tuple=True)  # experts one after another, tokens in order
    assert torch.equal(rows, x[token]) and torch.equal(dweights, goes.float())
    exact = torch.zeros(x.shape, dtype=torch.float64, device="cuda").index_add_(0, token, outputs.double())
    for actual in (summed, dx):
        # Half a step of BF16, and FP32 sums of eight numbers of magnitude up to 4.
        torch.testing.assert_close(actual.double(), exact, rtol=2**-8, atol=2**-20)
