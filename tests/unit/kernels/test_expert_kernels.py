"""Data movement of grouped experts: torch's definition against loops over experts, and Triton's interpreter against it.

The interpreter has to be chosen before Triton is imported, and other tests import it without; so this file runs itself
in a process of its own.
"""

import itertools

import numpy
import pytest
import torch

from megatron_fp8rl.kernels import blockwise, fused_moe, fused_moe_torch
from megatron_fp8rl.kernels.fused_moe import expert_permutation
from megatron_fp8rl.kernels.types import ExpertPermutation, Quantized
from megatron_fp8rl.precision.formats import BLOCKWISE_POW2, blockwise_format
from tests.helpers import moved_bytes
from tests.helpers.interpreter import INTERPRETED, assert_passes_interpreted, in_interpreter
from tests.helpers.operands import assert_equal

in_torch = pytest.mark.skipif(INTERPRETED, reason="runs without the interpreter")

COUNTS = {
    "ragged": [3, 130, 0, 128, 255, 1],
    "none at both ends": [0, 0, 77, 0],
    "one has all": [0, 300, 0, 0, 0],
    "all full": [128, 256, 128],
    "one expert": [200],
    "no token": [0, 0, 0],
}


CASES = {"ragged, fp32 scales": (COUNTS["ragged"], "fp32"), **{name: (c, "pow2") for name, c in COUNTS.items()}}
each_case = pytest.mark.parametrize("counts, scales", CASES.values(), ids=CASES)


@pytest.mark.slow
@in_torch
def test_in_the_interpreter():
    assert_passes_interpreted(__file__, deadline_s=500.0)


def layout_of(counts: list[int], *, exact: bool, dropped: int = 0) -> ExpertPermutation:
    return expert_permutation(torch.tensor(counts), sum(counts) + dropped, counts if exact else None)


