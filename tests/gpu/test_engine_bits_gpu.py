"""Norm, router, choice and sum of experts of the trainer against vLLM's own kernels, bit for bit; run with -s."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from megatron_fp8rl.config import PrecisionConfig
from megatron_fp8rl.kernels.deep_gemm import has_deep_gemm
from megatron_fp8rl.precision.hardware import installed_packages
from tests.helpers.experts import build_experts
from tests.tolerances import ROUTER_WEIGHTS_FLOAT32, SIGMOID_WEIGHTS_FLOAT32, TENSOR_CORE_SUMS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]


def _randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


@pytest.mark.parametrize("shape", [(60, 2048), (700, 4096), (4000, 128), (9, 1300)], ids=str)
def test_norms_have_the_bits_of_their_definition_in_every_kernel(shape):
    """The definition in integers is that of the tests in the interpreter; no fusion and no batch changes a bit."""
    from megatron_fp8rl.kernels.triton import norm
    from tests.unit.kernels.test_norm_kernel import EPS, normed

    x, stream = (3 * _randn(*shape, seed=seed).bfloat16() for seed in (0, 1))
    weight, total = (1 + _randn(shape[1], seed=2) / 4).bfloat16(), x + stream
    actual, _ = norm.rms_norm(total, weight, EPS)
    assert torch.equal(actual.cpu(), normed(total.cpu(), weight.cpu()))
    assert torch.equal(actual[:5], norm.rms_norm(total[:5].contiguous(), weight, EPS)[0])
    assert torch.equal(norm.add_and_norm(x, weight, EPS, stream), actual) and torch.equal(stream, total)


def test_heads_that_are_split_normed_and_rotated_at_once_have_the_same_bits():
    from megatron_fp8rl.kernels.triton import norm, rotate

    tokens, groups, queries, width = 700, 4, 4, 128
    mixed = _randn(tokens, groups * (queries + 2) * width, seed=0).bfloat16()
    weights = tuple((1 + _randn(width, seed=seed) / 4).bfloat16() for seed in (1, 2))
    angles = 9 * _randn(tokens, 1, width // 2, seed=3)
    cos, sin = (table.bfloat16().float() for table in (angles.cos(), angles.sin()))
    actual = rotate.split_heads(mixed, groups, weights, 1e-6, cos, sin)
    heads = mixed.unflatten(1, (groups, -1, width)).split([queries, 1, 1], dim=2)
    for part, head, weight in zip(actual, heads, weights):
        rows = norm.rms_norm(head.reshape(tokens, -1, width), weight, 1e-6)[0]
        assert torch.equal(part, rotate.rotate(rows, cos, sin, 0, False))


def test_norms_on_transformer_engine_round_as_the_engines():
    """Sums in another order move a number to the next one once in some thousands; two roundings move many."""
    import vllm._custom_ops as ops

    from megatron_fp8rl.trainer.model.norm import te_rms_norm

    x, weight = (3 * _randn(500, 2048, seed=0)).bfloat16(), (1 + _randn(2048, seed=1) / 4).bfloat16()
    engines = torch.empty_like(x)
    ops.rms_norm(engines, x, weight, 1e-6)
    equal = (te_rms_norm(x, weight, 1e-6) == engines).float().mean().item()
    twice = torch.nn.functional.rms_norm(x.float(), (2048,), eps=1e-6).bfloat16() * weight
    print(f"\nTE's norm: {equal:.4%} are the engine's numbers; rounded twice {(twice == engines).float().mean():.2%}")
    assert equal > 0.999


@pytest.mark.parametrize("outputs, width", [(1920, 640), (640, 1152), (6144, 2048), (2048, 6144)])
def test_bf16_linears_and_swiglu_are_those_of_the_engine_in_every_batch(outputs, width):
    from vllm.model_executor.layers.batch_invariant import linear_batch_invariant

    from megatron_fp8rl.kernels.triton.swiglu import swiglu
    from megatron_fp8rl.trainer.model.linear import in_fixed_order

    x, weight = _randn(5000, width, seed=0).bfloat16(), (_randn(outputs, width, seed=1) / width**0.5).bfloat16()
    ours = in_fixed_order(None, x, (weight,), None)
    for rows in (1, 7, 200, 5000):
        assert torch.equal(linear_batch_invariant(x[:rows].contiguous(), weight), ours[:rows]), rows
    gate, up = ours.chunk(2, dim=-1)
    assert torch.equal(swiglu(ours), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("experts, width", [(128, 2048), (8, 4096)])
def test_router_and_choice_are_those_of_the_engine(experts, width):
    import vllm._custom_ops as ops

    from megatron_fp8rl.config import RouterConfig
    from megatron_fp8rl.kernels.triton import batch_invariant
    from megatron_fp8rl.rollout.vllm_plugin import vllm_imports
    from megatron_fp8rl.trainer.model.router import choose_experts, engine_router_weights

    num_tokens, top_k = 5000, experts // 4 if experts < 32 else 8
    x, weight = _randn(num_tokens, width, seed=0).bfloat16(), (_randn(experts, width, seed=1) / width**0.5).bfloat16()
    logits = batch_invariant.linear(x, weight)
    assert torch.equal(logits, vllm_imports.batch_invariant().matmul_persistent(x, weight.t()))
    theirs = torch.empty(num_tokens, top_k, device="cuda")
    ids = torch.empty(num_tokens, top_k, dtype=torch.int32, device="cuda")
    ops.topk_softmax(theirs, ids, torch.empty_like(ids), logits, True)
    ours, chosen = choose_experts(logits.float(), top_k, RouterConfig(), None)
    assert torch.equal(chosen, ids.long())
    torch.testing.assert_close(ours, theirs, **ROUTER_WEIGHTS_FLOAT32)
    assert torch.equal(engine_router_weights(logits.float(), ours, chosen, RouterConfig()), theirs)


@pytest.mark.parametrize("experts, groups, dtype", [(128, 1, torch.float32), (256, 8, torch.bfloat16)])
def test_a_sigmoid_router_is_one_function_of_a_token(experts, groups, dtype):
    """Logits, experts and weights have equal bits at both ends and in each batch, and are nearly vLLM's own. GLM-4.5
    has FP32 logits, DeepSeek-V3 BF16."""
    from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import fused_grouped_topk

    from megatron_fp8rl.config import RouterConfig
    from megatron_fp8rl.kernels.combine import slots
    from megatron_fp8rl.kernels.routing import choose_experts
    from megatron_fp8rl.kernels.triton import batch_invariant
    from megatron_fp8rl.rollout.vllm_plugin.patches_routers import choose

    num, width, top_k, best, factor = 3000, 4096, 8, max(1, groups // 2), 2.5
    x, weight = _randn(num, width, seed=0).bfloat16(), (_randn(experts, width, seed=1) / width**0.5).bfloat16()
    bias = _randn(experts, seed=2) / 8
    logits = batch_invariant.linear(x, weight, dtype)
    sums = batch_invariant.linear(x, weight, torch.float32)
    torch.testing.assert_close(sums.double(), x.double() @ weight.double().t(), **TENSOR_CORE_SUMS)
    assert torch.equal(logits, sums.to(dtype))
    engines = SimpleNamespace(
        scoring_func="sigmoid",
        num_expert_group=groups,
        topk_group=best,
        routed_scaling_factor=factor,
        renormalize=True,
        top_k=top_k,
        e_score_correction_bias=bias,
    )
    weights, ids = choose(engines, x, logits)
    for few in (1, 7, 300):
        rows = batch_invariant.linear(x[:few].contiguous(), weight, dtype)
        assert torch.equal(rows, logits[:few])
        assert all(torch.equal(a, b[:few]) for a, b in zip(choose(engines, x[:few], rows), (weights, ids)))
    router = RouterConfig(
        score="sigmoid", correction_bias=True, num_groups=groups, groups_per_token=best, scaling_factor=factor
    )
    logits = logits.float()  # as in the trainer
    weights_TK, experts_TK = choose_experts(logits, top_k, router, bias)
    dense = torch.zeros_like(logits).scatter(1, experts_TK, weights_TK)
    ours = slots(dense, torch.zeros_like(dense, dtype=torch.bool).scatter(1, experts_TK, True), top_k)
    assert torch.equal(ours[0], weights) and torch.equal(ours[1], ids.long())

    arguments = dict(num_expert_group=groups, topk_group=best, scoring_func="sigmoid", routed_scaling_factor=factor)
    values, own = fused_grouped_topk(x, logits, top_k, True, bias, **arguments)
    theirs = torch.zeros_like(logits).scatter(1, own.long(), values)
    same = ((theirs > 0) == (dense > 0)).all(dim=1)
    assert same.float().mean() > 0.999
    torch.testing.assert_close(theirs[same], dense[same], **SIGMOID_WEIGHTS_FLOAT32)


def engines_layer(x, logits, w1_ENK, w2_ENK, top_k, expert_map=None):
    """vLLM's experts on DeepGEMM, as DeepGemmExperts.apply computes them: (sums [T, H], weights, ids).

    ``expert_map``: int32, the place of each expert of the router among these, -1 for those of another rank."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.fused_moe.deep_gemm_utils import deepgemm_moe_permute, deepgemm_unpermute_and_reduce
    from vllm.model_executor.layers.quantization.utils import fp8_utils
    from vllm.utils.deep_gemm import m_grouped_fp8_gemm_nt_contiguous

    from megatron_fp8rl.kernels.blockwise import quantize_weight

    num_experts = len(w1_ENK)
    fp8 = []
    for w in (w1_ENK, w2_ENK):
        data, scale = quantize_weight(w.reshape(-1, w.shape[2]), "pow2")
        fp8.append((data.view(w.shape), scale.view(num_experts, -1, scale.shape[1])))
    weights = torch.empty(len(x), top_k, device="cuda")
    ids = torch.empty(len(x), top_k, dtype=torch.int32, device="cuda")
    ops.topk_softmax(weights, ids, torch.empty_like(ids), logits, True)
    rows, scales = fp8_utils.per_token_group_quant_fp8(x, 128, use_ue8m0=True)
    rows, scales, owners, places, _ = deepgemm_moe_permute(rows, scales, ids, num_experts, expert_map, None)
    h = torch.empty(len(rows), w1_ENK.shape[1], dtype=torch.bfloat16, device="cuda")
    m_grouped_fp8_gemm_nt_contiguous((rows, scales), fp8[0], h, owners)
    y = torch.empty(len(rows), w2_ENK.shape[1], dtype=torch.bfloat16, device="cuda")
    between = fp8_utils.silu_mul_per_token_group_quant_fp8_colmajor(h, use_ue8m0=True)
    m_grouped_fp8_gemm_nt_contiguous(between, fp8[1], y, owners)
    out = torch.empty_like(x)
    deepgemm_unpermute_and_reduce(y, ids, weights, places, expert_map, out)
    return out, weights, ids


