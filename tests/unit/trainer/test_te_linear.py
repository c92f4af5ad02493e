"""How the trainer drives Transformer Engine, against the emulation: with a stand-in of it that checks its arguments."""

import pytest
import torch

from megatron_fp8rl.config import PrecisionConfig
from megatron_fp8rl.precision.recipes import AmaxHistory, finish_step, make_recipe, quantized_linear
from megatron_fp8rl.trainer.model.weight_cache import WeightCache, clear_weight_caches
from tests.helpers import fake_te
from tests.tolerances import BF16_ROUNDING, FLOAT32_ACCUMULATION

K, N = 144, 160
SPLITS = {"dense": None, "dense ragged": None, "experts": [130, 0, 7, 16], "no tokens": [0, 0, 0, 0]}
RECIPES = {
    "blockwise": PrecisionConfig(trainer="blockwise"),
    "blockwise fp32 e5m2": PrecisionConfig(trainer="blockwise", scales="fp32", gradients="e5m2"),
    "tensorwise": PrecisionConfig(trainer="tensorwise", gradients="e5m2"),
    "delayed": PrecisionConfig(trainer="delayed"),
    "bf16": PrecisionConfig(trainer="bf16"),
}


@pytest.fixture(autouse=True)
def te_linear(monkeypatch):
    fake_te.install(monkeypatch)
    from megatron_fp8rl.trainer.model.linear_te import te_linear

    return te_linear


def _case(shape: str, seed: int = 0, dtype=torch.float32):
    splits = SPLITS[shape]
    num_tokens = sum(splits) if splits is not None else 96 if shape == "dense" else 37
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, K, generator=generator).to(dtype).requires_grad_()
    num = len(splits) if splits is not None else 1
    weights = [torch.nn.Parameter(torch.randn(N, K, generator=generator).mul_(0.05).to(dtype)) for _ in range(num)]
    return x, weights, splits, torch.randn(num_tokens, N, generator=generator).mul_(1e-3).to(dtype)


def _gradients(y, x, weights, grad):
    return [y.detach(), *torch.autograd.grad(y, [x, *weights], grad)]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("shape", SPLITS)
def test_products_and_gradients_are_those_of_the_emulation(te_linear, name, shape):
    recipe = make_recipe(RECIPES[name])
    x, weights, splits, grad = _case(shape)
    histories = [AmaxHistory(2, len(weights)) for _ in range(2)]
    expected = _gradients(quantized_linear(x, weights, recipe, splits=splits, history=histories[0]), x, weights, grad)
    y = te_linear(x, weights, recipe, splits=splits, history=histories[1])
    for ours, theirs in zip(_gradients(y, x, weights, grad), expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=2e-6 * float(theirs.abs().max() if theirs.numel() else 0))
    assert torch.equal(histories[0].current, histories[1].current)


@pytest.mark.parametrize("shape", SPLITS)
def test_mxfp8_products_use_both_copies_of_a_weight(te_linear, shape, monkeypatch):
    """Without gradients first: an evaluation must not leave a cached weight without its columns."""
    monkeypatch.setitem(globals(), "K", 160)
    recipe, cache = make_recipe(PrecisionConfig(trainer="mxfp8", gradients="e5m2")), WeightCache()
    x, weights, splits, grad = _case(shape)
    expected = _gradients(quantized_linear(x, weights, recipe, splits=splits), x, weights, grad)
    with torch.no_grad():
        te_linear(x, weights, recipe, splits=splits, cache=cache)
    actual = _gradients(te_linear(x, weights, recipe, splits=splits, cache=cache), x, weights, grad)
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=2e-6 * float(theirs.abs().max() if theirs.numel() else 0))
    monkeypatch.setitem(globals(), "K", 144)
    x, weights, *_ = _case("dense")
    with pytest.raises(ValueError, match="both sizes must be multiples of 32"):
        te_linear(x, weights, recipe)


