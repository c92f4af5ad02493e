"""Transformer Engine's kernels against the emulation and float64 on one GPU; run with -s for the decibels."""

import math

import pytest
import torch

from megatron_fp8rl.config import PrecisionConfig
from megatron_fp8rl.kernels import blockwise
from megatron_fp8rl.precision.hardware import installed_packages
from megatron_fp8rl.precision.recipes import AmaxHistory, finish_step, make_recipe, quantized_linear
from megatron_fp8rl.trainer.model.weight_cache import WeightCache, clear_weight_caches
from tests.tolerances import TE_DECIBELS, TE_DECIBELS_FP32_SCALES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif("transformer_engine" not in installed_packages(), reason="needs Transformer Engine"),
]

RECIPES = {
    "blockwise pow2": PrecisionConfig(trainer="blockwise"),
    "blockwise fp32": PrecisionConfig(trainer="blockwise", scales="fp32"),
    "blockwise e5m2": PrecisionConfig(trainer="blockwise", gradients="e5m2"),
    "tensorwise": PrecisionConfig(trainer="tensorwise"),
    "tensorwise e5m2": PrecisionConfig(trainer="tensorwise", gradients="e5m2"),
    "delayed e5m2": PrecisionConfig(trainer="delayed", gradients="e5m2"),
    "bf16": PrecisionConfig(trainer="bf16"),
}
# (tokens or splits, output features, input features)
SHAPES = {
    "dense": (1024, 768, 512),
    "ragged": (333, 336, 144),
    "experts": ((300, 0, 16, 129, 1, 578), 512, 256),
    "no tokens": ((0, 0), 256, 256),
}


def _case(shape: str, seed: int = 0):
    tokens, num_rows, num_columns = SHAPES[shape]
    splits = None if isinstance(tokens, int) else list(tokens)
    num_tokens, num = (tokens, 1) if splits is None else (sum(splits), len(splits))
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*sizes, size=1.0):
        spread = torch.exp2(torch.randint(-5, 3, sizes, generator=generator, device="cuda").float())
        return (torch.randn(sizes, generator=generator, device="cuda") * spread * size).bfloat16()

    x = draw(num_tokens, num_columns).requires_grad_()
    weights = [torch.nn.Parameter(draw(num_rows, num_columns, size=0.02)) for _ in range(num)]
    return x, weights, splits, draw(num_tokens, num_rows, size=1e-4)


def _products(y, x, weights, grad):
    return [y.detach(), *torch.autograd.grad(y, [x, *weights], grad)]


def _exact(x, weights, splits, grad):
    x64, w64 = x.detach().double().requires_grad_(), [w.detach().double().requires_grad_() for w in weights]
    parts = x64.split(splits) if splits is not None else [x64]
    y = torch.cat([part @ w.T for part, w in zip(parts, w64)])
    return _products(y, x64, w64, grad.double())


def _decibels(actual: list, reference: list) -> list[float]:
    """Signal over error of y, dx, and all dW together; infinite where nothing differs."""

    def ratio(ours, theirs):
        error = (ours - theirs).norm() ** 2
        return math.inf if error == 0 else 10 * math.log10(theirs.norm() ** 2 / error)

    groups = [slice(0, 1), slice(1, 2), slice(2, None)]
    flat = [
        [torch.cat([t.double().flatten() for t in side[group]]) for group in groups] for side in (actual, reference)
    ]
    return [ratio(ours, theirs) for ours, theirs in zip(*flat)]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_gradients(name, shape):
    from megatron_fp8rl.trainer.model.linear_te import te_linear

    recipe = make_recipe(RECIPES[name])
    x, weights, splits, grad = _case(shape)
    histories = [AmaxHistory(2, len(weights), torch.device("cuda")) for _ in range(2)]
    emulated = quantized_linear(x, weights, recipe, splits=splits, history=histories[0])
    emulated = _products(emulated, x, weights, grad)
    actual = te_linear(x, weights, recipe, splits=splits, history=histories[1])
    actual = _products(actual, x, weights, grad)
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(actual, emulated, strict=True))
    assert torch.equal(histories[0].current, histories[1].current)
    if not x.numel():
        assert not any(dw.any() for dw in actual[2:])
        return
    exact = _exact(x, weights, splits, grad)
    against_emulation, ours, theirs = _decibels(actual, emulated), _decibels(actual, exact), _decibels(emulated, exact)
    shown = "  ".join(
        f"{what} {a:.1f} (emulated {b:.1f}, apart {c:.1f})"
        for what, a, b, c in zip(("y", "dx", "dW"), ours, theirs, against_emulation)
    )
    print(f"\nTE {name:16s} {shape:8s} dB: {shown}")
    assert min(against_emulation) > (TE_DECIBELS_FP32_SCALES if name == "blockwise fp32" else TE_DECIBELS)
    assert max(abs(a - b) for a, b in zip(ours, theirs)) < 0.5


