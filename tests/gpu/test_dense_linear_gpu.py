"""Dense linears on DeepGEMM, on one Hopper GPU; -s shows the decibels.

The kernels are compiled on first use, for seconds each, and kept in DG_JIT_CACHE_DIR; tests share their sizes.
"""

import pytest
import torch
import torch.nn.functional as F

from megatron_fp8rl.config import OptimConfig, PrecisionConfig
from megatron_fp8rl.kernels import gemm
from megatron_fp8rl.kernels.deep_gemm import has_deep_gemm
from megatron_fp8rl.kernels.fused_moe import expert_permutation, permute_quantize
from megatron_fp8rl.kernels.gemm import Fp8
from megatron_fp8rl.precision.formats import BLOCKWISE_POW2, blockwise_format
from megatron_fp8rl.precision.hardware import installed_packages
from megatron_fp8rl.precision.recipes import make_recipe
from megatron_fp8rl.trainer.model import linear_deep_gemm
from megatron_fp8rl.trainer.model.linear_deep_gemm import Matrix
from megatron_fp8rl.trainer.model.weight_cache import WeightCache
from tests.helpers.experts import decibels
from tests.helpers.hopper import ON_HOPPER
from tests.helpers.models import small_model
from tests.helpers.training import assert_learns_as_on_te, run_config
from tests.tolerances import GROUPED_DECIBELS, TE_DECIBELS_FP32_SCALES

pytestmark = [*ON_HOPPER, pytest.mark.skipif(not has_deep_gemm(), reason="needs DeepGEMM")]

H, FEATURES = 512, 384
TOKENS = {"whole blocks": 1024, "ragged": 333, "one": 1}


def draw(*shape: int, seed: int, size: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-4, 3, shape, generator=generator).float())
    return (torch.randn(shape, generator=generator) * spread * size).bfloat16().cuda()


def matrices(scales: str = "pow2") -> tuple[Matrix, Matrix]:
    """fc1 [2F, H] and fc2 [H, F]."""
    shapes = ((2 * FEATURES, H), (H, FEATURES))
    weights = [torch.nn.Parameter(draw(*shape, seed=seed, size=0.03)) for seed, shape in enumerate(shapes, 4)]
    return tuple(Matrix(weight, blockwise_format(scales), WeightCache()) for weight in weights)


def on_cpu(matrix: Matrix) -> Matrix:
    return Matrix(torch.nn.Parameter(matrix.weight.detach().cpu()), matrix.fmt, WeightCache())


def products(y, inputs, grad) -> dict:
    dx, *dw = torch.autograd.grad(y, inputs, grad)
    return {"y": y.detach(), "dx": dx} | {f"dW{i}": part for i, part in enumerate(dw, 1)}


def run(kind: str, x, fc1: Matrix, fc2: Matrix, grads: dict) -> dict:
    """Output and gradients of one linear, or of a feed-forward part."""
    x = x.detach().requires_grad_()
    if kind == "linear":
        return products(linear_deep_gemm.linear(x, fc1), [x, fc1.weight], grads[2 * FEATURES].to(x.device))
    return products(linear_deep_gemm.mlp(x, fc1, fc2), [x, fc1.weight, fc2.weight], grads[H].to(x.device))


def run_on_te(kind: str, x, fc1: Matrix, fc2: Matrix, grads: dict) -> dict:
    from megatron_fp8rl.trainer.model.linear_te import te_linear

    recipe, x = make_recipe(PrecisionConfig(scales=fc1.fmt.scale_kind)), x.detach().requires_grad_()
    h = te_linear(x, [fc1.weight], recipe)
    if kind == "linear":
        return products(h, [x, fc1.weight], grads[2 * FEATURES])
    gate, up = h.chunk(2, dim=1)
    return products(te_linear(F.silu(gate) * up, [fc2.weight], recipe), [x, fc1.weight, fc2.weight], grads[H])


def run_exact(kind: str, x, fc1: Matrix, fc2: Matrix, grads: dict) -> dict:
    x, w1, w2 = (t.detach().double().requires_grad_() for t in (x, fc1.weight, fc2.weight))
    h = x @ w1.t()
    if kind == "linear":
        return products(h, [x, w1], grads[2 * FEATURES].double())
    gate, up = h.chunk(2, dim=1)
    return products((F.silu(gate) * up) @ w2.t(), [x, w1, w2], grads[H].double())


@pytest.mark.parametrize("scales", ["pow2", "fp32"])
@pytest.mark.parametrize("kind", ["linear", "mlp"])
@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
def test_output_and_gradients(tokens, kind, scales):
    fc1, fc2 = matrices(scales)
    x, grads = draw(tokens, H, seed=2), {n: draw(tokens, n, seed=3, size=1e-3) for n in (H, 2 * FEATURES)}
    actual = run(kind, x, fc1, fc2, grads)
    emulated = run(kind, x.cpu(), on_cpu(fc1), on_cpu(fc2), grads)
    exact = run_exact(kind, x, fc1, fc2, grads)
    apart, ours, theirs = decibels({key: t.cpu() for key, t in actual.items()}, emulated), decibels(actual, exact), {}
    if "transformer_engine" in installed_packages():
        on_te = run_on_te(kind, x, fc1, fc2, grads)
        theirs = decibels(on_te, exact)
        same = (actual["y"] == on_te["y"]).float().mean().item()
        print(f"\ndeep_gemm {kind} {tokens} {scales}: {same:.4%} of the outputs equal Transformer Engine's")
        assert scales == "fp32" or same > 0.99
    shown = [f"{key} {ours[key]:.1f} (TE {theirs.get(key, 0):.1f}, CPU apart {apart[key]:.1f})" for key in exact]
    print(f"deep_gemm {kind} {tokens} {scales} dB: {'  '.join(shown)}")
    assert min(apart.values()) > (GROUPED_DECIBELS if scales == "pow2" else TE_DECIBELS_FP32_SCALES), apart
    for key, ratio in theirs.items():
        assert ours[key] > ratio - 0.5, key


