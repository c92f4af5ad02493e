"""Dense linears and feed-forward parts on DeepGEMM, as a CPU computes them: against the recipe and float64."""

import pytest
import torch
import torch.nn.functional as F

from megatron_fp8rl.config import PrecisionConfig
from megatron_fp8rl.precision.formats import blockwise_format
from megatron_fp8rl.precision.recipes import make_recipe, quantized_linear
from megatron_fp8rl.trainer.model import linear_deep_gemm
from megatron_fp8rl.trainer.model.linear_deep_gemm import Matrix
from megatron_fp8rl.trainer.model.weight_cache import WeightCache, clear_weight_caches
from tests.helpers.experts import decibels
from tests.helpers.interpreter import assert_passes_interpreted, starts_interpreter

N, K, FEATURES = 384, 256, 128
SCALES = ("pow2", "fp32")
TOKENS = {"whole blocks": 256, "ragged": 203, "one": 1}


@pytest.mark.slow
@starts_interpreter
def test_in_the_interpreter():
    """The same with the kernels of a GPU, interpreted."""
    assert_passes_interpreted(__file__)


def draw(*shape: int, seed: int, size: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-4, 3, shape, generator=generator).float())
    return (torch.randn(shape, generator=generator) * spread * size).bfloat16()


def matrix(rows: int, columns: int, scales: str, seed: int = 1, block_rows=None) -> Matrix:
    weight = torch.nn.Parameter(draw(rows, columns, seed=seed, size=0.03))
    return Matrix(weight, blockwise_format(scales), WeightCache(), block_rows)


def give_buffer(weight: torch.nn.Parameter, fill: float, dtype=torch.float32) -> None:
    weight.main_grad, weight.grad_added_to_main_grad = torch.full_like(weight, fill, dtype=dtype), False


def products(y, inputs, grad) -> dict:
    gradients = torch.autograd.grad(y, inputs, grad)
    return {"y": y.detach(), "dx": gradients[0]} | {f"dW{i}": dw for i, dw in enumerate(gradients[1:], 1)}


def assert_as_close(actual: dict, reference: dict, exact: dict) -> None:
    """Gradients are as close to float64 as those of the recipe's reference path."""
    assert torch.equal(actual["y"], reference["y"])
    ours, theirs = decibels(actual, exact), decibels(reference, exact)
    for key, tensor in reference.items():
        assert actual[key].shape == tensor.shape and actual[key].dtype == tensor.dtype, key
        assert ours[key] > theirs[key] - 0.3, (key, ours, theirs)


def exact_linear(x, weight, grad) -> dict:
    x, weight = (t.detach().double().requires_grad_() for t in (x, weight))
    return products(x @ weight.t(), [x, weight], grad.double())


@pytest.mark.parametrize("rows", [N, N - 64])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
def test_a_linear_is_that_of_the_recipe(tokens, scales, rows):
    """Also with half a block of rows at the end."""
    ours, grad = matrix(rows, K, scales), draw(tokens, rows, seed=3, size=1e-3)
    x, recipe = draw(tokens, K, seed=2).requires_grad_(), make_recipe(PrecisionConfig(scales=scales))
    actual = products(linear_deep_gemm.linear(x, ours), [x, ours.weight], grad)
    reference = products(quantized_linear(x, (ours.weight,), recipe), [x, ours.weight], grad)
    assert_as_close(actual, reference, exact_linear(x, ours.weight, grad))
    assert torch.equal(actual["dx"], reference["dx"])


@pytest.mark.parametrize("is_fused", [False, True])
def test_an_order_of_rows_changes_the_blocks_and_nothing_else(is_fused):
    order = torch.randperm(N, generator=torch.Generator().manual_seed(5))
    ours, grad = matrix(N, K, "pow2", block_rows=order), draw(203, N, seed=3, size=1e-3)
    x, recipe = draw(203, K, seed=2).requires_grad_(), make_recipe(PrecisionConfig())
    y = quantized_linear(x, (ours.weight[order],), recipe)[:, order.argsort()]
    reference = products(y, [x, ours.weight], grad)
    if is_fused:
        give_buffer(ours.weight, 0.0)
    actual = products(linear_deep_gemm.linear(x, ours), [x, ours.weight], grad)
    if is_fused:
        actual["dW1"] = ours.weight.main_grad.bfloat16()
    assert_as_close(actual, reference, exact_linear(x, ours.weight, grad))


