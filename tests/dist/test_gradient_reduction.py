"""Gradients that autograd does not see are reduced over data-parallel ranks."""

from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.trainer.model.build import build_chunks
from megatron_fp8rl.trainer.optimizer.optimizer import wrap_chunks
from megatron_fp8rl.trainer.parallel import Parallel
from tests.helpers.dist import run_ranks
from tests.helpers.training import DENSE, SMOOTH_ADAM, run_config


def reduced_gradients(overlap: bool):
    """(values in this rank's part of the sums, whether all reductions started early); autograd sees one parameter
    only."""
    cfg = run_config(model=DENSE, params="bf16", world_size=2, optim=replace(SMOOTH_ADAM, overlap_grad_reduce=overlap))
    parallel = Parallel.init(cfg.parallel, deadline_s=60)
    (buffers,) = wrap_chunks(build_chunks(cfg, parallel), cfg.optim, cfg.precision)
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
