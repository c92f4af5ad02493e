"""One rollout replica: vLLM's OpenAI API server, started by the fleet.

In: vLLM's command line, and ``--listen-fd``, a socket that the fleet has bound, so that no other process takes the port
during imports. Out: vLLM's HTTP endpoints, including those of its development mode, and our sampling route
(``generate_route.py``). Runs in the replica's process; vLLM starts the engine core and the workers from it.

    python -m megatron_fp8rl.rollout.vllm_plugin.server --listen-fd 7 --parent-pid 4711 --model DIR ...

With ``--headless`` it runs only workers, on a further node of an engine that spans nodes. Unlike in ``vllm serve``, our
plugin is registered before the engine starts, and all processes end with the trainer that started them. On a CPU the
engine core is forked instead of spawned, which saves a second import (11 s of a start of 14 s).
"""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import shutil
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_fp8rl import upstream
from megatron_fp8rl.net import parent, sockets
from megatron_fp8rl.upstream import patches

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_MIDDLEWARE = "megatron_fp8rl.net.auth.RequireToken"


def end_with_parent(pid: int) -> None:
    """Kill this process group when its parent ``pid`` ends, and make forked children end with this process. A killed
    trainer cannot stop its replicas, which lead their process groups."""
    parent.end_with(pid)
    os.register_at_fork(after_in_child=parent.end_with_thread)  # children are forked by the main thread


@patches(
    "vllm",
    why="the CPU platform selects spawn when it builds the configuration; a forked engine core starts 11 s earlier",
    remove_when="the platform stops overwriting VLLM_WORKER_MULTIPROC_METHOD",
    optional=True,
)
def fork_engine_core() -> None:
    """Make vLLM fork the engine core, which then shares the modules imported so far. Safe on a CPU before the engine
    starts: one OpenMP thread, no model, no request."""
    gc.freeze()  # garbage collection would write to, and so copy, shared pages
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


def _engine_config(args: argparse.Namespace) -> VllmConfig:
    """Build the engine's configuration, and on a CPU prepare this process to fork the engine core."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    from megatron_fp8rl.rollout.vllm_plugin import patches as vllm_patches

    if upstream.applies("inspect_classes_in_forks"):
        vllm_patches.inspect_classes_in_forks()
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(
        usage_context=UsageContext.OPENAI_API_SERVER, headless=bool(args.headless)
    )
    if current_platform.is_cpu() and upstream.applies("fork_engine_core"):
        fork_engine_core()
    return config


@patches(
    "vllm",
    why="run_headless spawns a further node's workers, which cannot pickle a local class, and ends with status 0",
    remove_when="run_headless forks, and reports that a worker has ended",
)
def work(config: VllmConfig) -> NoReturn:
    """Run this node's part of an engine that spans nodes: data-parallel ranks, or workers of the only rank.

    Exits with status 1 when a process has ended. vLLM's ``run_headless`` would exit with status 0. It would also spawn
    processes, which fails because our kernels' configuration is a local class.
    """
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if config.parallel_config.data_parallel_size > 1:
        manager = _data_parallel_ranks(config)
        try:
            manager.monitor_engine_liveness()
        finally:
            manager.shutdown()
        sys.exit(1)
    executor = MultiprocExecutor(config, monitor_workers=False)
    executor.start_worker_monitor(inline=True)
    sys.exit(1)


def _data_parallel_ranks(config: VllmConfig) -> Any:
    """Start this node's data-parallel ranks, which report to the first node."""
    from vllm.utils.network_utils import get_tcp_uri
    from vllm.v1.engine.utils import CoreEngineProcManager
    from vllm.v1.executor.abstract import Executor

    parallel = config.parallel_config
    return CoreEngineProcManager(
        local_engine_count=parallel.data_parallel_size_local,
        start_index=parallel.data_parallel_rank,
        local_start_index=0,
        vllm_config=config,
        local_client=False,
        handshake_address=get_tcp_uri(parallel.data_parallel_master_ip, parallel.data_parallel_rpc_port),
        executor_class=Executor.get_class(config),
        log_stats=False,
    )


async def serve(args: argparse.Namespace, config: VllmConfig, sock: socket.socket) -> None:
    """Start the engine and answer requests until a signal ends the server."""
    from vllm import envs
    from vllm.usage.usage_lib import UsageContext

    from megatron_fp8rl.rollout.vllm_plugin import generate_route, vllm_imports
    from megatron_fp8rl.rollout.vllm_plugin import patches as vllm_patches

    engine = vllm_patches.engine_class().from_vllm_config(
        config, usage_context=UsageContext.OPENAI_API_SERVER, disable_log_stats=args.disable_log_stats
    )
    try:
        tasks = await engine.get_supported_tasks()
        app = vllm_imports.build_app(args, tasks, engine.model_config)
        await vllm_imports.init_app_state(engine, app.state, args, tasks)
        app.include_router(generate_route.router)
        shutdown = await vllm_imports.serve_http(
            app,
            sock=sock,
            host=args.host,
            port=args.port,  # requested when the server ends
            log_level=args.uvicorn_log_level,
            access_log=not args.disable_uvicorn_access_log,
            timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        )
        await shutdown
    finally:
        engine.shutdown()
        sock.close()


def main(argv: list[str]) -> None:
    ours = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    ours.add_argument("--listen-fd", type=int, required=True)
    ours.add_argument(
        "--parent-pid", type=int, required=True
    )  # because getppid() is wrong if the parent has just ended
    known, rest = ours.parse_known_args(argv)
    end_with_parent(known.parent_pid)
    upstream.check()  # before vLLM is imported
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm sends it to every process before a time limit
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # trainer ranks block it
    sock = socket.socket(fileno=known.listen_fd)
    os.environ["VLLM_RPC_BASE_PATH"] = folder = sockets.make_folder()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    gc.disable()  # during imports, which rarely free objects; saves 3 s of CPU time

    from megatron_fp8rl.rollout import deep_gemm_warmup

    compiling = deep_gemm_warmup.start_from_env()  # while this process imports torch and vLLM
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a pool of OpenMP threads does not survive a fork
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(num_threads))

    import uvloop
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.utils.system_utils import set_ulimit

    from megatron_fp8rl.rollout.vllm_plugin import plugin, vllm_imports

    plugin.register()
    args = vllm_imports.make_arg_parser(
        FlexibleArgumentParser(prog="megatron_fp8rl.rollout.vllm_plugin.server")
    ).parse_args(rest)
    args.middleware.append(_MIDDLEWARE)
    vllm_imports.validate_parsed_serve_args(args)
    vllm_imports.validate_api_server_args(args)
    set_ulimit()
    gc.enable()
    config = _engine_config(args)
    if compiling is not None:
        compiling.wait()  # has a deadline; must free GPU memory before the engine measures it
    if args.headless:
        work(config)
    uvloop.run(serve(args, config, sock))


if __name__ == "__main__":
    main(sys.argv[1:])
