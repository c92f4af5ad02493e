"""FP8 recipes: all three products against operands quantized block by block, and what delayed scaling remembers."""

import pytest
import torch

from megatron_fp8rl.config import PrecisionConfig
from megatron_fp8rl.kernels import blockwise
from megatron_fp8rl.precision.recipes import (
    GRAD,
    INPUT,
    WEIGHT,
    AmaxHistory,
    Tensorwise,
    finish_step,
    make_recipe,
    quantized_linear,
)
from tests.tolerances import BF16_ROUNDING, FLOAT32_ACCUMULATION

SPLITS = (130, 0, 67)  # tokens of three experts: more than a block, none, less than a block
K, N = 200, 150  # neither is a multiple of a block
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def _inputs(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, size=1.0):
        spread = torch.exp2(torch.randint(-6, 3, shape, generator=generator).float())
        return (torch.randn(shape, generator=generator) * spread * size).to(dtype)

    x = draw(sum(SPLITS), K).requires_grad_()
    weights = [draw(N, K, size=0.02).requires_grad_() for _ in SPLITS]
    return x, weights, draw(sum(SPLITS), N, size=1e-5)


def _through_bytes(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (x.float() / scale).to(dtype).double() * scale.double()


def _blocks_of_rows(x: torch.Tensor, scales: str, grad: str = "e4m3", size: int = 128) -> torch.Tensor:
    """Each row in blocks, one at a time, through real FP8 bytes; float64."""
    out = torch.empty(x.shape, dtype=torch.float64)
    largest = {"e4m3": 448.0, "e5m2": 57344.0}[grad]
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], size):
            block = x[row, start : start + size].float()
            scale = block.abs().max() / largest
            if scales == "pow2":
                scale = torch.exp2(torch.ceil(torch.log2(scale.double()))).float()
            out[row, start : start + size] = _through_bytes(block, scale, DTYPES[grad])
    return out


def _split(x: torch.Tensor):
    return x.split(SPLITS)