def plain_mlp(x, w1, w2, recipe) -> torch.Tensor:
    gate, up = quantized_linear(x, (w1,), recipe).chunk(2, dim=1)
    return quantized_linear(F.silu(gate) * up, (w2,), recipe)


def exact_mlp(x, w1, w2, grad) -> dict:
    x, w1, w2 = (t.detach().double().requires_grad_() for t in (x, w1, w2))
    gate, up = (x @ w1.t()).chunk(2, dim=1)
    return products((F.silu(gate) * up) @ w2.t(), [x, w1, w2], grad.double())


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
def test_a_feed_forward_part_is_that_of_two_linears(tokens, scales):
    fc1, fc2 = matrix(2 * FEATURES, K, scales, seed=4), matrix(K, FEATURES, scales, seed=5)
    x, grad = draw(tokens, K, seed=2).requires_grad_(), draw(tokens, K, seed=3, size=1e-3)
    inputs = [x, fc1.weight, fc2.weight]
    actual = products(linear_deep_gemm.mlp(x, fc1, fc2), inputs, grad)
    recipe = make_recipe(PrecisionConfig(scales=scales))
    reference = products(plain_mlp(*inputs, recipe), inputs, grad)
    assert_as_close(actual, reference, exact_mlp(*inputs, grad))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_are_added_to_main_grad_and_to_nothing_else(dtype, monkeypatch):
    fc1, fc2 = matrix(2 * FEATURES, K, "pow2", seed=4), matrix(K, FEATURES, "pow2", seed=5)
    x, grad = draw(130, K, seed=2).requires_grad_(), draw(130, K, seed=3, size=1e-3)
    once = products(linear_deep_gemm.mlp(x, fc1, fc2), [x, fc1.weight, fc2.weight], grad)
    for part in (fc1, fc2):
        give_buffer(part.weight, 2.0, dtype)
    if dtype == torch.float32:
        monkeypatch.setattr(torch, "zeros", None)  # what a buffer of another type would need
    for _ in range(2):
        products(linear_deep_gemm.mlp(x, fc1, fc2), [x, fc1.weight, fc2.weight], grad)
    for part, key in ((fc1, "dW1"), (fc2, "dW2")):
        assert part.weight.grad_added_to_main_grad
        tolerance = 2**-6 if dtype == torch.bfloat16 else 1e-6  # numbers near 2, added twice
        difference = part.weight.main_grad.float() - 2 - 2 * once[key].float()
        assert float(difference.abs().max()) <= tolerance + 2**-7 * float(once[key].abs().max())


def test_no_token_at_all():
    fc1, fc2 = matrix(2 * FEATURES, K, "pow2", seed=4), matrix(K, FEATURES, "pow2", seed=5)
    x = torch.zeros(0, K).bfloat16().requires_grad_()
    for y, inputs in (
        (linear_deep_gemm.linear(x, fc1), [x, fc1.weight]),
        (linear_deep_gemm.mlp(x, fc1, fc2), [x, fc1.weight, fc2.weight]),
    ):
        actual = products(y, inputs, y.detach())
        assert len(actual["y"]) == 0 and actual["dx"].shape == x.shape
        assert not any(actual[key].any() for key in actual if key.startswith("dW"))
    give_buffer(fc1.weight, 3.0)
    linear_deep_gemm.linear(x, fc1).sum().backward()
    assert (fc1.weight.main_grad == 3).all() and fc1.weight.grad_added_to_main_grad