def trainers_layer(x, logits, module, top_k, *, applies_router_weights, num_parts=1):
    """Router, dispatcher and experts of one trainer rank: (sums [T, H], weights [T, E]). With
    ``applies_router_weights`` each expert weights its outputs; otherwise the sum does, as in the engine."""
    from megatron.core.transformer.moe.moe_utils import permute, unpermute

    from megatron_fp8rl.config import RouterConfig
    from megatron_fp8rl.kernels.combine import combine_experts
    from megatron_fp8rl.trainer.model.router import choose_experts, engine_router_weights

    weights_TK, experts_TK = choose_experts(logits.float(), top_k, RouterConfig(), None)
    weights_TK = engine_router_weights(logits.float(), weights_TK, experts_TK, RouterConfig())
    weights = torch.zeros_like(logits, dtype=torch.float32).scatter(1, experts_TK, weights_TK)
    if x.requires_grad:
        weights = weights.detach().requires_grad_()
    goes = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts_TK, True)
    rows, probs, where, *_ = permute(x, goes, probs=weights, num_out_tokens=len(x) * top_k, fused=True)
    module.applies_router_weights = applies_router_weights
    outputs, _ = module(rows, goes.sum(dim=0).cpu(), probs)
    if applies_router_weights:
        return unpermute(outputs, where, restore_shape=x.shape, routing_map=goes, fused=True), weights
    return combine_experts(outputs, weights, goes, top_k, num_parts), weights