def random_rows(num_rows: int, num_columns: int, seed: int = 0) -> torch.Tensor:
    """BF16 numbers over many orders of magnitude, with blocks of zeros along rows and along columns."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, num_columns, generator=generator)
    x *= torch.exp2(torch.randint(-12, 7, x.shape, generator=generator).float())
    x[1::5, :128] = 0
    x[:, 2::50] = 0
    x[:2, -3:] = torch.tensor([448.0, 17.0, -19.0])
    return x.bfloat16()


def random_gates(num_rows: int, width: int) -> torch.Tensor:
    """[num_rows, 2 width] whose silu is no subnormal number, which the interpreter does not convert to BF16."""
    return random_rows(max(2, num_rows), 2 * width)[:num_rows].clamp(-60, 60)


def width_of(scales: str) -> int:
    """Two tiles in one of the cases; the interpreter takes a fifth of a second for each."""
    return 256 if scales == "fp32" else 128


def expected_padded(x: torch.Tensor, counts: list[int], num_rows: int) -> torch.Tensor:
    """Padding by a loop over experts."""
    out, first, row = torch.zeros(num_rows, x.shape[1], dtype=x.dtype), 0, 0
    for count in counts:
        out[row : row + count] = x[first : first + count]
        first += count
        row += -(-count // 128) * 128
    return out


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_layout(counts, exact):
    layout = layout_of(counts, exact=exact, dropped=2)
    padded = [-(-count // 128) * 128 for count in counts]
    assert layout.num_rows >= sum(padded) and layout.num_rows % 128 == 0
    assert layout.padded_counts.tolist() == padded and layout.offsets.tolist() == [0, *torch.tensor(padded).cumsum(0)]
    assert layout.host_counts == (tuple(padded) if exact else None)
    experts, rows = [-1] * layout.num_rows, [-1] * layout.num_rows
    positions, token, row = [-1] * layout.num_tokens, 0, 0
    for expert, count in enumerate(counts):
        for i in range(count):
            experts[row + i], rows[row + i], positions[token + i] = expert, token + i, row + i
        token, row = token + count, row + padded[expert]
    assert layout.experts.tolist() == experts and layout.rows.tolist() == rows
    assert layout.positions.tolist() == positions
    for tensor in (layout.offsets, layout.padded_counts, layout.experts, layout.rows, layout.positions):
        assert tensor.dtype == torch.int32


def test_no_counts_need_more_rows_than_the_bound():
    for counts in ([1] * 8, [129, 1, 1], [1, 0, 0, 0], [128] * 3, [0, 0]):
        needed = sum(-(-count // 128) * 128 for count in counts)
        assert needed <= fused_moe.max_rows(sum(counts), len(counts))
    assert fused_moe.max_rows(8, 8) == 1024 and fused_moe.max_rows(1, 128) == 128


@pytest.mark.parametrize("scales", ["pow2", "fp32"])
def test_columns_are_the_rows_of_each_experts_transpose(scales):
    counts = COUNTS["ragged"]
    layout, x = layout_of(counts, exact=True), random_rows(sum(counts), 256)
    actual = fused_moe.permute_quantize(x, layout, blockwise_format(scales), columns=True, bf16=True)
    padded = expected_padded(x, counts, layout.num_rows)
    assert torch.equal(actual.bf16, padded)
    data, scale = blockwise.quantize_activation(padded, scales)
    assert torch.equal(actual.rows.view(torch.uint8), data.view(torch.uint8)) and torch.equal(actual.row_scales, scale)
    assert actual.row_scales.stride() == (1, layout.num_rows)
    offsets = layout.offsets.tolist()
    for begin, end in itertools.pairwise(offsets):
        data, scale = blockwise.quantize_activation(padded[begin:end].t(), scales)
        mine = slice(begin // 128, end // 128)
        pieces = actual.columns.view(torch.uint8)[mine].reshape(-1, 256, 8, 16)
        for feature in range(256):
            line = pieces[:, feature, [piece ^ (feature % 8) for piece in range(8)]]
            assert torch.equal(line.flatten(), data.view(torch.uint8)[feature])
        assert torch.equal(actual.column_scales[mine].t(), scale)


@pytest.mark.parametrize("scales", ["pow2", "fp32"])
def test_columns_of_one_expert_may_be_a_matrix(scales):
    layout, x = expert_permutation(torch.tensor([300]), 300, [300], in_matrix=True), random_rows(300, 256)
    actual = fused_moe.permute_quantize(x, layout, blockwise_format(scales), columns=True)
    data, scale = blockwise.quantize_activation(expected_padded(x, [300], 384).t(), scales)
    assert torch.equal(actual.columns.view(torch.uint8), data.view(torch.uint8)) and actual.columns.is_contiguous()
    assert torch.equal(actual.column_scales, scale) and actual.column_scales.stride() == (1, 256)
    with pytest.raises(ValueError, match="in_matrix needs 1 expert, but tokens_per_expert has 2 experts"):
        expert_permutation(torch.tensor([300, 5]), 305, [300, 5], in_matrix=True)


@in_interpreter
@pytest.mark.parametrize("scales", ["pow2", "fp32"])
def test_interpreted_matrices(scales, monkeypatch):
    use_the_interpreters_exponential(monkeypatch)
    layout = expert_permutation(torch.tensor([200]), 200, [200], in_matrix=True)
    x, h = random_rows(200, 256), random_gates(256, 128)
    wanted = dict(rows=True, columns=True, bf16=False)
    actual = fused_moe.permute_quantize(x, layout, blockwise_format(scales), **wanted)
    assert_equal_matrices(actual, fused_moe_torch.permute_quantize(x, layout, scales, probs=None, **wanted))
    wanted |= dict(activation_columns=True, activation_bf16=False, probs=None)
    dy = random_rows(256, 128, seed=1)
    actual = fused_moe.swiglu_backward_quantize(dy, h, layout, blockwise_format(scales), **wanted)
    expected = fused_moe_torch.swiglu_backward_quantize(dy, h, layout, scales, **wanted)
    assert_equal_matrices(actual.dh, expected.dh)
    assert_equal_matrices(actual.activation, expected.activation)


def assert_equal_matrices(actual: Quantized, expected: Quantized) -> None:
    assert torch.equal(actual.columns.view(torch.uint8), expected.columns.view(torch.uint8))
    assert torch.equal(actual.column_scales, expected.column_scales)
    for ours, theirs in ((actual.columns, expected.columns), (actual.column_scales, expected.column_scales)):
        assert ours.shape == theirs.shape and ours.stride() == theirs.stride()


@in_interpreter
@each_case
def test_interpreted_permutation(counts, scales):
    layout = layout_of(counts, exact=scales == "fp32", dropped=1)
    x = random_rows(max(2, layout.num_tokens), width_of(scales))[: layout.num_tokens]
    wanted = dict(rows=True, columns=True, bf16=True)
    actual = fused_moe.permute_quantize(x, layout, blockwise_format(scales), **wanted)
    expected = fused_moe_torch.permute_quantize(x, layout, scales, probs=None, **wanted)
    assert_equal(actual, expected, layout)
    weights = torch.rand(layout.num_tokens)
    actual = fused_moe.permute_quantize(x, layout, blockwise_format(scales), probs=weights, **wanted)
    assert_equal(actual, fused_moe_torch.permute_quantize(x, layout, scales, probs=weights, **wanted), layout)


@in_interpreter
@each_case
def test_interpreted_swiglu(counts, scales, monkeypatch):
    use_the_interpreters_exponential(monkeypatch)
    layout = layout_of(counts, exact=False)
    h = random_gates(layout.num_rows, width_of(scales))
    h[layout.experts < 0] = torch.nan
    wanted = dict(rows=True, columns=True, bf16=True)
    actual = fused_moe.swiglu_quantize(h, layout, blockwise_format(scales), **wanted)
    assert_equal(actual, fused_moe_torch.swiglu_quantize(h, layout, scales, **wanted), layout)


@in_interpreter
@each_case
def test_interpreted_swiglu_backward(counts, scales, monkeypatch):
    weighted = len(counts) != 1
    use_the_interpreters_exponential(monkeypatch)
    layout = layout_of(counts, exact=False, dropped=1)
    h = random_gates(layout.num_rows, width_of(scales))
    dy = random_rows(max(2, layout.num_rows), width_of(scales), seed=1)[: layout.num_rows]
    for x in (h, dy):
        x[layout.experts < 0] = torch.nan
    wanted = dict(rows=True, columns=True, bf16=True, activation_columns=True, activation_bf16=True)
    wanted["probs"] = torch.rand(layout.num_tokens) if weighted else None
    actual = fused_moe.swiglu_backward_quantize(dy, h.clone(), layout, blockwise_format(scales), **wanted)
    expected = fused_moe_torch.swiglu_backward_quantize(dy, h, layout, scales, **wanted)
    assert_equal(actual.dh, expected.dh, layout)
    assert_equal(actual.activation, expected.activation, layout)
    assert (actual.dprobs is None) == (expected.dprobs is None) == (not weighted)
    if weighted:
        largest = expected.dprobs.abs().max()
        torch.testing.assert_close(actual.dprobs, expected.dprobs, rtol=1e-5, atol=float(largest) * 1e-6)


@in_interpreter
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_interpreted_unpermutation(counts, weighted):
    layout = layout_of(counts, exact=False, dropped=3)
    y = random_rows(max(2, layout.num_rows), 640)[: layout.num_rows]
    weights = torch.rand(layout.num_tokens) if weighted else None
    actual = fused_moe.unpermute(y, layout, weights)
    assert torch.equal(actual, fused_moe_torch.unpermute(y, layout, weights))
    assert not actual[sum(counts) :].any()


@in_interpreter
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_makes_its_blocks_nan(bad):
    counts = [130, 5]
    layout, x = layout_of(counts, exact=True), torch.ones(135, 256, dtype=torch.bfloat16)
    x[129, 200] = bad
    actual = fused_moe.permute_quantize(x, layout, BLOCKWISE_POW2, columns=True)
    assert actual.row_scales.isnan().nonzero().tolist() == [[129, 1]]
    assert actual.column_scales.isnan().nonzero().tolist() == [[1, 200]]
    expected = fused_moe_torch.permute_quantize(x, layout, "pow2", rows=True, columns=True, bf16=False, probs=None)
    assert_equal(actual, expected, layout)


@in_interpreter
@pytest.mark.parametrize("scales", ["pow2", "fp32"])
def test_weights_are_those_of_the_definition(scales):
    from megatron_fp8rl.kernels.triton.quantize import quantize_weights

    weights = random_rows(2 * 256, 384, seed=3).view(2, 256, 384)
    weights[1, :128, 128:256] = 0
    weights[0, 200, 130] = torch.nan
    actual, found_scale = quantize_weights(weights, scales)
    for index, weight in enumerate(weights):
        data, scale = blockwise.quantize_weight(weight, scales)
        torch.testing.assert_close(found_scale[index], scale, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(actual[index].float(), data.float(), rtol=0, atol=0, equal_nan=True)
    with pytest.raises(ValueError, match=r"multiples of 128, not torch.bfloat16 \[2, 256, 380\]"):
        quantize_weights(weights[:, :, :380].contiguous(), scales)


def use_the_interpreters_exponential(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter computes with numpy, whose exp of contiguous memory differs from torch's in the last bit."""
    monkeypatch.setattr(torch, "exp", lambda x: torch.from_numpy(numpy.exp(x.contiguous().numpy())))


