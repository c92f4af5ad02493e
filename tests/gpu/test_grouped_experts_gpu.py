"""Experts on DeepGEMM's grouped kernels, on one Hopper GPU; -s shows the decibels.

The kernels are compiled on first use, for seconds each, and kept in DG_JIT_CACHE_DIR; all tests share one set of sizes.
"""

import copy
from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.config import OptimConfig, PrecisionConfig
from megatron_fp8rl.kernels.deep_gemm import deep_gemm, has_deep_gemm
from megatron_fp8rl.kernels.gemm import Fp8
from megatron_fp8rl.precision.hardware import installed_packages
from tests.helpers.experts import (
    build_experts,
    decibels,
    draw_tokens,
    exact_experts,
    give_gradient_buffers,
    run_experts,
)
from tests.helpers.hopper import ON_HOPPER
from tests.helpers.models import small_model
from tests.helpers.training import assert_learns_as_on_te, run_config
from tests.tolerances import GROUPED_DECIBELS

pytestmark = [*ON_HOPPER, pytest.mark.skipif(not has_deep_gemm(), reason="needs DeepGEMM")]

E, H, FEATURES = 4, 256, 256
PRECISIONS = {
    "bf16": PrecisionConfig(trainer="bf16", kernels={"experts": "deep_gemm"}),
    "fp8": PrecisionConfig(kernels={"experts": "deep_gemm"}),
    "fp8, bf16 wgrad": PrecisionConfig(kernels={"experts": "deep_gemm"}),
    "fp8, fp32 scales": PrecisionConfig(scales="fp32", kernels={"experts": "deep_gemm"}),
}
COUNTS = {"ragged": [300, 0, 129, 1], "one has all": [0, 0, 430, 0], "all full": [128, 256, 128, 384]}


def _wgrad(name: str) -> str:
    return "bf16" if "bf16 wgrad" in name else "fp8"


def build(name: str):
    return build_experts(E, H, FEATURES, PRECISIONS[name], kernels="te", wgrad=_wgrad(name))


def on_cpu(module):
    """The same experts on the CPU."""
    twin = copy.deepcopy(module)
    return twin.cpu()


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("shape", COUNTS)
def test_output_and_gradients(name, shape):
    counts = COUNTS[shape]
    module = build(name)
    tokens = draw_tokens(counts, H, "cuda")
    actual = run_experts(module, counts, *tokens)
    emulated = run_experts(on_cpu(module), counts, *(t.detach().cpu().requires_grad_() for t in tokens))
    exact = exact_experts(module, counts, *tokens)
    apart = decibels({key: t.cpu() for key, t in actual.items()}, emulated)
    ours, theirs = decibels(actual, exact), None
    if "transformer_engine" in installed_packages():
        precision = replace(PRECISIONS[name], kernels={"experts": "te"})
        reference = build_experts(E, H, FEATURES, precision, kernels="te")
        theirs = decibels(run_experts(reference, counts, *tokens), exact)
    shown = [
        f"{key} {ours[key]:.1f} (TE {theirs[key]:.1f}, CPU apart {apart[key]:.1f})"
        if theirs
        else f"{key} {ours[key]:.1f} (CPU apart {apart[key]:.1f})"
        for key in exact
    ]
    print(f"\ngrouped {name:16s} {shape:11s} dB: {'  '.join(shown)}")
    assert min(apart.values()) > GROUPED_DECIBELS, apart
    for key, ratio in (theirs or {}).items():
        assert ours[key] > ratio - (2.5 if key == "dprobs" else 0.5), key
    for key in ("dW1", "dW2"):
        empty = [index for index, count in enumerate(counts) if not count]
        assert not actual[key][empty].any()


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_a_row_has_the_same_bits_whatever_is_beside_it(name):
    counts = [300, 0, 513, 200]
    module = build(name)
    x, probs, _ = draw_tokens(counts, H, "cuda")
    with torch.no_grad():
        whole, _ = module(x, torch.tensor(counts), probs)
        ends = torch.tensor([0, *counts]).cumsum(0).tolist()
        for sizes in ([1, 0, 1, 1], [7, 0, 130, 64], [0, 0, 500, 0], [299, 0, 2, 199]):
            rows = [torch.arange(end - size, end) for end, size in zip(ends[1:], sizes)]
            kept = torch.cat(rows).cuda()
            part, _ = module(x[kept], torch.tensor(sizes), probs[kept])
            assert torch.equal(part, whole[kept]), sizes


