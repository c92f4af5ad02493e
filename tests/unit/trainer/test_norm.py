"""The norm rounds where the published models and the engine round: bit for bit those of transformers."""

import types

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from megatron_fp8rl.trainer.model.linear import RMSNorm
from tests.helpers import fake_te


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norm_is_that_of_the_published_models(dtype):
    generator = torch.Generator().manual_seed(0)
    weight = (1 + torch.randn(320, generator=generator) / 4).to(dtype)
    x = torch.randn(50, 320, generator=generator).to(dtype)
    ours = RMSNorm(types.SimpleNamespace(params_dtype=dtype, sequence_parallel=False), 320, eps=1e-6)
    theirs = Qwen3RMSNorm(320, eps=1e-6).to(dtype)
    with torch.no_grad():
        ours.weight.copy_(weight)
        theirs.weight.copy_(weight)
    if dtype == torch.bfloat16:
        assert torch.equal(ours(x), theirs(x))
    else:  # float32 sums in another order
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-6, atol=1e-6)


def test_a_norm_of_all_heads_of_a_rank_is_computed_as_other_norms():
    """By the function of the layer's kernels, over the features of all heads; by PyTorch without one."""
    from megatron_fp8rl.trainer.model.linear import AllHeadsNorm

    config = types.SimpleNamespace(params_dtype=torch.float32, sequence_parallel=False, layernorm_epsilon=1e-6)
    group, x, calls = types.SimpleNamespace(size=lambda: 1), torch.randn(5, 1, 3, 8), []

    def compute(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        calls.append((rows.shape, eps))
        return torch.nn.functional.rms_norm(rows, weight.shape, weight, eps)

    expected = torch.nn.functional.rms_norm(x.flatten(-2), (24,), eps=1e-6).view_as(x)
    for norm in (AllHeadsNorm(config, 24, group, compute), AllHeadsNorm(config, 24, group)):
        torch.testing.assert_close(norm(x), expected, rtol=1e-6, atol=1e-6)
    assert calls == [((5, 1, 24), 1e-6)]


@pytest.mark.parametrize("zero_centred", [False, True])
def test_gradients_of_a_norm_and_its_stream_are_added(zero_centred, monkeypatch):
    fake_te.install(monkeypatch)
    from megatron_fp8rl.trainer.model.norm import te_rms_norm

    x, up, stream = (torch.randn(50, 4, 320) for _ in range(3))
    x, weight = x.requires_grad_(), (1 + torch.randn(320) / 4).requires_grad_()
    y, same = te_rms_norm(x, weight, 1e-6, with_input=True, zero_centred=zero_centred)
    expected = torch.nn.functional.rms_norm(x, weight.shape, weight + zero_centred, 1e-6)
    assert torch.equal(same, x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    for actual, wanted in [((y, same), (expected, x)), ((y,), (expected,)), ((same,), (x,))]:
        grads = (up, stream) if len(actual) == 2 else (stream,)
        ours, theirs = (
            torch.autograd.grad(ends, [x, weight], grads, retain_graph=True, allow_unused=True)
            for ends in (actual, wanted)
        )
        for a, b in zip(ours, theirs, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)
