"""The ``replica`` command, which the agents of a launched job start."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_fp8rl import cli
from megatron_fp8rl.commands.ranks import run_with_status
from megatron_fp8rl.kernels import compile_cache


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """Identity of this node's part of a rollout replica in a launched job."""

    replica: int = 0  # 0 ... engine.num_replicas - 1
    endpoint: Path = Path("rollout-0.json")  # endpoint file, written when the server is ready
    nnodes: int = 1  # number of nodes that the replica spans, as in vLLM
    node_rank: int = 0
    master_addr: str = ""
    master_port: int = 0


def _run(invocation: cli.Invocation) -> int:
    compile_cache.use(invocation.cfg.run_dir)
    from megatron_fp8rl.rollout import replica

    return run_with_status(partial(replica.main, invocation.cfg, replica.Part(**vars(invocation.options))))


COMMAND = cli.Command(
    name="replica",
    summary="a rollout replica, as the agents of a launched job start it",
    run=_run,
    options=ReplicaOptions,
    checks_config=True,
)