@pytest.mark.parametrize("fmt", [blockwise.E4M3, blockwise.E5M2], ids=["e4m3", "e5m2"])
def test_tensorwise_bytes_are_those_of_the_emulation(fmt):
    """For largest magnitudes of every BF16 mantissa: a scale's last bit decides what lies between two FP8 numbers."""
    from megatron_fp8rl.trainer.model import linear_te

    recipe = make_recipe(RECIPES["tensorwise e5m2"])
    amax_E = (torch.arange(0x4080, 0x4100, dtype=torch.int32, device="cuda") << 16).view(torch.float32)  # 4 to 8
    drawn = _case("dense")[0].detach()[:64, :64].contiguous()
    matrices = [drawn.clamp(-amax, amax) for amax in amax_E.tolist()]
    for matrix, amax in zip(matrices, amax_E, strict=True):
        matrix[0, 0] = amax
    quantizers, _ = linear_te._quantizers(recipe, fmt, len(matrices), columns=False, is_weight=False)
    made = linear_te.tex.multi_tensor_quantize(matrices, quantizers)
    scale_E = recipe.scale(amax_E, fmt)
    assert torch.equal(torch.cat([part._scale_inv.flatten() for part in made]), scale_E.reciprocal())
    for part, matrix, scale in zip(made, matrices, scale_E, strict=True):
        assert torch.equal(part._data.view(fmt.dtype).float(), recipe._round(matrix, scale, fmt)), float(scale)


