"""Exact trainers of any tensor-parallel degree compute the bits of the finest degree: on one to eight ranks."""

from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.config import (
    AlgoConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
)
from megatron_fp8rl.kernels.ordered_sum import add_in_order
from tests.helpers.dist import run_ranks
from tests.helpers.exact_sums import DENSE, MOE, random_weights, tokens_logprobs
from tests.helpers.models import small_model
from tests.helpers.training import SMOOTH_ADAM, train

SEQUENCES = [list(range(3, 30)), list(range(50, 120, 3))]


def _config(model: ModelConfig, degree: int, engine: EngineConfig, recipe: str, exact: bool = True) -> RunConfig:
    return RunConfig(
        name="sums",
        model=model,
        engine=engine,
        parallel=ParallelConfig(world_size=degree, tensor=degree),
        precision=PrecisionConfig(trainer=recipe, rollout=recipe, exact=exact),
    )


@pytest.mark.parametrize(
    ("model", "engine", "recipe", "degrees"),
    [
        (DENSE, EngineConfig(tensor=8), "blockwise", (1, 8)),
        (MOE, EngineConfig(tensor=4, expert=4), "bf16", (1, 2, 4)),
        (MOE, EngineConfig(data=2, tensor=2, expert=4), "blockwise", (1, 2)),
    ],
    ids=["dense", "experts", "data_and_tensor"],
)
def test_log_probabilities_do_not_depend_on_the_degree(model, engine, recipe, degrees):
    weights = random_weights(model)
    first, *others = (
        run_ranks(degree, tokens_logprobs, _config(model, degree, engine, recipe), weights, SEQUENCES)[0]
        for degree in degrees
    )
    for other in others:
        assert all(map(torch.equal, first, other))


def test_sums_of_collectives_depend_on_the_degree():
    """So the test above can fail."""
    model, engine = small_model((1, 64, 4, 4, 16, 64), ffn=128), EngineConfig(tensor=4)
    weights = random_weights(model)

    def run(degree: int, exact: bool) -> torch.Tensor:
        cfg = _config(model, degree, engine, "bf16", exact)
        return torch.cat(run_ranks(degree, tokens_logprobs, cfg, weights, [list(range(3, 60))])[0])

    whole = run(1, False)
    assert not torch.equal(whole, run(4, False))
    assert not torch.equal(whole, run(1, True))


def _sum_and_gradients(num_parts: int):
    """On a rank: (sum of its tokens, gradients of its parts, the parts)."""
    import torch.distributed as dist

    from megatron_fp8rl.trainer.model.linear import _SumInOrder

    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(dist.get_rank())
    parts = [torch.randn(8, 1, 5, generator=generator).bfloat16().requires_grad_() for _ in range(num_parts)]
    total = _SumInOrder.apply(dist.group.WORLD, *parts)
    total.backward(torch.full_like(total, 1.0 + dist.get_rank()))
    dist.destroy_process_group()
    return total.detach(), [part.grad for part in parts], torch.stack(parts).detach()


def test_each_rank_gets_the_ordered_sum_of_its_tokens_and_the_gradient_of_all():
    results = run_ranks(4, _sum_and_gradients, 2)
    expected = add_in_order(torch.cat([parts for _, _, parts in results]))
    assert torch.equal(torch.cat([total for total, _, _ in results]), expected)
    gradient = torch.arange(1.0, 5.0).repeat_interleave(2)[:, None, None].expand(8, 1, 5).bfloat16()
    assert all(torch.equal(grad, gradient) for _, grads, _ in results for grad in grads)


@pytest.mark.parametrize(("recipe", "rank"), [("bf16", None), ("blockwise", 4)])
def test_updates_with_divided_products_are_those_with_whole_ones(recipe, rank):
    """Of weights, or of adapters. Outputs round more often, which changes a gradient by less than one percent."""
    engine = EngineConfig(tensor=4, expert=4)

    def norm(exact: bool) -> float:
        cfg = replace(_config(MOE, 1, engine, recipe, exact), optim=SMOOTH_ADAM, algo=AlgoConfig(loss="grpo"))
        cfg = replace(cfg, lora=LoraConfig(rank=rank))
        return run_ranks(1, train, cfg, 1)[0].metrics[0]["train/grad_norm/max"]

    assert norm(True) == pytest.approx(norm(False), rel=0.01)
