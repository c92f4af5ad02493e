"""Tokens of experts, rows that travel in FP8, and scores of a router, against loops and definitions in torch."""

import pytest
import torch

from megatron_fp8rl.config import RouterConfig
from megatron_fp8rl.kernels import fused_moe_torch
from megatron_fp8rl.kernels.backend import INTERPRETED
from megatron_fp8rl.kernels.blockwise import dequantize_activation, quantize_activation
from megatron_fp8rl.kernels.expert_slots import Choice, sum_rows
from megatron_fp8rl.kernels.fused_moe import pack, permute_quantize
from megatron_fp8rl.kernels.routing import choose_experts, routed_scores
from megatron_fp8rl.kernels.types import BLOCK, Packed
from megatron_fp8rl.precision.formats import BLOCKWISE_POW2
from tests.helpers.interpreter import assert_passes_interpreted, starts_interpreter

CASES = [(40, 5, 3, 0.5), (7, 64, 8, 0.1), (1, 1, 1, 1.0), (300, 3, 2, 0.9), (20, 6, 2, 0.0)]


def scores_of(tokens: int, experts: int, most: int, share: float) -> torch.Tensor:
    """Weights of at most ``most`` of the experts for each token, among them one of exactly 0."""
    draw = torch.Generator().manual_seed(tokens)
    wanted = torch.rand(tokens, experts, generator=draw) < share
    wanted &= wanted.cumsum(1) <= most
    scores = torch.rand(tokens, experts, generator=draw)
    scores[0, 0] = 0.0
    return torch.where(wanted, scores, -1.0)


@pytest.mark.parametrize("counts_are_on_the_host", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_rows_are_sorted_by_expert_and_every_token_knows_its_own(case, counts_are_on_the_host):
    scores, most = scores_of(*case), case[2]
    slots = Choice.of(scores, None if counts_are_on_the_host else int((scores >= 0).sum())).slots(most)
    assert (slots.layout.host_counts is not None) == counts_are_on_the_host
    assert (slots.layout.experts[slots.layout.offsets[-1] :] == -1).all()
    expected = [(t, e) for e in range(case[1]) for t in range(case[0]) if scores[t, e] >= 0]
    layout = slots.layout
    assert layout.num_tokens == len(expected) and layout.num_sources == case[0]
    starts = layout.offsets.tolist()
    for e in range(case[1]):
        tokens = [t for t, own in expected if own == e]
        assert layout.sources[starts[e] : starts[e] + len(tokens)].tolist() == tokens
        assert set(layout.sources[starts[e] + len(tokens) : starts[e + 1]].tolist()) <= {-1}
        assert starts[e + 1] - starts[e] == -(-len(tokens) // BLOCK) * BLOCK
    assert slots.probs_R.tolist() == [scores[t, e].item() for t, e in expected]
    for t, rows in enumerate(slots.rows_TK.tolist()):
        own = [expected.index((t, e)) for e in range(case[1]) if scores[t, e] >= 0]
        assert rows == own + [-1] * (len(rows) - len(own))


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_weights_return_to_the_scores_of_their_tokens(case):
    scores = scores_of(*case).requires_grad_()
    probs = Choice.of(scores).slots(case[2]).probs_R
    own = torch.arange(1.0, 1 + len(probs))
    (probs * own).sum().backward()
    expected = torch.zeros_like(scores)
    expected.t()[scores.detach().t() >= 0] = own
    assert torch.equal(scores.grad, expected)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_sums_are_rounded_once(case, weighted):
    scores = scores_of(*case)
    slots = Choice.of(scores).slots(case[2])
    y = torch.randn(len(slots.probs_R), 200).bfloat16()
    got = sum_rows(y, slots.rows_TK, slots.probs_R if weighted else None)
    wide = torch.zeros(case[0], 200, dtype=torch.float64)
    for t, rows in enumerate(slots.rows_TK.tolist()):
        for row in (row for row in rows if row >= 0):
            wide[t] += y[row].double() * (slots.probs_R[row].double() if weighted else 1.0)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), wide, rtol=2**-8, atol=1e-6)


def test_rows_that_are_not_bf16_are_refused():
    slots = Choice.of(scores_of(4, 2, 2, 1.0)).slots(2)
    with pytest.raises(ValueError, match="y_RH must be contiguous bfloat16, not torch.float32"):
        sum_rows(torch.zeros(8, 16), slots.rows_TK)


@starts_interpreter
def test_in_the_interpreter():
    assert_passes_interpreted(__file__, deadline_s=400.0)


