"""What a policy held is free when nobody names it any more: gradients' hooks, caches and the optimizer keep nothing."""

import gc
import weakref
from dataclasses import replace

import pytest

from megatron_fp8rl.config import PrecisionConfig
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.policy import Policy
from tests.helpers.dist import run_ranks
from tests.helpers.training import DENSE, MOE, SMOOTH_ADAM, make_batch, make_loss, run_config

OVERLAP = replace(SMOOTH_ADAM, overlap_grad_reduce=True)
TILED = replace(MOE, hidden_size=128, head_dim=32, moe_ffn_hidden_size=128)
GROUPED = replace(
    run_config(model=TILED),
    precision=PrecisionConfig(trainer="blockwise", rollout="bf16", kernels={"experts": "deep_gemm"}),
)
RUNS = {
    "dense": run_config(model=DENSE),
    "experts": run_config(params="bf16"),
    "blockwise": run_config(params="bf16", trainer="blockwise"),
    "grouped": GROUPED,
    "overlapped": run_config(world_size=2, optim=OVERLAP),
    "virtual stages": run_config(world_size=2, pipeline=2, virtual_stages=2),
}


def what_is_left(cfg) -> list[str]:
    """Names of the tensors and modules that outlive their policy."""
    parallel = Parallel.init(cfg.parallel)
    policy = Policy.build(cfg, parallel)
    batch = policy.with_old_logprobs(make_batch(cfg, parallel.dp_rank))
    policy.update(batch, make_loss(cfg))
    alive = {name: weakref.ref(tensor) for name, tensor in policy.named_tensors()}
    for index, chunk in enumerate(policy.chunks):
        alive |= {f"module {index} {name}": weakref.ref(module) for name, module in chunk.named_modules()}
        buffers = [*chunk.buffers, *chunk.expert_parallel_buffers]
        alive |= {f"gradients {index} {i}": weakref.ref(buffer.grad_data) for i, buffer in enumerate(buffers)}
    for index, group in enumerate(policy.optimizer.megatron.param_groups):
        alive |= {f"master weights {index} {i}": weakref.ref(part) for i, part in enumerate(group["params"])}
    alive["optimizer"] = weakref.ref(policy.optimizer.megatron)
    assert len(alive) > 20
    del policy, chunk, buffers, group
    gc.collect()
    return [name for name, reference in alive.items() if reference() is not None]


@pytest.mark.parametrize("name", RUNS)
def test_nothing_outlives_a_policy(name):
    for left in run_ranks(RUNS[name].parallel.world_size, what_is_left, RUNS[name]):
        assert left == []
