"""Training with tokens gathered and read by index: the updates of the all-to-all, whatever the ranks."""

from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.config import ParallelConfig, PrecisionConfig
from megatron_fp8rl.trainer.model import router
from megatron_fp8rl.trainer.model.dispatcher import Exchange, GatherDispatcher, local_expert_scores
from megatron_fp8rl.trainer.parallel import Parallel
from tests.helpers.dist import run_ranks
from tests.helpers.training import MOE, full_weights, run_config, train
from tests.tolerances import GATHERED_GRADIENT, GATHERED_LOGPROBS, GATHERED_WEIGHTS

MODEL = replace(MOE, num_layers=2, hidden_size=128, moe_ffn_hidden_size=256)
LAYOUTS = {
    "alone": dict(world_size=1),
    "ep2": dict(world_size=2, expert=2),
    "tp2_ep2": dict(world_size=2, tensor=2, expert=2),
    "ep4": dict(world_size=4, expert=4),
    "pp2_ep2": dict(world_size=4, pipeline=2, expert=2),
    "cp2_ep2": dict(world_size=2, context=2, expert=2),
}


def config(layout: str, precision: str, dispatch: str, **more):
    cfg = run_config(model=MODEL, **LAYOUTS[layout])
    parallel = replace(cfg.parallel, dispatch=dispatch)
    return replace(
        cfg, parallel=parallel, precision=PrecisionConfig(trainer=precision, kernels={"experts": "deep_gemm"}), **more
    )


def _trained(cfg, num_updates):
    """Runs on a rank: ``train``, and how often tokens were gathered."""
    calls, inner = [], GatherDispatcher.token_combine
    GatherDispatcher.token_combine = lambda self, sums: calls.append(1) or inner(self, sums)
    return train(cfg, num_updates), len(calls)


@pytest.mark.parametrize(
    ("layout", "precision"), [*((layout, "blockwise") for layout in LAYOUTS), ("alone", "bf16"), ("ep2", "bf16")]
)
def test_updates_are_those_of_the_all_to_all(layout, precision):
    """To the bit on one rank, where each token's outputs are added and rounded alike."""
    world = LAYOUTS[layout]["world_size"]
    expected = run_ranks(world, train, config(layout, precision, "alltoall"), 2)
    actual = run_ranks(world, _trained, config(layout, precision, "gather"), 2)
    assert all(calls for _, calls in actual)
    ranks = [result for result, _ in actual]
    weights, others = (full_weights(MODEL, [result.pieces for result in run]) for run in (ranks, expected))
    for got, want in zip(ranks, expected, strict=True):
        assert list(got.old_logprobs) == list(want.old_logprobs)
        if world == 1:
            assert got.metrics == want.metrics
        if want.old_logprobs:  # of the last pipeline stage
            pairs = [(got.old_logprobs[name], values) for name, values in want.old_logprobs.items()]
            assert (
                torch.cat([(a - b).abs() for a, b in pairs]).mean() < GATHERED_LOGPROBS[precision] * (world > 1) + 1e-9
            )
        norms = [run.metrics[0]["train/grad_norm/max"] for run in (got, want)]
        assert norms[0] == pytest.approx(norms[1], rel=GATHERED_GRADIENT[precision])
    for name, weight in others.items():
        assert (weights[name].float() - weight.float()).abs().mean() < GATHERED_WEIGHTS, name


def _exchanges(world: int, num_tokens: int, num_experts: int):
    """Runs on a rank: results of the exchanges for values that encode rank, token and expert."""
    import torch.distributed as dist

    Parallel.init(ParallelConfig(world_size=world), deadline_s=60)
    exchange, rank = Exchange(dist.group.WORLD, in_fp8=False), dist.get_rank()
    tokens = 100.0 * rank + torch.arange(num_tokens)[:, None] + torch.zeros(1, 3)
    scores = (
        100.0 * rank + 10.0 * torch.arange(num_tokens)[:, None] + torch.arange(num_experts * world)
    ).requires_grad_()
    all_tokens, own = exchange.gathered(tokens), local_expert_scores(scores, exchange.group)
    sums = exchange.added(all_tokens * (rank + 1))
    (own * (rank + 1)).sum().backward()
    return all_tokens, own.detach(), sums, scores.grad


