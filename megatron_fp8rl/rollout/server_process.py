"""Starts and stops the server process of one rollout replica.

In: vLLM's options and environment, an address to listen on. Out: a process group and a URL. Runs on trainer rank 0 for
replicas of the same host, and in ``rollout/replica.py`` on other hosts.
"""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import psutil

import megatron_fp8rl
from megatron_fp8rl.net import auth
from megatron_fp8rl.rollout import vllm_args

TERM_GRACE_S = 5.0
# torchrun sets these for the trainer. An engine that inherits them would act as a trainer rank.
_TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TORCHRUN_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")
# Settings for the trainer's terminal, allocator and streams. An engine logs all warnings. Expandable segments do not
# support the memory pools of a sleeping engine, and with a single queue for all streams, copies would wait for kernels.
_TRAINER_VARIABLES = (
    "TORCH_CPP_LOG_LEVEL",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "CUDA_DEVICE_MAX_CONNECTIONS",
)


def start_server(
    arguments: Mapping[str, Any],
    environment: Mapping[str, str],
    *,
    host: str,
    token: str,
    gpus: str | None,
    log: IO[bytes] | None = None,
) -> tuple[subprocess.Popen[bytes], str]:
    """Start a server as leader of a process group, with a socket bound here; return (process, url).

    ``arguments`` and ``environment`` come from ``vllm_args``. ``gpus`` is its ``CUDA_VISIBLE_DEVICES``; None: that of
    this process. Without ``log`` it writes to this process's output.
    """
    with socket.socket() as sock:
        sock.bind((host, 0))
        process = subprocess.Popen(
            vllm_args.server_command(arguments, listen_fd=sock.fileno()),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT if log is not None else None,
            pass_fds=(sock.fileno(),),
            env=_environment(environment, token, gpus),
            start_new_session=True,
        )
        return process, f"http://{host}:{sock.getsockname()[1]}"


def inherited() -> dict[str, str]:
    """Return this process's environment without variables of the trainer, and with this package importable."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in (*_TORCHRUN_VARIABLES, *_TRAINER_VARIABLES) and not name.startswith(_TORCHRUN_PREFIXES)
    }
    package_root, search_path = str(Path(megatron_fp8rl.__file__).parents[1]), environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = package_root if not search_path else f"{package_root}{os.pathsep}{search_path}"
    return environment


def _environment(engine: Mapping[str, str], token: str, gpus: str | None) -> dict[str, str]:
    environment = inherited() | {auth.TOKEN_VARIABLE: token}
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpus
    return environment | engine


def is_healthy(url: str, token: str) -> bool:
    """Whether a server answers."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=5.0)
    with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
        connection.request("GET", "/health", headers=auth.headers(token))
        return connection.getresponse().status == http.client.OK
    return False


def stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End process groups: by SIGTERM, so that vLLM can remove its shared memory, then by SIGKILL."""
    for sign, grace_s in ((signal.SIGTERM, TERM_GRACE_S), (signal.SIGKILL, TERM_GRACE_S)):
        for process in processes:
            kill_group(process.pid, sign)
        deadline = time.monotonic() + grace_s
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))


def kill_group(group: int, sign: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, sign)


def is_stopped(server: int) -> bool:
    """Whether a server, or one of its children, is stopped, as by SIGSTOP."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(server)
        return any(member.status() == psutil.STATUS_STOPPED for member in (process, *process.children()))
    return False


def shared_memory_of(group: int) -> set[str]:
    """Return the files in /dev/shm that the processes of a group have mapped."""
    files: set[str] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # a process may have ended, or belong to another user
            if os.getpgid(process.pid) == group:
                files |= {mapped.path for mapped in process.memory_maps() if mapped.path.startswith("/dev/shm/")}
    return files
