"""A router whose experts gather tokens: its scores in two launches are the weights and the map of its general way."""

from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.config import PrecisionConfig, RouterConfig
from megatron_fp8rl.trainer.policy import Policy
from tests.helpers.interpreter import assert_passes_interpreted, in_interpreter, starts_interpreter
from tests.helpers.training import MOE, alone, run_config


def _routers(**router):
    """The routers of a single-rank trainer that gathers tokens, in this process."""
    model = replace(MOE, num_layers=2, hidden_size=128, moe_ffn_hidden_size=256, router=RouterConfig(**router))
    cfg = run_config(model=model)
    cfg = replace(
        cfg,
        parallel=replace(cfg.parallel, dispatch="gather"),
        precision=PrecisionConfig(kernels={"experts": "deep_gemm"}),
    )
    with alone(cfg) as parallel:
        policy = Policy.build(cfg, parallel)
        yield from (layer.mlp.router for chunk in policy.chunks for layer in chunk.module.module.decoder.layers)


@in_interpreter
@pytest.mark.parametrize("router", [{"normalize": True}, {"normalize": False, "scaling_factor": 2.5}], ids=str)
def test_scores_and_gradients_are_those_of_weights_and_map(router):
    for module in _routers(**router):
        assert module.has_scores
        actual = []
        for has_scores in (True, False):
            module.has_scores = has_scores
            hidden = torch.randn(40, 1, 128, generator=torch.Generator().manual_seed(3)).bfloat16().requires_grad_()
            weights, goes = module(hidden)
            scores = weights if goes is None else torch.where(goes, weights.float(), -1.0)
            assert (goes is None) == has_scores
            (scores.clamp(min=0) * torch.arange(scores.numel()).view_as(scores).sin()).sum().backward()
            actual.append((scores.detach(), hidden.grad.float()))
        (ours, our_grad), (theirs, their_grad) = actual
        assert torch.equal(ours >= 0, theirs >= 0)
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(our_grad, their_grad, rtol=2**-7, atol=1e-4)


@in_interpreter
@pytest.mark.parametrize("router", [{"score": "sigmoid"}, {"score": "sigmoid", "correction_bias": True}], ids=str)
def test_other_routers_take_the_general_way(router):
    for module in _routers(**router):
        _weights, goes = module(torch.randn(5, 1, 128).bfloat16())
        assert not module.has_scores and goes.sum().item() == 5 * MOE.experts_per_token


@starts_interpreter
def test_in_the_interpreter():
    assert_passes_interpreted(__file__)