def rows(num_tokens: int, num_features: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(num_features)
    x = torch.randn(num_tokens, num_features, generator=draw) * torch.exp(
        8 * torch.randn(num_tokens, 1, generator=draw)
    )
    x[0] = 0.0
    x[-1, :BLOCK] = 224.0  # the largest number of its block is 448 times half of another scale
    x[1, 5] = 2.0**-120
    return x.bfloat16()


def layout_of(num_tokens: int):
    scores = torch.rand(num_tokens, 3, generator=torch.Generator().manual_seed(1))
    return Choice.of(torch.where(scores < 0.7, scores, -1.0)).slots(3).layout


@pytest.mark.parametrize(("num_tokens", "num_features"), [(40, 256), (3, 128), (17, 2304)])
def test_rows_are_their_bytes_and_their_exponents(num_tokens, num_features):
    x = rows(num_tokens, num_features)
    packed, (data, scale) = pack(x), quantize_activation(x, "pow2")
    assert packed.data.shape == (num_tokens, Packed.width(num_features)) and packed.data.shape[1] % 16 == 0
    assert torch.equal(packed.data[:, :num_features], data.view(torch.uint8))
    exponents = packed.data[:, num_features : num_features + num_features // BLOCK]
    assert torch.equal(2.0 ** (exponents.double() - 127), scale.double())
    assert torch.equal(fused_moe_torch.unpacked(packed).float(), dequantize_activation(data, scale))


def test_what_is_not_finite_stays_so():
    x = rows(4, 256)
    x[1, 3], x[2, 200] = float("nan"), float("inf")
    bad = fused_moe_torch.unpacked(pack(x)).isnan()
    assert bad[1, :BLOCK].all() and bad[2, BLOCK:].all() and bad.sum() == 2 * BLOCK


@pytest.mark.parametrize("columns", [False, True])
def test_operands_have_the_values_of_rows_that_did_not_travel(columns):
    x = rows(150, 256)
    layout, packed = layout_of(150), pack(x)
    ours = permute_quantize(packed, layout, BLOCKWISE_POW2, columns=columns)
    theirs = permute_quantize(x, layout, BLOCKWISE_POW2, columns=columns)
    real = layout.rows >= 0
    values = [dequantize_activation(item.rows, item.row_scales)[real] for item in (ours, theirs)]
    assert torch.equal(*values)
    if columns:
        again = permute_quantize(fused_moe_torch.unpacked(packed), layout, BLOCKWISE_POW2, columns=True)
        assert torch.equal(ours.columns.view(torch.uint8), again.columns.view(torch.uint8))
        assert torch.equal(ours.column_scales, again.column_scales)
    if INTERPRETED:
        reference = fused_moe_torch.permute_quantize(
            packed, layout, "pow2", rows=True, columns=columns, bf16=False, probs=None
        )
        assert torch.equal(ours.rows.view(torch.uint8)[real], reference.rows.view(torch.uint8)[real])


@pytest.mark.parametrize(("num_tokens", "dtype"), [(5, torch.uint8), (150, torch.float32)])
def test_other_rows_are_refused(num_tokens, dtype):
    with pytest.raises(ValueError, match=r"packed rows must be uint8 \[150, 272\] without probs, not .* \[\d+, 272\]"):
        permute_quantize(Packed(torch.zeros(num_tokens, 272, dtype=dtype), 256), layout_of(150), BLOCKWISE_POW2)


@pytest.mark.parametrize(("normalize", "factor"), [(True, 1.0), (True, 2.5), (False, 1.0), (False, 0.5)])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(40, 6, 2), (5, 128, 8), (1, 1, 1), (33, 60, 4)])
def test_scores_and_gradients_are_those_of_the_chosen_experts(tokens, experts, top_k, normalize, factor):
    router = RouterConfig(score="softmax", normalize=normalize, scaling_factor=factor)
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(experts)).requires_grad_()
    weights, chosen = choose_experts(logits, top_k, router, None)
    weight_of = torch.arange(1.0, 1 + experts).sin()
    (weights * weight_of[chosen]).sum().backward()
    own = logits.detach().clone().requires_grad_()
    scores = routed_scores(own, top_k, router)
    assert scores.dtype == torch.float32
    assert torch.equal(scores.detach() >= 0, torch.zeros_like(scores).scatter(1, chosen, 1) > 0)
    torch.testing.assert_close(scores.gather(1, chosen), weights)
    (torch.where(scores >= 0, scores, 0.0) * weight_of).sum().backward()
    torch.testing.assert_close(own.grad, logits.grad, rtol=1e-5, atol=1e-6)


def test_of_equal_logits_the_first_are_chosen_and_gradients_have_the_dtype_of_the_logits():
    logits = torch.zeros(3, 10, dtype=torch.bfloat16)
    logits[1, 7] = logits[1, 4] = 1.0
    logits[2, 5] = -200.0  # its share is 0
    logits.requires_grad_()
    scores = routed_scores(logits, 3, RouterConfig(score="softmax", normalize=True))
    actual = [(row >= 0).nonzero().flatten().tolist() for row in scores.detach()]
    if scores.grad_fn.name().startswith("_Routed"):  # torch.topk on a CPU takes any of equals
        assert actual == [[0, 1, 2], [0, 4, 7], [0, 1, 2]]
    assert [len(row) for row in actual] == [3, 3, 3] and {4, 7} < set(actual[1])
    scores.sum().backward()
    assert logits.grad.dtype == torch.bfloat16
