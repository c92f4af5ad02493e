"""Runs the vLLM servers of a run's reward models.

In: the rewards ``model`` with a folder. Out: one server for each model, on separate GPUs, and its endpoint file, which
score workers read (``envs/rewards/scalar.py``). Runs in a thread of trainer rank 0. A server that ends is started
again; its completions wait for it within their deadlines.
"""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_fp8rl.config import ConfigError, EngineConfig, RewardConfig, RunConfig, Violation
from megatron_fp8rl.envs.rewards import scalar
from megatron_fp8rl.net import auth
from megatron_fp8rl.net.address import LOOPBACK
from megatron_fp8rl.net.endpoint import Endpoint
from megatron_fp8rl.precision.hardware import local_hardware
from megatron_fp8rl.rollout import placement, vllm_args
from megatron_fp8rl.rollout.replicas import last_lines
from megatron_fp8rl.rollout.server_process import is_healthy, start_server, stop

_POLL_S = 0.25


class RewardServerError(RuntimeError):
    """The server of a reward model did not start; the message ends with its log."""


@contextmanager
def serving(cfg: RunConfig) -> Iterator[None]:
    """Context manager: serve the run's reward models. The block begins when all servers answer. Raises ConfigError
    without a free GPU, and RewardServerError if a server does not start."""
    rewards = scalar.served(cfg.data.environments)
    os.environ[scalar.SERVERS] = scalar.servers_of(cfg.run_dir)  # score workers inherit it
    if not rewards:
        yield
        return
    gpus = _gpus(cfg.engine, cfg.parallel.world_size, rewards) if local_hardware().is_gpu else [None] * len(rewards)
    servers = [_Server(cfg.run_dir, cfg.engine, reward, gpu) for reward, gpu in zip(rewards, gpus, strict=True)]
    try:
        for server in servers:
            server.wait_until_ready()
        yield
    finally:
        for server in servers:
            server.close()


class _Server:
    """One server, and the thread that restarts it."""

    def __init__(self, run_dir: str, engine: EngineConfig, reward: RewardConfig, gpus: str | None):
        self._engine, self._gpus = engine, gpus
        self._options = {"precision": "bf16", "memory_share": 0.85, "max_tokens": None, **reward.options}
        self._path = scalar.endpoint_file(self._options["folder"], self._options["precision"])
        self._log = Path(run_dir, "logs", f"{self._path.stem}.log")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._path.unlink(missing_ok=True)
        self._closed = threading.Event()
        self._starts()
        self._keeper = threading.Thread(target=self._keep, name=self._path.stem, daemon=True)

    def wait_until_ready(self) -> None:
        """Wait until the server answers; it is restarted from then on. Raises RewardServerError."""
        self._announce_when_ready()
        if Endpoint.read(self._path) is None:
            raise RewardServerError(
                f"the server of the reward model {self._options['folder']} did not start within "
                f"{self._engine.start_s:g} s; raise engine.deadline_scale, or see {self._log}, which ends with\n"
                f"{last_lines(self._log)}"
            )
        self._keeper.start()

    def close(self) -> None:
        self._closed.set()
        if self._keeper.is_alive():
            self._keeper.join(10.0)
        stop([self._process])
        self._path.unlink(missing_ok=True)

    def _starts(self) -> None:
        self._token = auth.new_token()
        is_gpu = self._gpus is not None
        environment = {"VLLM_NO_USAGE_STATS": "1"}
        if not is_gpu:
            environment |= vllm_args.CPU_ENVIRONMENT | {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        arguments = _arguments(self._options, is_gpu)
        with self._log.open("ab") as log:
            self._process, self._url = start_server(
                arguments, environment, host=LOOPBACK, token=self._token, gpus=self._gpus, log=log
            )

    def _announce_when_ready(self) -> None:
        end = time.monotonic() + self._engine.start_s
        while self._process.poll() is None and not self._closed.is_set() and time.monotonic() < end:
            if is_healthy(self._url, self._token):
                name = self._path.stem
                Endpoint.announce(self._path, name=name, url=self._url, pid=self._process.pid, token=self._token)
                return
            time.sleep(_POLL_S)

    def _keep(self) -> None:
        for _ in range(self._engine.max_replica_restarts):
            while self._process.poll() is None:
                if self._closed.wait(_POLL_S):
                    return
            if self._closed.is_set():
                return
            self._path.unlink(missing_ok=True)
            stop([self._process])
            self._starts()
            self._announce_when_ready()


def _arguments(options: dict[str, Any], is_gpu: bool) -> dict[str, Any]:
    """Return vLLM's command-line options in the form of :func:`vllm_args.engine_arguments`."""
    arguments: dict[str, Any] = {
        "model": str(Path(options["folder"]).expanduser().resolve()),
        "runner": "pooling",
        "convert": "classify",
        "pooler-config": {"use_activation": False},
        "dtype": "bfloat16",
        "quantization": "fp8" if options["precision"] == "fp8" else None,
        "max-model-len": options["max_tokens"],
        "disable-uvicorn-access-log": True,
        "disable-log-stats": True,
        "disable-fastapi-docs": True,
    }
    if is_gpu:
        return arguments | {"gpu-memory-utilization": options["memory_share"]}
    return arguments | {
        "enforce-eager": True,
        "kv-cache-memory-bytes": 256 << 20,
        "distributed-executor-backend": "uni",
    }


def _gpus(engine: EngineConfig, world_size: int, rewards: Sequence[RewardConfig]) -> list[str]:
    """Return ``CUDA_VISIBLE_DEVICES`` for each server. Raises ConfigError without a free GPU."""
    visible = placement.visible_gpus()
    num_used = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    num_used += engine.num_replicas * engine.ranks if engine.placement == "separate" else 0
    free, assigned = iter(visible[num_used:]), []
    for reward in rewards:
        gpu = reward.options.get("gpus") or next(free, None)
        if gpu is None:
            problem = f"its server needs a GPU, but trainer and engines use all {len(visible)} of this host"
            remedy = "Set options.gpus and options.memory_share to share one, or options.url to use another server"
            raise ConfigError([Violation("data.environments.rewards.options.gpus", "", problem, remedy)])
        assigned.append(str(gpu))
    return assigned
