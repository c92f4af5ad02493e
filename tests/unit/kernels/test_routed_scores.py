"""Scores of a softmax router, in torch and in the kernel: the choice and weights of ``choose_experts``, and its gradient."""

import pytest
import torch

from megatron_fp8rl.config import RouterConfig
from megatron_fp8rl.kernels.routing import choose_experts, routed_scores
from tests.helpers.interpreter import assert_passes_interpreted, starts_interpreter


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
    found = [(row >= 0).nonzero().flatten().tolist() for row in scores.detach()]
    if scores.grad_fn.name().startswith("_Routed"):  # torch.topk on a CPU takes any of equals
        assert found == [[0, 1, 2], [0, 4, 7], [0, 1, 2]]
    assert [len(row) for row in found] == [3, 3, 3] and {4, 7} < set(found[1])
    scores.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


@starts_interpreter
def test_in_the_interpreter():
    assert_passes_interpreted(__file__)
