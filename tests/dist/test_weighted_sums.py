"""Training where a token's experts are weighted in their sum: the updates of a policy that weighs each output."""

from dataclasses import replace

import pytest

from megatron_fp8rl.kernels import combine
from megatron_fp8rl.trainer.model import build
from tests.helpers.dist import run_ranks
from tests.helpers.training import MOE, assert_same_weights, run_config, train


def _weighing_in_sums(cfg, num_updates):
    """Runs on a rank: ``train`` as with ``precision.kernels.engine_experts = deep_gemm`` on a GPU."""
    calls, choose, add = [], build.choose, combine._sum

    def in_sums(*args):
        choice = choose(*args)
        return replace(choice, trainer=replace(choice.trainer, combine="sum"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "choose", in_sums)
        patch.setattr(combine, "_sum", lambda *args: calls.append(1) or add(*args))
        return train(cfg, num_updates), len(calls)


@pytest.mark.parametrize(
    "layout", [{}, dict(world_size=2, expert=2), dict(world_size=2, tensor=2, expert=2)], ids=["one", "ep2", "tp2_ep2"]
)
def test_updates_are_those_of_weighted_outputs(layout):
    (expected,) = run_ranks(1, train, run_config(), 2)
    ranks = run_ranks(layout.get("world_size", 1), _weighing_in_sums, run_config(**layout), 2)
    assert all(num_calls for _, num_calls in ranks)
    assert_same_weights(MOE, expected, [result for result, _ in ranks])
