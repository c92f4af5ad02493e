"""The tokens of a rank's experts and the sums of their rows, against loops over tokens and experts."""

import pytest
import torch

from megatron_fp8rl.kernels.expert_slots import Choice, sum_rows
from megatron_fp8rl.kernels.types import BLOCK
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
    assert_passes_interpreted(__file__)