@pytest.mark.parametrize("gradients", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scales", ["pow2", "fp32"])
def test_blockwise_products_against_blocks_one_by_one(scales, gradients):
    x, weights, grad = _inputs()
    recipe = make_recipe(PrecisionConfig(trainer="blockwise", scales=scales, gradients=gradients))
    y = quantized_linear(x, weights, recipe, splits=SPLITS)
    y.backward(grad)

    restored = [blockwise.dequantize_weight(*blockwise.quantize_weight(w.detach(), scales)).double() for w in weights]
    rows_x, rows_g = _blocks_of_rows(x.detach(), scales), _blocks_of_rows(grad, scales, gradients)
    _assert_products(y, [a @ w.T for a, w in zip(_split(rows_x), restored)], K)
    _assert_products(x.grad, [g @ w for g, w in zip(_split(rows_g), restored)], N)
    for weight, gx, g in zip(weights, _split(x.detach()), _split(grad)):
        # Blocks of 128 tokens, counted from the expert's first one: rows of the transposed piece.
        columns_x = _blocks_of_rows(gx.T.contiguous(), scales).T
        columns_g = _blocks_of_rows(g.T.contiguous(), scales, gradients).T
        _assert_products(weight.grad, [columns_g.T @ columns_x], max(SPLITS))


@pytest.mark.parametrize("gradients", ["e4m3", "e5m2"])
def test_mxfp8_products_against_blocks_one_by_one(gradients):
    """Every operand in blocks of 32 along the axis that its product sums over; W has two sets of values."""
    x, weights, grad = _inputs(seed=4)
    y = quantized_linear(x, weights, make_recipe(PrecisionConfig(trainer="mxfp8", gradients=gradients)), splits=SPLITS)
    y.backward(grad)

    def along_columns(matrix: torch.Tensor, fmt: str = "e4m3") -> torch.Tensor:
        return _blocks_of_rows(matrix.detach(), "pow2", fmt, 32)

    def along_rows(matrix: torch.Tensor, fmt: str = "e4m3") -> torch.Tensor:
        return along_columns(matrix.T.contiguous(), fmt).T

    columns, rows = [along_columns(w) for w in weights], [along_rows(w) for w in weights]
    assert not torch.equal(columns[0], rows[0])
    _assert_products(y, [a @ w.T for a, w in zip(_split(along_columns(x)), columns)], K)
    _assert_products(x.grad, [g @ w for g, w in zip(_split(along_columns(grad, gradients)), rows)], N)
    for weight, part, g in zip(weights, _split(x.detach()), _split(grad)):
        _assert_products(weight.grad, [along_rows(g, gradients).T @ along_rows(part)], max(SPLITS))


def test_shards_of_whole_tiles_multiply_mxfp8_as_the_whole():
    """Tensor-parallel ranks divide rows or columns of W; blocks of both of its copies lie within a shard."""
    generator, recipe = torch.Generator().manual_seed(5), make_recipe(PrecisionConfig(trainer="mxfp8"))
    x, weight, grad = (torch.randn(*shape, generator=generator) for shape in ((64, 192), (96, 192), (64, 96)))

    def products(x, weight, grad):
        x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = quantized_linear(x, [weight], recipe)
        return y, *torch.autograd.grad(y, [x, weight], grad)

    y, dx, dw = products(x, weight, grad)
    rows = [products(x, w, g) for w, g in zip(weight.split([64, 32]), grad.split([64, 32], 1))]
    columns = [products(part, w, grad) for part, w in zip(x.split(96, 1), weight.split(96, 1))]
    close = dict(rtol=0.0, atol=1e-3)  # products of blocks are added in another order
    for index, whole in enumerate((y, dx, dw)):
        parts = [shard[index] for shard in rows]
        torch.testing.assert_close(sum(parts) if index == 1 else torch.cat(parts, int(index == 0)), whole, **close)
        parts = [shard[index] for shard in columns]
        torch.testing.assert_close(sum(parts) if index == 0 else torch.cat(parts, 1), whole, **close)


def _assert_products(actual: torch.Tensor, expected: list[torch.Tensor], num_terms: int) -> None:
    expected = torch.cat(expected)
    size = expected.abs().max().item() * num_terms**0.5
    torch.testing.assert_close(actual.double(), expected, rtol=0.0, atol=FLOAT32_ACCUMULATION["atol"] * size)


@pytest.mark.parametrize("gradients", ["e4m3", "e5m2"])
def test_tensorwise_products_against_whole_tensors(gradients):
    x, weights, grad = _inputs(seed=1)
    recipe = make_recipe(PrecisionConfig(trainer="tensorwise", gradients=gradients))
    y = quantized_linear(x, weights, recipe, splits=SPLITS)
    y.backward(grad)

    def whole(tensor: torch.Tensor, fmt: str = "e4m3") -> torch.Tensor:
        if not tensor.numel():
            return tensor.double()
        scale = {"e4m3": 448.0, "e5m2": 57344.0}[fmt] / tensor.detach().abs().max()
        return (tensor.detach() * scale).to(DTYPES[fmt]).double() / scale.double()

    xs, gs = [whole(p) for p in _split(x)], [whole(p, gradients) for p in _split(grad)]
    ws = [whole(w) for w in weights]
    _assert_products(y, [a @ w.T for a, w in zip(xs, ws)], K)
    _assert_products(x.grad, [g @ w for g, w in zip(gs, ws)], N)
    for weight, a, g in zip(weights, xs, gs):
        _assert_products(weight.grad, [g.T @ a], max(SPLITS))


@pytest.mark.parametrize("fmt", [blockwise.E4M3, blockwise.E5M2], ids=["e4m3", "e5m2"])
def test_a_tensorwise_scale_is_the_quotient_rounded_once(fmt):
    """For every BF16 mantissa. A float64 quotient of float32 numbers becomes the float32 quotient when rounded."""
    amax = (torch.arange(0x3F80, 0x4000, dtype=torch.int32) << 16).view(torch.float32)
    found = Tensorwise.scale(torch.cat([amax, torch.zeros(1)]), fmt)
    assert torch.equal(found[:-1], (fmt.max / amax.double()).float()) and found[-1] == 1
    assert not torch.equal(found[:-1], amax.reciprocal() * fmt.max), "what torch makes of a number over a tensor"


@pytest.mark.parametrize("trainer", ["bf16", "blockwise", "mxfp8", "tensorwise", "delayed"])
def test_bf16_results_are_float32_results_rounded_once(trainer):
    x, weights, grad = _inputs(torch.bfloat16, seed=2)
    recipe = make_recipe(PrecisionConfig(trainer=trainer))
    wide = [t.detach().float().requires_grad_() for t in (x, *weights)]
    histories = [AmaxHistory(2, len(SPLITS)) for _ in range(2)]
    y = quantized_linear(x, weights, recipe, splits=SPLITS, history=histories[0])
    y.backward(grad)
    y_wide = quantized_linear(wide[0], wide[1:], recipe, splits=SPLITS, history=histories[1])
    y_wide.backward(grad.float())
    for narrow, exact in [(y, y_wide), *((a.grad, b.grad) for a, b in zip((x, *weights), wide))]:
        size = exact.abs().max().item() * 15
        assert narrow.dtype == torch.bfloat16
        torch.testing.assert_close(narrow.float(), exact, rtol=BF16_ROUNDING["rtol"], atol=BF16_ROUNDING["atol"] * size)


@pytest.mark.parametrize("trainer", ["blockwise", "mxfp8", "tensorwise", "delayed"])
def test_gradients_point_where_unquantized_ones_do(trainer):
    x, weights, grad = _inputs(seed=3)
    plain = [t.detach().clone().requires_grad_() for t in (x, *weights)]
    recipe = make_recipe(PrecisionConfig(trainer=trainer))
    quantized_linear(x, weights, recipe, splits=SPLITS, history=AmaxHistory(2, 3)).backward(grad)
    quantized_linear(plain[0], plain[1:], None, splits=SPLITS).backward(grad)
    for quantized, exact in zip((x, *weights), plain):
        if exact.grad.any():
            cosine = torch.cosine_similarity(quantized.grad.flatten(), exact.grad.flatten(), dim=0)
            assert 0.995 < cosine < 1.0, "E4M3 rounds by up to 6 %, about 2.6 % in the mean square"
        else:
            assert not quantized.grad.any()


def test_without_a_recipe_gradients_are_those_of_autograd():
    x, weights, _ = _inputs(seed=4)
    double = [t.detach()[..., :20].double().requires_grad_() for t in (x, *weights)]
    assert torch.autograd.gradcheck(
        lambda x, *w: quantized_linear(x, w, None, splits=SPLITS).sum(dim=1), (double[0], *double[1:]), fast_mode=True
    )


def _delayed(experts=1):
    return make_recipe(PrecisionConfig(trainer="delayed")), AmaxHistory(3, experts)


def _train(recipe, history, x_size, grad_size=1.0):
    x = torch.full((4, 8), 0.5)
    x[0, 0] = x_size
    x.requires_grad_()
    weight = torch.full((8, 8), 0.25).requires_grad_()
    y = quantized_linear(x, (weight,), recipe, history=history)
    grad = torch.full_like(y, 0.1)
    grad[0, 0] = grad_size
    y.backward(grad)
    return y


def test_history_keeps_the_largest_of_a_step_and_moves_once_per_step():
    recipe, history = _delayed()
    for size in (2.0, 8.0, 4.0):  # three microbatches of one step
        _train(recipe, history, size, grad_size=size / 16)
    assert not history.history.any(), "nothing moves within a step"
    finish_step([history], lambda flat: None)
    assert history.history[:, INPUT, 0].tolist() == [8.0, 0.0, 0.0]
    assert history.history[:, WEIGHT, 0].tolist() == [0.25, 0.0, 0.0]
    assert history.history[:, GRAD, 0].tolist() == [0.5, 0.0, 0.0]
    _train(recipe, history, 3.0)
    finish_step([history], lambda flat: None)
    assert history.history[:, INPUT, 0].tolist() == [3.0, 8.0, 0.0]
    for _ in range(2):
        _train(recipe, history, 1.0)
        finish_step([history], lambda flat: None)
    assert history.history[:, INPUT, 0].tolist() == [1.0, 1.0, 3.0], "entries older than the length are forgotten"


def test_the_scale_comes_from_finished_steps_and_larger_values_saturate():
    recipe, history = _delayed()
    amax = 8.0  # the largest of both steps
    for size in (8.0, 2.0):
        _train(recipe, history, size)
        finish_step([history], lambda flat: None)
    x = torch.tensor([[100.0, 1.0, 0.3, 0.0]])
    y = quantized_linear(x, (torch.eye(4),), recipe, history=AmaxHistory(1, 1))  # its own magnitude: nothing saturates
    assert y[0, 0] == 100.0
    with torch.no_grad():
        saturated = quantized_linear(x, (torch.full((4, 4), 0.25).fill_diagonal_(0.25),), recipe, history=history)
    scale = 448.0 / amax
    values = (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() / scale
    torch.testing.assert_close(saturated.double(), (0.25 * values.sum()).expand(1, 4), rtol=1e-6, atol=0)
    assert values[0, 0] == amax


def test_passes_without_gradients_leave_no_trace():
    recipe, history = _delayed()
    _train(recipe, history, 2.0)
    before = history.current.clone()
    with torch.no_grad():
        quantized_linear(torch.full((4, 8), 1000.0), (torch.full((8, 8), 50.0),), recipe, history=history)
    assert torch.equal(history.current, before) and before[INPUT, 0] == 2.0


def test_each_expert_has_its_own_history():
    recipe, history = _delayed(experts=3)
    x, weights, grad = _inputs(seed=5)
    quantized_linear(x, weights, recipe, splits=SPLITS, history=history).backward(grad)
    tensors = (_split(x), weights, _split(grad))
    expected = [[p.detach().abs().max() if p.numel() else 0.0 for p in parts] for parts in tensors]
    assert history.current.tolist() == torch.tensor(expected).tolist()


def test_maxima_of_all_ranks_enter_the_history():
    _, history = _delayed(experts=2)
    history.record(INPUT, torch.tensor([1.0, 5.0]))
    finish_step([history], lambda flat: torch.maximum(flat, torch.full_like(flat, 3.0), out=flat))
    assert history.history[0].tolist() == [[3.0, 5.0], [3.0, 3.0], [3.0, 3.0]]


def test_history_stays_float32_and_is_saved():
    _, history = _delayed()
    history.history[0] = 1.0001
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), history).bfloat16()
    assert model[0].weight.dtype == torch.bfloat16
    assert history.history.dtype == torch.float32 and history.history[0, 0, 0] == torch.tensor(1.0001)
    assert list(history.state_dict()) == ["history"]