def test_the_forward_pass_is_that_of_the_engine():
    """vLLM's own quantizer and its call of DeepGEMM, as its linears make it."""
    from vllm.model_executor.layers.quantization.utils import fp8_utils
    from vllm.utils.deep_gemm import fp8_gemm_nt

    from megatron_fp8rl.kernels import blockwise

    fc1, _ = matrices()
    x = draw(300, H, seed=2)
    data, scale = fp8_utils.per_token_group_quant_fp8(x, 128, column_major_scales=True, use_ue8m0=True)
    out = torch.empty(len(x), 2 * FEATURES, dtype=torch.bfloat16, device="cuda")
    weight = blockwise.quantize_weight(fc1.weight.detach(), "pow2")
    fp8_gemm_nt((data, scale), weight, out, is_deep_gemm_e8m0_used=True)
    with torch.no_grad():
        assert torch.equal(linear_deep_gemm.linear(x, fc1), out)


def test_a_row_has_the_same_bits_whatever_is_beside_it():
    fc1, fc2 = matrices()
    x = draw(1000, H, seed=2)
    with torch.no_grad():
        for compute in (lambda x: linear_deep_gemm.linear(x, fc1), lambda x: linear_deep_gemm.mlp(x, fc1, fc2)):
            whole = compute(x)
            for kept in (slice(0, 1), slice(3, 10), slice(0, 999), slice(500, 756)):
                assert torch.equal(compute(x[kept]), whole[kept]), kept


@pytest.mark.parametrize("tokens", [128, 1024, 333])
def test_weight_gradients_are_those_of_the_grouped_kernel_and_are_added(tokens):
    """fp8_gemm_nt with 1x128 blocks on both sides, against our kernel with one expert."""
    grad, x = draw(tokens, 2 * FEATURES, seed=3, size=1e-3), draw(tokens, H, seed=2)
    made = [linear_deep_gemm._quantize(m, BLOCKWISE_POW2, rows=False, columns=True) for m in (grad, x)]
    ours = torch.ones(2 * FEATURES, H, device="cuda")
    for _ in range(2):
        gemm.add_dense_weight_gradient(*map(linear_deep_gemm._columns, made), ours)
    layout = expert_permutation(torch.tensor([tokens], device="cuda"), tokens, [tokens])
    grouped = torch.ones(1, 2 * FEATURES, H, device="cuda")
    blocks = [permute_quantize(m, layout, BLOCKWISE_POW2, rows=False, columns=True) for m in (grad, x)]
    operands = [Fp8(m.columns, m.column_scales) for m in blocks]
    for _ in range(2):
        gemm.add_weight_gradients_fp8(*operands, layout, grouped)
    exact = grad.double().t() @ x.double()
    error = ((ours - 1) / 2 - exact).norm() / exact.norm()
    print(f"\nwgrad of {tokens} tokens: error {error:.4f}, bits of the grouped kernel: {torch.equal(ours, grouped[0])}")
    assert error < 0.06  # two E4M3 operands
    assert torch.allclose(ours, grouped[0], rtol=1e-5, atol=1e-6)


def test_nothing_waits_for_the_gpu():
    fc1, fc2 = matrices()
    for part in (fc1, fc2):
        part.weight.main_grad = torch.zeros_like(part.weight, dtype=torch.float32)
        part.weight.grad_added_to_main_grad = False
    x, grad = draw(333, H, seed=2).requires_grad_(), draw(333, H, seed=3, size=1e-3)

    def step() -> None:
        torch.autograd.grad(linear_deep_gemm.mlp(x, fc1, fc2), [x, fc1.weight, fc2.weight], grad)

    step()  # compiles, and quantizes weights
    torch.cuda.synchronize()
    linear_deep_gemm._layout.cache_clear()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif("transformer_engine" not in installed_packages(), reason="needs Transformer Engine")
def test_a_feed_forward_part_needs_less_memory_than_on_transformer_engine():
    fc1, fc2 = matrices()
    x, grads = draw(16_384, H, seed=2), {H: draw(16_384, H, seed=3)}
    peaks = {}
    for name, compute in (("te", run_on_te), ("deep_gemm", run)):
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            compute("mlp", x, fc1, fc2, grads)
            peaks[name] = torch.cuda.max_memory_allocated() - before
    print("\nfeed-forward part, MiB at the peak:", {name: num_bytes >> 20 for name, num_bytes in peaks.items()})
    assert peaks["deep_gemm"] < peaks["te"]


@pytest.mark.skipif("transformer_engine" not in installed_packages(), reason="needs Transformer Engine")
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_policy_learns_as_on_transformer_engine(recompute):
    """With biases, heads of half a block, and reductions that overlap with backward."""
    model = small_model(
        (2, 256, 4, 2, 64, 62),
        ffn=512,
        family="qwen2",
        qkv_bias=True,
        max_position_embeddings=128,
        initializer_range=0.03,
    )
    optim = OptimConfig(lr=1e-3, eps=1e-2, overlap_grad_reduce=True, recompute=recompute)
    assert_learns_as_on_te("linears", run_config(model=model, optim=optim))
