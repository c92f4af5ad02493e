"""Updates without the optional patches are the same, bit for bit; gradients that autograd does not see are reduced."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.dist import run_ranks
from tests.helpers.ranges import leave_range
from tests.helpers.training import DENSE, MOE, SMOOTH_ADAM, continue_training, run_config, weight_pieces


def updates(cfg, stock: bool):
    """Metrics and weights of three updates, and the classes of the layers; ``stock``: without optional patches."""
    from megatron_fp8rl.trainer.parallel import Parallel
    from megatron_fp8rl.trainer.policy import Policy

    if stock:
        leave_range("megatron-core", "torch")
    policy = Policy.build(cfg, Parallel.init(cfg.parallel, deadline_s=60))
    modules = [module for model in policy.models for module in model.modules()]
    layers = {type(getattr(module, "token_dispatcher", module)).__name__ for module in modules}
    metrics, _ = continue_training(policy, 3)
    return metrics, weight_pieces(policy), layers


def test_optional_patches_change_no_bit():
    cfg = run_config(model=MOE, params="bf16")
    ((metrics, weights, layers),) = run_ranks(1, updates, cfg, False)
    ((same_metrics, same_weights, stock_layers),) = run_ranks(1, updates, cfg, True)
    assert "OneRankDispatcher" in layers and "OneRankDispatcher" not in stock_layers and "Dispatcher" in stock_layers
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