@pytest.mark.parametrize("shape", [(256, 384), (336, 144), (128, 2048)])
def test_pow2_bytes_are_those_of_fp8_blockwise(shape):
    from megatron_fp8rl.kernels.blockwise import E4M3
    from megatron_fp8rl.trainer.model import linear_te

    matrix = _case("dense")[0].detach().flatten()[: shape[0] * shape[1]].view(shape).contiguous()
    matrix[:128, :128] = 0
    recipe = make_recipe(RECIPES["blockwise pow2"])
    for is_weight in (True, False):
        (quantizer,), _ = linear_te._quantizers(recipe, E4M3, 1, columns=True, is_weight=is_weight)
        (made,) = linear_te.tex.multi_tensor_quantize([matrix], [quantizer])
        for data, scales, source in (
            (made._rowwise_data, made._rowwise_scale_inv, matrix),
            (made._columnwise_data, made._columnwise_scale_inv, matrix.t().contiguous()),
        ):
            rows, blocks = source.shape[0], -(-source.shape[1] // 128)
            if is_weight:
                bytes_, scale = blockwise.quantize_weight(source, "pow2")
                scales = scales[: scale.shape[0], :blocks]
            else:
                bytes_, scale = blockwise.quantize_activation(source, "pow2")
                scales = scales[:, :rows].t()
            assert torch.equal(data.view(torch.uint8), bytes_.view(torch.uint8)), f"bytes, is_weight={is_weight}"
            assert torch.equal(scales, scale), f"scales, is_weight={is_weight}"


@pytest.mark.parametrize("name", ["blockwise pow2", "tensorwise", "delayed e5m2", "bf16"])
@pytest.mark.parametrize("shape", ["ragged", "experts", "no tokens"])
def test_weight_gradients_are_added_to_main_grad(name, shape):
    from megatron_fp8rl.trainer.model.linear_te import te_linear

    recipe = make_recipe(RECIPES[name])
    x, weights, splits, grad = _case(shape)
    history = AmaxHistory(2, len(weights), torch.device("cuda"))
    exact = _exact(x, weights, splits, grad)
    separate = _products(te_linear(x, weights, recipe, splits=splits, history=history), x, weights, grad)
    for weight in weights:
        weight.main_grad, weight.grad_added_to_main_grad = torch.ones(weight.shape, device="cuda"), False
    cache = WeightCache()
    for _ in range(2):
        _products(te_linear(x, weights, recipe, splits=splits, history=history, cache=cache), x, weights, grad)
    size = max(float(dw.abs().max()) for dw in exact[2:])
    for weight, dw in zip(weights, separate[2:]):
        assert weight.grad_added_to_main_grad
        # Twice what was rounded to BF16 here and added in FP32 there.
        assert torch.allclose(weight.main_grad - 1, 2 * dw.float(), rtol=2**-7, atol=2**-8 * size + 1e-6)


def test_an_order_of_rows_changes_the_blocks_and_nothing_else():
    from megatron_fp8rl.trainer.model.linear_te import te_linear

    recipe = make_recipe(RECIPES["blockwise pow2"])
    x, weights, _, grad = _case("ragged")
    order = torch.randperm(weights[0].shape[0], device="cuda")
    y = quantized_linear(x, (weights[0][order],), recipe)[:, order.argsort()]
    emulated = _products(y, x, weights, grad)
    actual = _products(te_linear(x, weights, recipe, block_rows=order), x, weights, grad)
    assert min(_decibels(actual, emulated)) > TE_DECIBELS
    weights[0].main_grad, weights[0].grad_added_to_main_grad = torch.zeros_like(weights[0], dtype=torch.float32), False
    _products(te_linear(x, weights, recipe, block_rows=order), x, weights, grad)
    assert torch.allclose(weights[0].main_grad.bfloat16(), actual[2], rtol=2**-7, atol=1e-6)


def test_delayed_scaling_over_steps():
    from megatron_fp8rl.trainer.model.linear_te import te_linear

    recipe = make_recipe(RECIPES["delayed e5m2"])
    _, _, splits, _ = _case("experts")
    histories = [AmaxHistory(3, len(splits), torch.device("cuda")) for _ in range(2)]
    cache = WeightCache()
    for step in range(4):
        for microbatch in range(2):
            x, weights, splits, grad = _case("experts", seed=10 * step + microbatch)
            if step:
                splits = [200, 100, 16, 129, 1, 578]
            before = histories[1].current.clone()
            with torch.no_grad():
                te_linear(x * 5, weights, recipe, splits=splits, history=histories[1], cache=cache)
            assert torch.equal(before, histories[1].current)
            actual = te_linear(x, weights, recipe, splits=splits, history=histories[1], cache=cache)
            actual = _products(actual, x, weights, grad)
            emulated = quantized_linear(x, weights, recipe, splits=splits, history=histories[0])
            emulated = _products(emulated, x, weights, grad)
            assert min(_decibels(actual, emulated)) > TE_DECIBELS
        for history in histories:
            finish_step([history], lambda flat: None)
        clear_weight_caches()
        assert torch.equal(histories[0].history, histories[1].history), f"step {step}"
    assert histories[1].is_filled == (True, True, True)


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("shape", [(37, 4096), (4, 5, 8, 128), (1000, 96)])
def test_the_norm_rounds_once(shape, zero_centred):
    from megatron_fp8rl.trainer.model.norm import te_rms_norm

    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(shape, generator=generator, device="cuda").bfloat16().requires_grad_()
    weight = (
        ((0 if zero_centred else 1) + torch.randn(shape[-1], generator=generator, device="cuda") / 4)
        .bfloat16()
        .requires_grad_()
    )
    grad = torch.randn(shape, generator=generator, device="cuda").bfloat16()
    plain = (torch.nn.functional.rms_norm(x.float(), weight.shape, eps=1e-6) * (weight.float() + zero_centred)).to(
        x.dtype
    )
    actual = te_rms_norm(x, weight, 1e-6, zero_centred=zero_centred)
    equal = (actual == plain).float().mean().item()
    ours = torch.autograd.grad(actual, [x, weight], grad)
    theirs = torch.autograd.grad(plain, [x, weight], grad)
    print(f"\nTE norm {shape}: {equal:.2%} of the outputs equal")
    assert equal > 0.99
    assert torch.allclose(actual.float(), plain.float(), rtol=2**-7, atol=0)  # one rounding
    for a, b in zip(ours, theirs):
        assert torch.allclose(a.float(), b.float(), rtol=2**-6, atol=2**-7 * float(b.abs().max()))
    stream = torch.randn(shape, generator=generator, device="cuda").bfloat16()
    both = te_rms_norm(x, weight, 1e-6, with_input=True, zero_centred=zero_centred)
    assert torch.equal(both[0], actual) and torch.equal(both[1], x)
    dx, dweight = torch.autograd.grad(both, [x, weight], [grad, stream])
    assert torch.equal(dweight, ours[1])
    torch.testing.assert_close(dx.float(), ours[0].float() + stream.float(), rtol=2**-6, atol=2**-6)  # rounded once


def test_speed_of_a_layer():
    """Prints TFLOP/s of forward and backward; says nothing about what they should be."""
    from megatron_fp8rl.trainer.model.linear_te import te_linear

    num_tokens, num_rows, num_columns = 8192, 8192, 4096
    for name in ("blockwise pow2", "tensorwise", "delayed e5m2", "bf16"):
        recipe = make_recipe(RECIPES[name])
        x = torch.randn(num_tokens, num_columns, device="cuda").bfloat16().requires_grad_()
        weight = torch.nn.Parameter(torch.randn(num_rows, num_columns, device="cuda").bfloat16() / 64)
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight, dtype=torch.float32), False
        grad = torch.randn(num_tokens, num_rows, device="cuda").bfloat16()
        history, cache = AmaxHistory(2, 1, torch.device("cuda")), WeightCache()

        def run():
            y = te_linear(x, [weight], recipe, history=history, cache=cache)
            torch.autograd.grad(y, [x, weight], grad)

        run()
        finish_step([history], lambda flat: None)
        clear_weight_caches()
        for _ in range(3):
            run()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(10):
            run()
        end.record()
        torch.cuda.synchronize()
        ms = start.elapsed_time(end) / 10
        print(
            f"\nTE speed {name:16s} {num_tokens}x{num_columns}x{num_rows}: {ms:.2f} ms, "
            f"{6 * num_tokens * num_rows * num_columns / ms / 1e9:.0f} TFLOP/s"
        )
