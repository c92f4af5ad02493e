"""Updates from lists of all parameters at once are those of Megatron-Core's loops, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.helpers.dist import run_ranks
from tests.helpers.training import DENSE, MOE, SMOOTH_ADAM, continue_training, run_config, weight_pieces

OVERLAP = replace(SMOOTH_ADAM, overlap_grad_reduce=True)
CLIPPED = replace(OVERLAP, clip_grad_norm=1e-3)
RUNS = {
    "dense": run_config(model=DENSE, params="bf16"),
    "fp32": run_config(model=DENSE, params="fp32", world_size=2, tensor=2),
    "experts": run_config(model=MOE, params="bf16", world_size=2, expert=2, optim=CLIPPED),
    "virtual stages": run_config(params="bf16", world_size=2, pipeline=2, virtual_stages=2),
}


def updates(cfg, listed: bool):
    """Metrics and weights of three updates; how many of the rank's optimizers have lists; whether counted twice."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from megatron_fp8rl.trainer.optimizer.fast_lists import ListedOptimizer
    from megatron_fp8rl.trainer.parallel import Parallel
    from megatron_fp8rl.trainer.policy import Policy

    policy = Policy.build(cfg, Parallel.init(cfg.parallel, deadline_s=60))
    parts = policy.optimizer._parts
    found = [type(part) for part in parts if not part.is_stub_optimizer]
    assert found and set(found) == {ListedOptimizer}
    if not listed:
        for part in parts:
            part.__class__ = DistributedOptimizer
    metrics, _ = continue_training(policy, 3)
    for part in parts if listed else ():
        with torch.no_grad():
            expected = [x.data_ptr() for x in DistributedOptimizer.get_grads_for_grad_norm(part)]
        assert [x.data_ptr() for x in part.get_grads_for_grad_norm()] == expected
    return metrics, weight_pieces(policy)


@pytest.mark.parametrize("name", RUNS)
def test_lists_change_no_bit(name):
    cfg = RUNS[name]
    world = cfg.parallel.world_size
    theirs, ours = (run_ranks(world, updates, cfg, listed) for listed in (False, True))
    for (metrics, weights), (same_metrics, same_weights) in zip(theirs, ours, strict=True):
        assert metrics == same_metrics
        assert weights.keys() == same_weights.keys()
        for key, (_, piece) in weights.items():
            assert torch.equal(piece, same_weights[key][1]), key


def reduced_gradients(overlap: bool):
    """(values in this rank's part of the sums, whether all buckets were on their way before the end); autograd knows of
    one parameter alone."""
    from megatron_fp8rl.trainer.model.build import build_chunks
    from megatron_fp8rl.trainer.optimizer.optimizer import wrap_chunks
    from megatron_fp8rl.trainer.parallel import Parallel

    cfg = run_config(model=DENSE, params="bf16", world_size=2, optim=replace(SMOOTH_ADAM, overlap_grad_reduce=overlap))
    parallel = Parallel.init(cfg.parallel, deadline_s=60)
    (buffers,) = wrap_chunks(build_chunks(cfg, parallel), cfg)
    known, *others = buffers.param_to_bucket_group
    for _ in range(2):  # in the first pass Megatron-Core learns what a bucket waits for
        buffers.zero_grad_buffer()
        for parameter in others:
            parameter.main_grad.fill_(parallel.rank + 1)
        known.gradients_ready(others)
        (known.float().sum() * (parallel.rank + 1)).backward()
        assert known.grad is None
        if overlap:
            waiting = [group.grad_reduce_handle is not None for group in buffers.bucket_groups]
        buffers.finish_grad_sync()
    shards = [bucket.grad_data.chunk(2)[parallel.rank] for group in buffers.bucket_groups for bucket in group.buckets]
    return torch.cat(shards).unique().tolist(), overlap and all(waiting)


@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_of_which_autograd_knows_nothing_are_reduced(overlap):
    for values, started in run_ranks(2, reduced_gradients, overlap):
        assert set(values) <= {0.0, 3.0} and 3.0 in values  # zeros fill buckets up
        assert started == overlap, "reduction did not start with the last gradient"
