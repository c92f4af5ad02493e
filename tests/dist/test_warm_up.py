"""A pass that compiles kernels leaves no trace: what is trained after it is the same to the bit."""

from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.config import PrecisionConfig
from megatron_fp8rl.trainer import warm_up
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.policy import Policy
from megatron_fp8rl.types import Prompt
from tests.helpers.dist import run_ranks
from tests.helpers.fields import set_fields
from tests.helpers.training import MOE, continue_training, run_config, train, weight_pieces

MODEL = replace(MOE, hidden_size=128, moe_ffn_hidden_size=256)
LAYOUTS = {
    "alone": dict(world_size=1),
    "ep2": dict(world_size=2, expert=2, dispatch="gather"),
    "tp2_pp2": dict(world_size=4, tensor=2, pipeline=2),
    "pp2_vp2": dict(world_size=2, pipeline=2, virtual_stages=2),
}


def _warm(cfg):
    """Runs on a rank: results of ``train`` after a warm-up pass, and the state that the pass left."""
    parallel = Parallel.init(cfg.parallel, deadline_s=60)
    policy = Policy.build(cfg, parallel)
    calls, inner = [], policy.accumulate_gradients

    def observed(batch, loss):
        calls.append([mb.tokens_T.numel() for mb in batch.microbatches])
        return inner(batch, loss)

    policy.accumulate_gradients = observed
    before = weight_pieces(policy)
    prompts = [Prompt(prompt_id=f"{i}", environment="e", token_ids=(i + 1, 7, 9), text="", answer="") for i in range(5)]
    warm_up.warm_up(policy, prompts)
    changed = [name for name, (_, piece) in weight_pieces(policy).items() if not torch.equal(piece, before[name][1])]
    sizes, policy.accumulate_gradients = list(calls), inner
    metrics, _ = continue_training(policy, 2, None)
    parallel.barrier("done")
    return sizes, changed, metrics, weight_pieces(policy)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_is_the_same_after_it(layout):
    cfg = replace(run_config(model=MODEL, **LAYOUTS[layout]), precision=PrecisionConfig())
    world = cfg.parallel.world_size
    expected = run_ranks(world, train, cfg, 2)
    for (sizes, changed, metrics, pieces), want in zip(run_ranks(world, _warm, cfg), expected, strict=True):
        assert len(sizes) == 1 and max(sizes[0]) > cfg.optim.max_tokens_per_microbatch // 2  # one pass, nearly full
        assert not changed and metrics == want.metrics
        assert all(torch.equal(piece, want.pieces[name][1]) for name, (_, piece) in pieces.items())


def test_it_runs_where_a_gpu_would_wait_for_engines_on_others():
    def asked(device: str = "cuda", precision: str = "blockwise", **rollout) -> bool:
        cfg = set_fields(run_config(trainer=precision), **rollout)
        return warm_up.is_worthwhile(cfg.precision, cfg.engine, cfg.sampling, device)

    assert asked(placement="separate")
    assert not asked(placement="colocated") and not asked("cpu", placement="separate")
    assert not asked(placement="separate", replay="somewhere") and not asked(precision="delayed", placement="separate")