@pytest.mark.parametrize("name", ["blockwise", "bf16"])
@pytest.mark.parametrize("shape", ["dense ragged", "experts", "no tokens"])
@pytest.mark.parametrize("is_reordered", [False, True])
def test_weight_gradients_are_added_to_main_grad_and_to_nothing_else(te_linear, name, shape, is_reordered):
    if is_reordered and SPLITS[shape] is not None:
        pytest.skip("only the one matrix of q, k and v has another order")
    recipe = make_recipe(RECIPES[name])
    x, weights, splits, grad = _case(shape)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1)) if is_reordered else None
    permuted = [w if order is None else w[order] for w in weights]
    y = quantized_linear(x, permuted, recipe, splits=splits)
    y = y if order is None else y[:, order.argsort()]
    expected = _gradients(y, x, weights, grad)
    for weight in weights:
        weight.main_grad, weight.grad_added_to_main_grad = torch.full((N, K), 2.0), False
    cache = WeightCache()
    for microbatch in (1, 2):
        y = te_linear(x, weights, recipe, splits=splits, block_rows=order, cache=cache)
        actual = _gradients(y, x, weights, grad)
        assert torch.allclose(y, expected[0], **FLOAT32_ACCUMULATION | {"rtol": 1e-5})
        for weight, dw, dummy in zip(weights, expected[2:], actual[2:], strict=True):
            assert torch.allclose(weight.main_grad - 2, microbatch * dw, rtol=1e-4, atol=1e-5)
            assert weight.grad_added_to_main_grad and dummy.shape == weight.shape


def test_gradients_that_are_thrown_away_need_the_memory_of_one_weight(te_linear):
    x, weights, splits, grad = _case("experts")
    for weight in weights:
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(N, K), False
    te_linear(x, weights, make_recipe(RECIPES["blockwise"]), splits=splits).backward(grad)
    assert len({weight.grad.data_ptr() for weight in weights}) == 1, "autograd has copied them"


def test_bf16_results_are_rounded_once(te_linear):
    recipe = make_recipe(RECIPES["blockwise"])
    x, weights, splits, grad = _case("experts", dtype=torch.bfloat16)
    expected = _gradients(quantized_linear(x, weights, recipe, splits=splits), x, weights, grad)
    actual = _gradients(te_linear(x, weights, recipe, splits=splits), x, weights, grad)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == torch.bfloat16
        assert torch.allclose(ours.float(), theirs.float(), **BF16_ROUNDING)


def test_weights_are_quantized_once_until_they_change(te_linear):
    recipe, cache = make_recipe(RECIPES["blockwise"]), WeightCache()
    x, weights, _, grad = _case("dense")

    def times_quantized():
        fake_te.calls["quantized"].clear()
        with torch.no_grad():
            te_linear(x, weights, recipe, cache=cache)
        te_linear(x, weights, recipe, cache=cache).backward(grad)
        return fake_te.calls["quantized"].count((N, K))

    assert times_quantized() == 1
    assert times_quantized() == 0
    with torch.no_grad():
        weights[0].mul_(2)  # counted by the parameter's version
    assert times_quantized() == 1
    weights[0].data.mul_(2)  # as through a flat buffer: not counted
    assert times_quantized() == 0
    clear_weight_caches()
    assert times_quantized() == 1


def test_delayed_scaling_remembers_what_the_emulation_remembers(te_linear):
    recipe = make_recipe(RECIPES["delayed"])
    histories = [AmaxHistory(3, 4) for _ in range(2)]
    cache = WeightCache()
    for step in range(4):
        for microbatch in range(2):
            x, weights, splits, grad = _case("experts", seed=10 * step + microbatch)
            if step:  # until now the second expert had no token, so its input has no history
                splits = [100, 30, 7, 16]
            with torch.no_grad():
                te_linear(x * 3, weights, recipe, splits=splits, history=histories[1], cache=cache)
            y = te_linear(x, weights, recipe, splits=splits, history=histories[1], cache=cache)
            ours = _gradients(y, x, weights, grad)
            y = quantized_linear(x, weights, recipe, splits=splits, history=histories[0])
            theirs = _gradients(y, x, weights, grad)
            for a, b in zip(ours, theirs, strict=True):
                assert torch.allclose(a, b, rtol=1e-5, atol=2e-6 * float(b.abs().max()))
        assert torch.equal(histories[0].current, histories[1].current)
        for history in histories:
            finish_step([history], lambda flat: None)
        clear_weight_caches()
        assert torch.equal(histories[0].history, histories[1].history)
        assert histories[1].is_filled == ((step > 0), True, (step > 0))
    histories[1].load_state_dict(histories[0].state_dict())
    assert histories[1].is_filled == (False, False, False)


def test_sizes_that_tensor_cores_cannot_take_are_refused_with_the_remedy(te_linear):
    weights = [torch.nn.Parameter(torch.zeros(24, 64))]
    with pytest.raises(ValueError, match="24 x 64 .* multiples of 16.*keep its layer in BF16"):
        te_linear(torch.zeros(8, 64), weights, make_recipe(RECIPES["tensorwise"]))
