"""Offloaded training state: memory goes and comes back, and no bit of training changes."""

from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.config import AlgoConfig
from megatron_fp8rl.preflight.host_memory import host_memory
from megatron_fp8rl.trainer import checkpoint
from megatron_fp8rl.trainer.optimizer import fp8_params
from megatron_fp8rl.trainer.optimizer.offload import HostMemory
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.policy import Policy
from tests.helpers.dist import run_ranks
from tests.helpers.training import DENSE, MOE, SMOOTH_ADAM, continue_training, run_config, weight_pieces

PARTS = ("params", "gradients", "optimizer")
CASES = {
    "bf16": run_config(model=DENSE, params="bf16"),
    "moe_ep2": run_config(model=MOE, params="bf16", world_size=2, expert=2),
    "fp32_reference": run_config(model=DENSE, params="fp32", algo=AlgoConfig(kl_coef=0.1)),
}

FP8_STATES = run_config(model=DENSE, params="bf16", optim=replace(SMOOTH_ADAM, states="fp8"))


def _build(cfg):
    return Policy.build(cfg, Parallel.init(cfg.parallel, deadline_s=60))


def _grad_bytes(policy):
    buffers = [b for chunk in policy.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    return [(b.param_data.untyped_storage().nbytes(), b.grad_data.untyped_storage().nbytes()) for b in buffers]


def _train(cfg, folder, offload):
    """Metrics and weights of four updates; with ``offload``, all state leaves after each, and a checkpoint is saved."""
    policy = _build(replace(cfg, optim=replace(cfg.optim, offload=PARTS if offload else ())))
    fp8_params._MASTERS_AT_A_TIME = 5000  # Adam steps in several pieces
    sizes = _grad_bytes(policy)
    metrics = []
    for step in range(4):
        before = policy.offload.offloaded
        metrics += continue_training(policy, 1)[0]
        assert policy.offload.offloaded == before
        if offload:
            policy.offload.release("gradients", "optimizer")
            assert all(grads == 0 < params for params, grads in _grad_bytes(policy))
            policy.offload.release("params")
            assert policy.offload.offloaded == PARTS and not any(map(sum, _grad_bytes(policy)))
        if step == 1:
            checkpoint.save(folder, step, policy, {})
        if offload:
            assert policy.offload.offloaded == PARTS
            with pytest.raises(RuntimeError, match="params.* offloaded"):
                policy.offload.require("params")
            for p in policy.models[0].parameters():
                assert p.untyped_storage().nbytes() == 0
            policy.offload.restore("params", "gradients", *PARTS[2:][step % 2 :])  # or an update fetches the rest
            assert policy.offload.offloaded == PARTS[2:][: step % 2] and _grad_bytes(policy) == sizes
            assert not any(b.grad_data.any() for chunk in policy.chunks for b in chunk.buffers)
    return metrics, weight_pieces(policy)


def _resume(cfg, folder):
    policy = _build(replace(cfg, optim=replace(cfg.optim, offload=PARTS)))
    policy.offload.release(*PARTS)
    checkpoint.restore(checkpoint.latest(folder), policy)
    assert policy.offload.offloaded == ()
    return continue_training(policy, 2)[0], weight_pieces(policy)


@pytest.mark.parametrize("cfg", [*CASES.values(), FP8_STATES], ids=[*CASES, "fp8_states"])
def test_offloading_changes_no_bit(cfg, tmp_path):
    world = cfg.parallel.world_size
    plain = run_ranks(world, _train, cfg, tmp_path / "plain", False)
    moved = run_ranks(world, _train, cfg, tmp_path / "moved", True)
    for (metrics, weights), (moved_metrics, moved_weights) in zip(plain, moved, strict=True):
        assert metrics == moved_metrics
        for name, (_, weight) in weights.items():
            assert torch.equal(weight, moved_weights[name][1]), name
    # The checkpoint of a policy that was away is that of one that was not.
    resumed = run_ranks(world, _resume, cfg, tmp_path / "moved")
    for (metrics, weights), (resumed_metrics, resumed_weights) in zip(plain, resumed, strict=True):
        assert metrics[2:] == resumed_metrics
        for name, (_, weight) in weights.items():
            assert torch.equal(weight, resumed_weights[name][1]), name


def _restores_only_what_left(cfg):
    policy = _build(replace(cfg, optim=replace(cfg.optim, offload=("gradients",))))
    policy.offload.release(*PARTS)
    assert policy.offload.offloaded == ("gradients",)
    assert all(params > 0 for params, _ in _grad_bytes(policy))
    policy.offload.release("gradients")  # again: nothing happens
    policy.offload.restore("optimizer")
    assert policy.offload.offloaded == ("gradients",)
    with pytest.raises(RuntimeError, match="gradients of the policy are offloaded"):
        continue_training(policy, 1)


def test_only_what_is_named_moves():
    run_ranks(1, _restores_only_what_left, run_config(model=DENSE))


def _with_prepared_memory(cfg):
    """Sizes of the host memory for an update's state, and of the prepared memory."""
    parallel = Parallel.init(cfg.parallel, deadline_s=60)
    host = host_memory(cfg, parallel.device)
    host._thread.join()
    prepared = {part: (memory.numel(), memory.data_ptr()) for part, memory in host._ready.items()}
    policy = Policy.build(cfg, parallel, host)
    policy.offload.release(*PARTS)  # the optimizer has no moments yet
    policy.offload.restore()
    continue_training(policy, 1)
    before = weight_pieces(policy)
    policy.offload.release(*PARTS)
    used = {
        part: (memory.numel(), memory.data_ptr())
        for part, x in policy.offload._parts.items()
        if (memory := x._host).numel()
    }
    policy.offload.restore()
    assert all(torch.equal(weight, before[name][1]) for name, (_, weight) in weight_pieces(policy).items())
    return prepared, used


@pytest.mark.parametrize("cfg", CASES.values(), ids=CASES)
def test_memory_that_was_allocated_while_engines_started_is_what_is_used(cfg):
    cfg = replace(cfg, optim=replace(cfg.optim, offload=PARTS), engine=replace(cfg.engine, placement="colocated"))
    for prepared, used in run_ranks(cfg.parallel.world_size, _with_prepared_memory, cfg):
        assert used == prepared and used.keys() == {"params", "optimizer"}


def test_memory_that_cannot_be_had_is_left_to_the_release():
    host = HostMemory({"params": 1 << 60, "optimizer": 4097}, torch.device("cpu"))
    assert host.take("optimizer").numel() == 4097
    assert host.take("optimizer").numel() == host.take("params").numel() == 0