@in_torch
def test_swiglu_and_its_gradient_are_those_of_autograd():
    counts = [100, 28]
    layout = layout_of(counts, exact=True)
    h = torch.randn(256, 512).bfloat16()
    dout, weights = torch.randn(128, 256), torch.rand(128)
    exact = h.double().requires_grad_()
    p = weights.double().requires_grad_()
    gate, up = exact.chunk(2, dim=1)
    activation = torch.nn.functional.silu(gate) * up
    (activation[layout.positions.long()] * p[:, None] * dout.double()).sum().backward()
    dy = torch.zeros(256, 256)
    dy[layout.positions.long()] = dout
    actual = fused_moe.swiglu_backward_quantize(
        dy.bfloat16(), h.clone(), layout, BLOCKWISE_POW2, bf16=True, activation_bf16=True, probs=weights
    )
    torch.testing.assert_close(actual.dh.bf16.double(), exact.grad, rtol=0.02, atol=0.02)
    torch.testing.assert_close(actual.dprobs.double(), p.grad, rtol=0.02, atol=0.3)
    expected = activation.detach()[layout.positions.long()] * weights[:, None]
    found_activation = actual.activation.bf16[layout.positions.long()].double()
    torch.testing.assert_close(found_activation, expected, rtol=0.02, atol=1e-3)
    forward = fused_moe.swiglu_quantize(h, layout, BLOCKWISE_POW2, bf16=True).bf16
    padding = layout.experts < 0
    assert not forward[padding].any() and not actual.dh.bf16[padding].any()


