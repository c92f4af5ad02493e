"""Runs one rollout replica, for a trainer that may be on another node. Agents start it.

    python -m megatron_fp8rl replica CONFIG [--field value ...] --replica INDEX --endpoint FILE
        [--nnodes N --node_rank R --master_addr HOST --master_port PORT]

Out: vLLM's server on an address that other nodes can reach and, when it answers, an endpoint file with that address.
Runs on a rollout node, as parent of the server's process group; the server writes to this process's output. A replica
that spans nodes has one such process on each node: the first runs the server, the others run workers.

Exits with the server's status, or with 0 after SIGTERM or SIGINT, which stop the server first. Ignores SIGUSR1, which
Slurm sends to every process before a time limit; the agent handles it. If the parent of this process ends, this process
and the server end too.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from megatron_fp8rl.config import ConfigError, EngineConfig, RunConfig, Violation
from megatron_fp8rl.data.model_dir import write_model_dir
from megatron_fp8rl.net import auth
from megatron_fp8rl.net.address import local_address
from megatron_fp8rl.net.endpoint import Endpoint, replica_name
from megatron_fp8rl.precision.hardware import local_hardware
from megatron_fp8rl.precision.kernel_choice import choose
from megatron_fp8rl.rollout import vllm_args
from megatron_fp8rl.rollout.server_process import is_healthy, kill_group, start_server, stop

_POLL_S = 0.2


class ReplicaError(RuntimeError):
    """The server could not be started."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """This process's part of a replica in a launched job, in vLLM's terms."""

    replica: int = 0  # 0 ... engine.num_replicas - 1
    endpoint: Path = Path("rollout-0.json")  # endpoint file, written when the server is ready
    nnodes: int = 1  # number of nodes that the replica spans, as in vLLM
    node_rank: int = 0
    master_addr: str = ""
    master_port: int = 0


def main(cfg: RunConfig, part: Part) -> int:
    """Run until the server or the parent ends, or a signal arrives; return the exit status. Raises ConfigError for a
    replica index outside the configuration."""
    parent = os.getppid()
    if not 0 <= part.replica < cfg.engine.num_replicas:
        problem = f"engine.num_replicas is {cfg.engine.num_replicas}"
        raise ConfigError(
            [Violation("--replica", part.replica, problem, "Choose one of 0 ... engine.num_replicas - 1")]
        )
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the server inherits it
    for sign in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sign, _leave)
    endpoint = None
    has_server = part.node_rank == 0
    kernels = choose(cfg, local_hardware(), "engine")
    token, host = auth.new_token(), local_address()
    if part.nnodes > 1:
        # The address over which the parts coordinate. vLLM would otherwise ask for the route to a public name server.
        os.environ.setdefault("VLLM_HOST_IP", host)
    process, url = start_server(
        vllm_args.engine_arguments(cfg, _model_dir(cfg, part), kernels) | _nodes(cfg.engine, part),
        vllm_args.engine_environment(cfg, kernels),
        host=host,
        token=token,
        gpus=None,
    )
    try:
        if has_server and _wait_until_ready(cfg.engine.start_s, process, url, token, parent):
            name = replica_name(part.replica)
            endpoint = Endpoint.announce(part.endpoint, name=name, url=url, pid=process.pid, token=token)
        while process.poll() is None and os.getppid() == parent:
            time.sleep(_POLL_S)
            if endpoint is not None and _is_removed(part.endpoint):
                print(f"{endpoint.name} hangs, by the trainer's word, and is killed", file=sys.stderr)
                kill_group(process.pid)
    finally:
        _ignore_requests()  # until the process ends, because Python restores default handlers at exit
        status = process.poll()  # before stop(), which changes it
        stop([process])
        if endpoint is not None:
            endpoint.withdraw(part.endpoint)
    if status is None:
        print(f"{replica_name(part.replica)}: the process that started it has gone", file=sys.stderr)
        return 1
    return status if status >= 0 else 128 - status


def _is_removed(path: Path) -> bool:
    try:
        path.stat()
    except FileNotFoundError:
        return True
    except OSError:  # a file system that does not answer
        return False
    return False


def _leave(sign: int, _frame: FrameType | None) -> None:
    """Exit on a signal. SystemExit unwinds the stack, which stops the server."""
    _ignore_requests()
    raise SystemExit(0)


def _ignore_requests() -> None:
    for sign in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sign, signal.SIG_IGN)


def _model_dir(cfg: RunConfig, part: Part) -> Path:
    """Write config.json and tokenizer for this replica, because the trainer may be writing its copy now."""
    return write_model_dir(cfg, part.endpoint.with_name(f"{part.endpoint.stem}.model{part.node_rank}"))


def _nodes(engine: EngineConfig, part: Part) -> dict[str, Any]:
    """Return vLLM's options for an engine that spans nodes."""
    if part.nnodes == 1:
        return {}
    if engine.data > 1:
        local = engine.data // part.nnodes
        return {
            "data-parallel-size-local": local,
            "data-parallel-start-rank": local * part.node_rank if part.node_rank else None,
            "data-parallel-address": part.master_addr,
            "data-parallel-rpc-port": part.master_port,
            "headless": part.node_rank > 0,
        }
    return {
        "nnodes": part.nnodes,
        "node-rank": part.node_rank,
        "master-addr": part.master_addr,
        "master-port": part.master_port,
        "headless": part.node_rank > 0,
        "distributed-executor-backend": "mp",
    }


def _wait_until_ready(start_s: float, process: subprocess.Popen[bytes], url: str, token: str, parent: int) -> bool:
    """Wait until the server answers; False if it or the parent ended. Raises ReplicaError after the deadline."""
    end = time.monotonic() + start_s
    while process.poll() is None and os.getppid() == parent:
        if is_healthy(url, token):
            return True
        if time.monotonic() > end:
            raise ReplicaError(
                f"the server on {socket.gethostname()} did not answer at {url} within "
                f"{start_s:g} s; raise engine.deadline_scale or see its output above"
            )
        time.sleep(_POLL_S)
    return False
