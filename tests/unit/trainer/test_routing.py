"""The choice of experts against transformers' routers and against a loop."""

from functools import partial
from itertools import product

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from megatron_fp8rl.config import RouterConfig
from megatron_fp8rl.trainer.model.packed_sequences import Routes
from megatron_fp8rl.trainer.model.router import Router, bf16_parts, choose_experts, rounded_linear
from tests.tolerances import ROUTER_FLOAT32

TOKENS, HIDDEN, EXPERTS = 200, 16, 12


def _random(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.normal_(0.0, 0.3, generator=generator)
    return module


def _hidden() -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))


def _assert_same(module, top_k: int, router: RouterConfig, bias: torch.Tensor | None) -> None:
    with torch.no_grad():
        logits, weights, experts = module(_hidden())
        if router.score == "softmax":
            logits = _hidden() @ module.weight.T  # some routers return probabilities
        ours, chosen = choose_experts(logits, top_k, router, bias)
    dense = torch.zeros(TOKENS, EXPERTS)
    expected = dense.scatter(1, experts, weights.float())
    torch.testing.assert_close(dense.scatter(1, chosen, ours), expected, **ROUTER_FLOAT32)
    assert len({tuple(sorted(row)) for row in chosen.tolist()}) > 4, "the tokens choose alike"


_GROUPS = ((1, 1), (4, 2), (3, 2), (6, 3))


@pytest.mark.parametrize("top_k, groups, normalize", product((1, 3, 4), _GROUPS, (True, False)))
def test_same_as_deepseek_v3(top_k, groups, normalize):
    """Also where the experts of a token divided by its groups are not two."""
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=top_k,
        n_group=groups[0],
        topk_group=groups[1],
        norm_topk_prob=normalize,
        routed_scaling_factor=2.5,
    )
    module = _random(DeepseekV3TopkRouter(config))
    router = RouterConfig(
        score="sigmoid",
        correction_bias=True,
        num_groups=groups[0],
        groups_per_token=groups[1],
        scaling_factor=2.5,
        normalize=normalize,
    )
    _assert_same(module, top_k, router, module.e_score_correction_bias)
    with pytest.raises(AssertionError):  # the bias matters
        _assert_same(module, top_k, router, None)


@pytest.mark.parametrize("normalize", [True, False])
def test_same_as_qwen3_moe(normalize):
    config = Qwen3MoeConfig(hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=3, norm_topk_prob=normalize)
    _assert_same(_random(Qwen3MoeTopKRouter(config)), 3, RouterConfig(normalize=normalize), None)


def test_same_as_mixtral():
    config = MixtralConfig(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=2)
    _assert_same(_random(MixtralTopKRouter(config)), 2, RouterConfig(), None)