def test_the_forward_pass_is_that_of_the_engine():
    """vLLM's own quantizers around the grouped product, as its DeepGEMM experts call them."""
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    from megatron_fp8rl.kernels import blockwise

    counts = COUNTS["ragged"]
    module = build("fp8")
    x, probs, _ = draw_tokens(counts, H, "cuda")
    with torch.no_grad():
        actual, _ = module(x, torch.tensor(counts), probs)
    padded = [-(-count // 128) * 128 for count in counts]
    x_PH = torch.cat(
        [torch.cat([part, part.new_zeros(rows - len(part), H)]) for part, rows in zip(x.detach().split(counts), padded)]
    )
    experts = torch.arange(E, dtype=torch.int32, device="cuda").repeat_interleave(torch.tensor(padded, device="cuda"))
    made = [
        [blockwise.quantize_weight(weight.detach(), "pow2") for weight in linear.weights]
        for linear in (module.linear_fc1, module.linear_fc2)
    ]
    w1, w2 = (Fp8(*(torch.stack(tensors) for tensors in zip(*linear))) for linear in made)

    def multiply(data, scale, weights: Fp8):
        out = torch.empty(len(data), weights.data.shape[1], dtype=torch.bfloat16, device="cuda")
        deep_gemm().m_grouped_fp8_gemm_nt_contiguous(
            (data, scale), tuple(weights), out, experts, disable_ue8m0_cast=True
        )
        return out

    h = multiply(*fp8_utils.per_token_group_quant_fp8(x_PH, 128, column_major_scales=True, use_ue8m0=True), w1)
    y_PH = multiply(*fp8_utils.silu_mul_per_token_group_quant_fp8_colmajor(h, use_ue8m0=True), w2)
    y = torch.cat([part[:count] for part, count in zip(y_PH.split(padded), counts)])
    assert torch.equal(actual, (y * probs.detach()[:, None]).bfloat16())


@pytest.mark.parametrize("name", PRECISIONS)
def test_weight_gradients_are_added_to_main_grad(name, monkeypatch):
    counts = COUNTS["ragged"]
    module = build(name)
    tokens = draw_tokens(counts, H, "cuda")
    give_gradient_buffers(module)
    once = run_experts(module, counts, *tokens)
    give_gradient_buffers(module, fill=0.5)
    monkeypatch.setattr(torch, "zeros", None)  # gradients that are not adjacent would need a buffer
    for _ in range(2):
        actual = run_experts(module, counts, *tokens)
    for key in ("dW1", "dW2"):
        assert torch.allclose(actual[key] - 0.5, 2 * once[key], rtol=1e-5, atol=5e-7)
    assert all(parameter.grad_added_to_main_grad for parameter in module.parameters())


@pytest.mark.parametrize("name", PRECISIONS)
def test_no_token_at_all(name):
    counts = [0] * E
    module = build(name)
    give_gradient_buffers(module, fill=3.0)
    actual = run_experts(module, counts, *draw_tokens(counts, H, "cuda"))
    assert actual["y"].shape == actual["dx"].shape == (0, H)
    assert (actual["dW1"] == 3).all() and (actual["dW2"] == 3).all()


@pytest.mark.parametrize("name", PRECISIONS)
def test_nothing_waits_for_the_gpu(name):
    counts = COUNTS["ragged"]
    module = build(name)
    give_gradient_buffers(module)
    x, probs, grad = draw_tokens(counts, H, "cuda")
    weights = [*module.linear_fc1.weights, *module.linear_fc2.weights]
    tokens_per_expert = torch.tensor(counts).pin_memory()

    def step() -> None:
        y, _ = module(x, tokens_per_expert, probs)
        torch.autograd.grad(y, [x, probs, *weights], grad)

    step()  # compiles, and quantizes weights
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        for cache in (module.linear_fc1.cache, module.linear_fc2.cache):
            cache.clear()
        step()  # quantizes weights again
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_its_own_expert_alone(name, value):
    counts = COUNTS["ragged"]
    module = build(name)
    x, probs, grad = draw_tokens(counts, H, "cuda")
    with torch.no_grad():
        x[350, 7] = value
    actual = run_experts(module, counts, x, probs, grad)
    is_bad = ~torch.isfinite(actual["y"]).all(dim=1)
    assert is_bad.nonzero().flatten().tolist() == [350]
    for key in ("dW1", "dW2"):
        assert [bool(torch.isfinite(dw).all()) for dw in actual[key]] == [True, True, False, True]


@pytest.mark.skipif("transformer_engine" not in installed_packages(), reason="needs Transformer Engine")
@pytest.mark.parametrize("trainer", ["bf16", "blockwise"])
def test_memory_is_no_more_than_on_transformer_engine(trainer):
    hidden, features = 1024, 384
    counts = [4096] * E
    peaks = {}
    for kind in ("te", "deep_gemm"):
        module = build_experts(
            E, hidden, features, PrecisionConfig(trainer=trainer, kernels={"experts": kind}), kernels="te"
        )
        give_gradient_buffers(module)
        tokens = draw_tokens(counts, hidden, "cuda")
        for _ in range(2):
            y = None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            y, _ = module(tokens[0], torch.tensor(counts), tokens[1])
            kept = torch.cuda.memory_allocated() - before
            weights = [*module.linear_fc1.weights, *module.linear_fc2.weights]
            torch.autograd.grad(y, [*tokens[:2], *weights], tokens[2])
            peaks[kind] = torch.cuda.max_memory_allocated() - before, kept
        del module, y, weights
    shown = {kind: [num_bytes >> 20 for num_bytes in actual] for kind, actual in peaks.items()}
    print(f"\ngrouped {trainer}: MiB at the peak and between passes", shown)
    # In BF16 Transformer Engine fills no expert up, and needs no copy of the outputs' gradients that does.
    copy = tokens[2].nbytes if trainer == "bf16" else 0
    assert peaks["deep_gemm"][0] <= 1.02 * peaks["te"][0] + copy
    assert peaks["deep_gemm"][1] <= 1.02 * peaks["te"][1] + copy


@pytest.mark.skipif("transformer_engine" not in installed_packages(), reason="needs Transformer Engine")
def test_a_policy_learns_as_on_transformer_engine():
    """With reductions that overlap with backward, and recomputed layers."""
    model = small_model(
        (2, H, 4, 2, 64, 62), experts=(E, 2, FEATURES), max_position_embeddings=128, initializer_range=0.08
    )
    for trainer, recompute in (("bf16", "none"), ("blockwise", "full")):
        optim = OptimConfig(lr=3e-3, eps=1e-2, overlap_grad_reduce=True, recompute=recompute)
        assert_learns_as_on_te("experts", run_config(model=model, optim=optim), trainer)
