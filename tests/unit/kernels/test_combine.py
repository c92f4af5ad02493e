"""Sums of experts with the weights in them: the dispatcher's rows, values, and gradients beside plain autograd."""

import pytest
import torch

from megatron_fp8rl.config import PrecisionConfig
from megatron_fp8rl.kernels.combine import combine_experts, rows_of, slots, weighted_in_combine
from tests.helpers.experts import build_experts, draw_tokens, run_experts

NUM_TOKENS, NUM_EXPERTS, TOP_K, HIDDEN = 37, 12, 4, 24


def _choice(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights [T, E], goes [T, E])."""
    generator = torch.Generator().manual_seed(seed)
    values, experts = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=generator).topk(TOP_K, dim=1)
    empty = torch.zeros(NUM_TOKENS, NUM_EXPERTS)
    return empty.scatter(1, experts, values / values.sum(1, keepdim=True)), empty.scatter(1, experts, 1.0).bool()


def test_slots_are_in_the_engines_order():
    weights = torch.tensor([[0.25, 0.0, 0.5, 0.25, 0.0], [0.0, 1.0, 0.0, 0.0, 0.0]])
    goes = torch.tensor([[True, False, True, True, False], [True, True, False, False, True]])
    values, experts = slots(weights, goes, 3)
    assert experts.tolist() == [[2, 0, 3], [1, 0, 4]]
    assert values.tolist() == [[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]


def test_rows_are_those_of_the_dispatcher():
    from megatron.core.transformer.moe.moe_utils import permute

    weights, goes = _choice()
    tokens = torch.arange(NUM_TOKENS).float()[:, None]
    rows, probs, *_ = permute(tokens, goes, probs=weights, num_out_tokens=NUM_TOKENS * TOP_K)
    values, experts = slots(weights, goes, TOP_K)
    where = rows_of(experts)
    assert torch.equal(rows[where][..., 0], tokens.expand(-1, TOP_K))
    assert torch.equal(probs[where], values)


def test_sums_and_gradients_are_those_of_weighted_outputs():
    weights, goes = _choice()
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(NUM_TOKENS * TOP_K, HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()
    grad = torch.randn(NUM_TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    weights = weights.double().requires_grad_()
    token, expert = (each.flatten() for each in goes.t().nonzero(as_tuple=True)[::-1])  # in the dispatcher's order

    actual = combine_experts(weighted_in_combine(rows.tanh(), weights[token, expert]), weights, goes, TOP_K)
    plain = torch.zeros_like(grad).index_add(0, token, rows.tanh() * weights[token, expert][:, None])
    torch.testing.assert_close(actual, plain, rtol=1e-6, atol=1e-6)  # sums are float32
    ours, theirs = (torch.autograd.grad(out, (rows, weights), grad) for out in (actual, plain))
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_a_sum_is_rounded_once():
    weights, goes = _choice()
    rows = torch.randn(NUM_TOKENS * TOP_K, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    values, experts = slots(weights, goes, TOP_K)
    exact = (rows[rows_of(experts)].double() * values.double()[..., None]).sum(dim=1)
    actual = combine_experts(rows, weights, goes, TOP_K)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.double(), exact, rtol=2**-8, atol=1e-6)
    assert (actual == exact.bfloat16()).double().mean() > 0.999


def test_two_parts_are_rounded_before_they_are_added():
    """As two ranks of an engine do that have six experts each."""
    weights, goes = _choice()
    rows = torch.randn(NUM_TOKENS * TOP_K, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    values, experts = slots(weights, goes, TOP_K)
    terms = rows[rows_of(experts)].double() * values.double()[..., None]
    first = experts < NUM_EXPERTS // 2
    parts = [(terms * mine[..., None]).sum(dim=1).bfloat16() for mine in (first, ~first)]
    actual = combine_experts(rows, weights, goes, TOP_K, num_parts=2)
    assert torch.equal(actual, parts[0] + parts[1])
    assert not torch.equal(actual, combine_experts(rows, weights, goes, TOP_K))
    rows, grad = rows.float().requires_grad_(), torch.randn(NUM_TOKENS, HIDDEN)
    for_one, for_two = (torch.autograd.grad(combine_experts(rows, weights, goes, TOP_K, n), rows, grad) for n in (1, 2))
    assert torch.equal(for_one[0], for_two[0])


@pytest.mark.parametrize("kernels", ["deep_gemm", "te"])
def test_experts_that_weigh_later_have_the_same_gradients(kernels):
    precision = PrecisionConfig(kernels={"experts": kernels})
    counts = (5, 0, 130)
    results = []
    for applies_router_weights in (True, False):
        module = build_experts(3, 128, 128, precision, applies_router_weights=applies_router_weights)
        results.append((run_experts(module, counts, *(given := draw_tokens(counts, 128))), given[1]))
    (weighted, probs), (later, _) = results
    assert torch.equal((later.pop("y").float() * probs.detach()[:, None]).bfloat16(), weighted.pop("y"))
    for name, value in weighted.items():
        torch.testing.assert_close(later[name], value, rtol=0 if kernels == "deep_gemm" else 1e-6, atol=0, msg=name)