@pytest.mark.parametrize("world", [2, 3])
def test_tokens_scores_and_gradients_reach_their_ranks(world):
    num_tokens, num_experts = 4, 2
    all_tokens = torch.cat([100.0 * r + torch.arange(num_tokens)[:, None] + torch.zeros(1, 3) for r in range(world)])
    total = sum(range(1, world + 1))
    for rank, (tokens, own, sums, scores_grad) in enumerate(
        run_ranks(world, _exchanges, world, num_tokens, num_experts)
    ):
        mine = all_tokens[num_tokens * rank : num_tokens * (rank + 1)]
        assert torch.equal(tokens, all_tokens) and torch.equal(sums, total * mine)
        experts = torch.arange(num_experts) + num_experts * rank
        expected = [100.0 * r + 10.0 * torch.arange(num_tokens)[:, None] + experts for r in range(world)]
        assert torch.equal(own, torch.cat(expected))
        assert torch.equal(scores_grad, (torch.arange(num_experts * world) // num_experts + 1.0).expand(num_tokens, -1))


def _travelling(cfg, num_updates, in_fp8):
    """Runs on a rank: ``train`` with tokens sent in FP8 or BF16, and the dtype that was sent."""
    came, inner = set(), Exchange.gathered

    def gathered(self, x):
        out = inner(replace(self, in_fp8=in_fp8), x)
        came.add(type(out).__name__)
        return out

    Exchange.gathered = gathered
    return train(cfg, num_updates), came


def test_tokens_that_travel_in_fp8_are_the_same_operands():
    """Bit-equal log-probabilities; weight gradients differ only in subnormal values, since scales are powers of two."""
    cfg = config("ep2", "blockwise", "gather")
    actual, expected = run_ranks(2, _travelling, cfg, 1, True), run_ranks(2, _travelling, cfg, 1, False)
    for (got, in_fp8), (want, in_bf16) in zip(actual, expected, strict=True):
        assert (in_fp8, in_bf16) == ({"Packed"}, {"Tensor"})
        assert {name: tensor.tolist() for name, tensor in got.old_logprobs.items()} == {
            name: tensor.tolist() for name, tensor in want.old_logprobs.items()
        }
        norms = [run.metrics[0]["train/grad_norm/max"] for run in (got, want)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def _to_the_first_experts(cfg, num_updates):
    """Runs on a rank: ``train`` with all tokens on the same experts, so that the second rank has none."""
    inner = router.choose_experts

    def choose(logits, top_k, *args):
        weights, experts = inner(logits, top_k, *args)
        return weights, torch.arange(top_k).expand_as(experts).contiguous()

    router.choose_experts = choose
    return train(cfg, num_updates)


@pytest.mark.parametrize("precision", ["blockwise", "bf16"])
def test_a_rank_whose_experts_get_no_token_takes_part(precision):
    expected, actual = (
        run_ranks(2, _to_the_first_experts, config("ep2", precision, dispatch), 2)
        for dispatch in ("alltoall", "gather")
    )
    for got, want in zip(actual, expected, strict=True):
        for ours, theirs in zip(got.metrics, want.metrics, strict=True):
            norms = ours["train/grad_norm/max"], theirs["train/grad_norm/max"]
            assert norms[0] == pytest.approx(norms[1], rel=GATHERED_GRADIENT[precision])


def test_layers_that_are_recomputed_gather_again():
    cfg = config("ep2", "blockwise", "gather")
    expected = run_ranks(2, train, cfg, 1)
    cfg = replace(cfg, optim=replace(cfg.optim, recompute="selective", recompute_modules=("moe",)))
    for got, want in zip(run_ranks(2, train, cfg, 1), expected, strict=True):
        assert got.metrics == want.metrics
