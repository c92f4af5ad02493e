"""Norm, router and choice of experts of the trainer against vLLM's own kernels, bit for bit; run with -s."""

import importlib.util

import pytest
import torch

from tests.tolerances import ROUTER_WEIGHTS_FLOAT32

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]


def _randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


@pytest.mark.parametrize("shape", [(60, 2048), (700, 4096), (4000, 128), (9, 1300)], ids=str)
def test_the_norm_has_the_bits_of_a_batch_invariant_engine(shape):
    from vllm.model_executor.layers.batch_invariant import rms_norm_batch_invariant

    from megatron_fp8rl.trainer import engine_triton

    x, weight = (3 * _randn(*shape, seed=0)).bfloat16(), (1 + _randn(shape[1], seed=1) / 4).bfloat16()
    found, _ = engine_triton.rms_norm(x, weight, 1e-6)
    assert torch.equal(found, rms_norm_batch_invariant(x, weight, 1e-6))
    assert torch.equal(found[:5], engine_triton.rms_norm(x[:5].contiguous(), weight, 1e-6)[0])


def test_the_engines_norm_behind_a_residual_sum_does_not_depend_on_the_batch(monkeypatch):
    from vllm.model_executor.layers import layernorm

    from megatron_fp8rl.rollout import invariant_norm
    from megatron_fp8rl.trainer import engine_triton

    monkeypatch.setattr(layernorm, "rms_norm_batch_invariant", layernorm.rms_norm_batch_invariant)
    invariant_norm.register()
    x, stream = _randn(4000, 2048, seed=0).bfloat16(), (3 * _randn(4000, 2048, seed=1)).bfloat16()
    weight = (1 + _randn(2048, seed=2) / 4).bfloat16()
    few, many = (layernorm.rms_norm_batch_invariant(x[:n], weight, 1e-6, residual=stream[:n]) for n in (100, 4000))
    assert torch.equal(few[0], many[0][:100]) and torch.equal(few[1], many[1][:100])
    assert torch.equal(many[1], x + stream)
    assert torch.equal(many[0], engine_triton.rms_norm(x + stream, weight, 1e-6)[0])


def test_norms_on_transformer_engine_round_as_the_engines():
    """Sums in another order move a number to the next one once in some thousands; two roundings move many."""
    import vllm._custom_ops as ops

    from megatron_fp8rl.trainer.te_norm import te_rms_norm

    x, weight = (3 * _randn(500, 2048, seed=0)).bfloat16(), (1 + _randn(2048, seed=1) / 4).bfloat16()
    engines = torch.empty_like(x)
    ops.rms_norm(engines, x, weight, 1e-6)
    equal = (te_rms_norm(x, weight, 1e-6) == engines).float().mean().item()
    twice = torch.nn.functional.rms_norm(x.float(), (2048,), eps=1e-6).bfloat16() * weight
    print(f"\nTE's norm: {equal:.4%} are the engine's numbers; rounded twice {(twice == engines).float().mean():.2%}")
    assert equal > 0.999


@pytest.mark.parametrize("experts, width", [(128, 2048), (8, 4096)])
def test_router_and_choice_are_those_of_the_engine(experts, width):
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.batch_invariant import matmul_persistent

    from megatron_fp8rl.config import RouterConfig
    from megatron_fp8rl.trainer import engine_triton
    from megatron_fp8rl.trainer.routing import choose_experts

    num_tokens, top_k = 5000, experts // 4 if experts < 32 else 8
    x, weight = _randn(num_tokens, width, seed=0).bfloat16(), (_randn(experts, width, seed=1) / width**0.5).bfloat16()
    logits = engine_triton.linear(x, weight)
    assert torch.equal(logits, matmul_persistent(x, weight.t()))
    theirs = torch.empty(num_tokens, top_k, device="cuda")
    ids = torch.empty(num_tokens, top_k, dtype=torch.int32, device="cuda")
    ops.topk_softmax(theirs, ids, torch.empty_like(ids), logits, True)
    ours, chosen = choose_experts(logits.float(), top_k, RouterConfig(), None)
    assert torch.equal(chosen, ids.long())
    torch.testing.assert_close(ours, theirs, **ROUTER_WEIGHTS_FLOAT32)
