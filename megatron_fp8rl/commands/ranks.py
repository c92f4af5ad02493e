"""Run a program in this process, or on one process per trainer rank, and turn its errors into an exit status."""

import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megatron_fp8rl.config import ConfigError, EngineConfig, ParallelConfig, RunConfig
from megatron_fp8rl.kernels import compile_cache
from megatron_fp8rl.observe.other_packages import keep_in_log
from megatron_fp8rl.observe.spans import STARTED, add_seconds, span
from megatron_fp8rl.runtime.stop import run_ranks


def run_with_status(program: Callable[[], int | None]) -> int:
    """Run a program and return its status; on a ConfigError, print the error and return 2."""
    try:
        return program() or 0
    except ConfigError as error:
        print(f"python -m megatron_fp8rl: {error}", file=sys.stderr)
        return 2


def has_to_start_ranks(parallel: ParallelConfig) -> bool:
    return parallel.world_size > 1 and "RANK" not in os.environ


def on_every_rank(cfg: RunConfig, program: Callable[[], None]) -> int:
    """Run in this process, or start torchrun on this machine if :func:`has_to_start_ranks`."""
    parallel = cfg.parallel
    compile_cache.use(cfg.run_dir)
    if has_to_start_ranks(parallel):
        torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {parallel.world_size} -m megatron_fp8rl"
        command = [sys.executable, *torchrun.split(), *sys.argv[1:]]
        cores = max(1, (os.cpu_count() or 1) // parallel.world_size)
        environment = {"OMP_NUM_THREADS": str(cores), **os.environ}
        return run_ranks(command, environment, hang_s=2 * cfg.engine.hang_s)
    add_seconds("start_command", time.time() - float(os.environ.get(STARTED, time.time())))
    keep_in_log(Path(cfg.run_dir, "logs"), int(os.environ.get("RANK", "0")))
    for handler in (logging.getLogger("megatron_fp8rl"), logging.lastResort):
        handler.setLevel(logging.INFO)  # a log is not silent while engines start
    with span("start_imports"):
        import torch

    if not torch.cuda.is_available():
        # Set before importing Megatron-Core and vLLM, so that their compiled functions need no compiler on a CPU.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    return run_with_status(program)


def longest_wait_s(engine: EngineConfig) -> float:
    """Timeout between trainer ranks: rank 0 may wait for engines to start, to sample and to be updated."""
    return max(600.0, engine.start_s + engine.request_s + engine.update_s)