@pytest.mark.skipif(not has_deep_gemm(), reason="needs DeepGEMM")
@pytest.mark.skipif("transformer_engine" not in installed_packages(), reason="needs Transformer Engine")
@pytest.mark.parametrize(("kernels", "hidden"), [("deep_gemm", 1024), ("te", 1024), ("deep_gemm", 640)])
def test_a_layer_of_experts_has_the_bits_of_an_engine_on_deep_gemm(kernels, hidden, monkeypatch):
    from vllm.model_executor.layers.fused_moe import deep_gemm_utils

    from megatron_fp8rl.kernels.triton import batch_invariant
    from megatron_fp8rl.rollout.vllm_plugin import patches

    monkeypatch.setattr(deep_gemm_utils, "ep_gather", deep_gemm_utils.ep_gather)
    patches.gather_any_hidden_size()
    num_tokens, num_experts, top_k, features = 300, 128, 8, 256
    module = build_experts(num_experts, hidden, features, PrecisionConfig(kernels={"experts": kernels}), kernels="te")
    w1, w2 = (torch.stack([w.detach() for w in each.weights]) for each in (module.linear_fc1, module.linear_fc2))
    x = _randn(num_tokens, hidden, seed=0).bfloat16()
    logits = batch_invariant.linear(x, (_randn(num_experts, hidden, seed=1) / hidden**0.5).bfloat16())
    theirs, *_ = engines_layer(x, logits, w1, w2, top_k)
    with torch.no_grad():
        ours, _ = trainers_layer(x, logits, module, top_k, applies_router_weights=False)
    share = (ours == theirs).double().mean().item()
    print(f"\n{kernels}: {share:.5%} are the engine's numbers")
    assert torch.equal(ours, theirs)
    with torch.no_grad():
        of_two, _ = trainers_layer(x, logits, module, top_k, applies_router_weights=False, num_parts=2)
    here = torch.arange(num_experts // 2, dtype=torch.int32, device="cuda")
    places = (torch.cat([here, here.new_full(here.shape, -1)]), torch.cat([here.new_full(here.shape, -1), here]))
    parts = zip(w1.chunk(2), w2.chunk(2), places)
    first, second = (engines_layer(x, logits, a, b, top_k, where)[0] for a, b, where in parts)
    assert torch.equal(of_two, first + second)
    for few in (1, 5):
        assert torch.equal(engines_layer(x[:few], logits[:few], w1, w2, top_k)[0], theirs[:few]), few
    x.requires_grad_()
    grad, actual = _randn(num_tokens, hidden, seed=3).bfloat16(), []
    for applies_router_weights in (True, False):
        out, weights = trainers_layer(x, logits, module, top_k, applies_router_weights=applies_router_weights)
        actual.append(torch.autograd.grad(out, (x, weights), grad))
    for name, weighted, later in zip(("dx", "dweights"), *actual):
        torch.testing.assert_close(later, weighted, rtol=2**-7, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