@pytest.mark.parametrize(
    "router",
    [
        RouterConfig(),
        RouterConfig(normalize=False),
        RouterConfig(score="sigmoid", correction_bias=True, num_groups=3, groups_per_token=1, scaling_factor=2.5),
    ],
    ids=["softmax", "not_normalized", "sigmoid_groups"],
)
def test_weights_of_given_experts(router):
    """Scores of all experts, taken at the given ones in their order, also where a group or the bias forbids them."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(TOKENS, EXPERTS, generator=generator).requires_grad_()
    bias = torch.randn(EXPERTS, generator=generator)
    own_weights, own = choose_experts(logits, 3, router, bias)
    given = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(dim=1)[:, :3]
    given[::4] = own[::4].flip(1)
    recorded = torch.arange(TOKENS) % 3 > 0
    unrecorded = torch.where(torch.arange(TOKENS)[:, None] % 6 > 0, -1, torch.zeros_like(given))
    record = torch.where(recorded[:, None], given, unrecorded).to(torch.int16)
    counts, seen = torch.zeros(2, 2, dtype=torch.int64), {}
    routes = Routes(
        rows_R=torch.arange(TOKENS),
        recorded_RLK=torch.stack([record.flip(0), record], dim=1),
        replays=True,
        agreement_L2=counts,
        own=seen,
    )
    weights, experts = choose_experts(logits, 3, router, bias, partial(routes.experts, 1))

    assert torch.equal(experts, torch.where(recorded[:, None], given, own)) and torch.equal(seen[1], own)
    scores = logits.sigmoid() if router.score == "sigmoid" else logits.softmax(dim=1)
    expected = torch.stack([row[ids] for row, ids in zip(scores, experts)])
    if router.normalize:
        expected = expected / expected.sum(dim=1, keepdim=True)
    expected = expected * router.scaling_factor
    torch.testing.assert_close(weights, expected, **ROUTER_FLOAT32)
    assert torch.equal(weights[~recorded], own_weights[~recorded])
    slopes = torch.randn(weights.shape, generator=generator)
    actual, wanted = (torch.autograd.grad((x * slopes).sum(), logits)[0] for x in (weights, expected))
    torch.testing.assert_close(actual, wanted, **ROUTER_FLOAT32)
    same = [set(a) == set(b) for a, b, is_there in zip(given.tolist(), own.tolist(), recorded) if is_there]
    assert counts.tolist() == [[0, 0], [sum(same), len(same)]] and 0 < sum(same) < len(same)


def test_logits_are_rounded_and_their_gradients_are_not(monkeypatch):
    """Those of the published routers in BF16: a linear in the type of the activations."""
    monkeypatch.setattr(TopKRouter, "gating", lambda self, x: x.float() @ self.weight.float().t())
    router = Router.__new__(Router)
    torch.nn.Module.__init__(router)
    router.weight = torch.nn.Parameter(torch.randn(EXPERTS, 64, generator=torch.Generator().manual_seed(3)).bfloat16())
    router.bias = None
    hidden = torch.randn(TOKENS, 1, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    exact = hidden.double() @ router.weight.double().t()
    grad = torch.randn(exact.shape, generator=torch.Generator().manual_seed(5))
    (straight,) = torch.autograd.grad(hidden.float() @ router.weight.float().t(), router.weight, grad)
    for rounds, expected in ((True, exact.bfloat16().float()), (False, exact.float())):
        router.rounds, router.match_engine = rounds, False
        logits = router.gating(hidden)
        assert logits.dtype == torch.float32 and torch.equal(logits, expected)
        (actual,) = torch.autograd.grad(logits, router.weight, grad)
        assert torch.equal(actual, straight)
    assert not torch.equal(exact.float(), exact.bfloat16().float())
    logits = rounded_linear(hidden, router.weight)  # what a GPU takes
    assert logits.dtype == torch.float32 and torch.equal(logits, logits.bfloat16().float())
    torch.testing.assert_close(logits.double(), exact, rtol=2**-7, atol=1e-3)
    (actual,) = torch.autograd.grad(logits, router.weight, grad)
    assert torch.equal(actual, straight)


def test_gradients_in_bf16_parts_keep_sixteen_bits():
    x = torch.randn(40, 12, generator=torch.Generator().manual_seed(6)) * torch.logspace(-9, 3, 40)[:, None]
    parts = bf16_parts(x)
    assert parts.dtype == torch.bfloat16 and torch.equal(parts[:, :12], x.bfloat16())
    error = (parts.double().unflatten(1, (2, 12)).sum(1) - x.double()).abs() / x.double().abs()
    assert 2**-20 < error.max() <= 2**-17


def test_gradient_goes_through_the_weights_and_not_through_the_choice():
    router = RouterConfig(score="sigmoid", correction_bias=True, num_groups=3, groups_per_token=2)
    logits = torch.randn(7, 6, generator=torch.Generator().manual_seed(2)).double().requires_grad_()
    weights, experts = choose_experts(logits, 3, router, torch.randn(6))
    weights[:, 0].sum().backward()
    chosen = torch.zeros(7, 6, dtype=torch.bool).scatter(1, experts, True)
    assert (logits.grad[chosen] != 0).all() and (logits.grad[~chosen] == 0).all()