@in_torch
def test_what_does_not_fit_is_named():
    layout = layout_of([5, 3], exact=True)
    with pytest.raises(ValueError, match=r"x_TK must be contiguous bfloat16 \[8, a multiple of 128\], not float32"):
        fused_moe.permute_quantize(torch.zeros(8, 128), layout, BLOCKWISE_POW2)
    with pytest.raises(ValueError, match=r"h_P2F .* \[256, a multiple of 256\]"):
        fused_moe.swiglu_quantize(torch.zeros(256, 128).bfloat16(), layout, BLOCKWISE_POW2)
    with pytest.raises(ValueError, match="128 features, but h_P2F has 512"):
        fused_moe.swiglu_backward_quantize(
            torch.zeros(256, 128).bfloat16(), torch.zeros(256, 512).bfloat16(), layout, BLOCKWISE_POW2
        )
    with pytest.raises(ValueError, match=r"probs must be float32 \[8\]"):
        fused_moe.unpermute(torch.zeros(256, 128).bfloat16(), layout, torch.ones(7))
    with pytest.raises(ValueError, match="counts has 1 experts"):
        expert_permutation(torch.tensor([5, 3]), 8, [8])
    with pytest.raises(ValueError, match="tokens_per_expert"):
        expert_permutation(torch.tensor([5.0, 3.0]), 8)


@in_torch
def test_bytes_are_those_of_the_tensors():
    counts = [128, 256]
    layout, x = layout_of(counts, exact=True), random_rows(384, 512)

    def size(*tensors: torch.Tensor | None) -> int:
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    def size_of(q: Quantized) -> int:
        return size(q.rows, q.row_scales, q.columns, q.column_scales, q.bf16)

    wanted = dict(rows=True, columns=True, bf16=True)
    actual = fused_moe.permute_quantize(x, layout, BLOCKWISE_POW2, **wanted)
    moved = moved_bytes.permute_quantize_bytes(384, 384, 512, **wanted)
    assert moved == size(x, layout.rows) + size_of(actual)
    dy = x[:, :256].contiguous()
    gradients = fused_moe.swiglu_backward_quantize(dy, x, layout, BLOCKWISE_POW2, activation_columns=True, **wanted)
    moved = moved_bytes.swiglu_backward_bytes(384, 384, 256, activation_columns=True, **wanted)
    assert moved == size(dy, x, layout.rows) + size_of(gradients.dh) + size_of(gradients.activation)
    out = fused_moe.unpermute(x, layout, torch.ones(384))
    assert moved_bytes.unpermute_bytes(384, 512, probs=True) == size(x, out, layout.positions, torch.ones(384))