def test_weights_are_quantized_once_until_they_change(monkeypatch):
    quantize, made = linear_deep_gemm.quantized, []
    monkeypatch.setattr(linear_deep_gemm, "quantized", lambda *args: made.append(1) or quantize(*args))
    ours, recipe = matrix(N, K, "pow2"), make_recipe(PrecisionConfig())
    x = draw(5, K, seed=2).requires_grad_()
    for _ in range(2):
        linear_deep_gemm.linear(x, ours).sum().backward()
    assert len(made) == 1
    with torch.no_grad():
        ours.weight.mul_(1.5)
    clear_weight_caches()
    assert torch.equal(linear_deep_gemm.linear(x, ours), quantized_linear(x, (ours.weight,), recipe))
    assert len(made) == 2


def test_what_is_kept_for_backward_is_fp8_and_h():
    fc1, fc2 = matrix(2 * FEATURES, K, "pow2", seed=4), matrix(K, FEATURES, "pow2", seed=5)
    y = linear_deep_gemm.mlp(draw(200, K, seed=2).requires_grad_(), fc1, fc2)
    kept = y.grad_fn
    assert not kept.saved_tensors and tuple(kept.h.shape) == (256, 2 * FEATURES)
    assert kept.x.data.dtype == torch.float8_e4m3fn and kept.x.data.shape == (K, 256)
    y.sum().backward()
    assert kept.x is None and kept.made is None
    with torch.no_grad():
        assert linear_deep_gemm.mlp(draw(200, K, seed=2), fc1, fc2).grad_fn is None


def feed_forward() -> tuple:
    """(both matrices, input, gradient of the output, products)."""
    fc1, fc2 = matrix(2 * FEATURES, K, "pow2", seed=4), matrix(K, FEATURES, "pow2", seed=5)
    x, grad = draw(203, K, seed=2).requires_grad_(), draw(203, K, seed=3, size=1e-3)
    return fc1, fc2, x, grad, products(linear_deep_gemm.mlp(x, fc1, fc2), [x, fc1.weight, fc2.weight], grad)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputing_changes_nothing(use_reentrant):
    fc1, fc2, x, grad, expected = feed_forward()
    again = torch.utils.checkpoint.checkpoint(
        lambda x: linear_deep_gemm.mlp(x, fc1, fc2), x, use_reentrant=use_reentrant
    )
    assert torch.equal(again, expected["y"])
    again.backward(grad)
    assert torch.equal(x.grad, expected["dx"])
    assert torch.equal(fc1.weight.grad, expected["dW1"]) and torch.equal(fc2.weight.grad, expected["dW2"])


def test_only_what_wants_a_gradient_gets_one():
    fc1, fc2, x, grad, expected = feed_forward()
    y = linear_deep_gemm.mlp(x.detach(), fc1, fc2)
    dw = torch.autograd.grad(y, [fc1.weight, fc2.weight], grad)
    assert torch.equal(dw[0], expected["dW1"]) and torch.equal(dw[1], expected["dW2"])
    fc1.weight.requires_grad_(False), fc2.weight.requires_grad_(False)
    assert torch.equal(torch.autograd.grad(linear_deep_gemm.mlp(x, fc1, fc2), x, grad)[0], expected["dx"])


def test_outputs_may_be_written_into():
    """Megatron-Core adds a bias or a residual in place here and there; autograd forbids it for views."""
    ours = matrix(N, K, "pow2")
    x = draw(203, K, seed=2).requires_grad_()
    y = linear_deep_gemm.linear(x, ours)
    expected = y.detach() + 1
    y += 1
    assert torch.equal(y, expected) and y.is_contiguous()
    y.sum().backward()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_its_own_row(value):
    ours = matrix(N, K, "pow2")
    x = draw(203, K, seed=2)
    x[50, 7] = value
    is_bad = ~torch.isfinite(linear_deep_gemm.linear(x, ours)).all(dim=1)
    assert is_bad.nonzero().flatten().tolist() == [50]
