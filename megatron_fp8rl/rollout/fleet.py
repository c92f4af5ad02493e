"""All rollout replicas of a run: started, watched, asked and stopped.

In: the run's configuration and the folder of the Hugging Face model. Out: one :class:`EngineClient` per replica.
Which process: trainer rank 0. Each replica is a process group of its own, with a log file under ``<run>/logs``. Clients
live on an event loop in a thread of the fleet; the training loop, which is not asynchronous, goes through
:meth:`Fleet.sync`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any, TypeVar

import torch

import megatron_fp8rl
from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.rollout import engine, placement
from megatron_fp8rl.rollout.client import EngineClient, EngineDeadError, EngineDeadlineError, Replica, Sampling, Tag

_log = logging.getLogger(__name__)
T = TypeVar("T")

_EXIT_POLL_S = 0.1
_HEALTH_POLL_S = 0.25
_PROGRESS_S = 10.0
_TERM_GRACE_S = 5.0
# Set by torchrun for the trainer's own process group; an engine that inherits them believes to be one of its ranks.
_TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TORCHRUN_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")
# Chosen for the trainer's allocator and streams. Segments that expand exclude the memory pools of a sleeping engine, and
# one queue for all streams would make its copies wait for its kernels.
_TRAINER_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS")


class Fleet:
    """Build with :meth:`start`; a context manager that shuts down at its end."""

    def __init__(self, cfg: RunConfig, hf_dir: Path | str, run_dir: Path | str, *, cpu: bool) -> None:
        self.cfg = cfg
        self.clients: tuple[EngineClient, ...] = ()
        self._cpu = cpu
        self._hf_dir = Path(hf_dir)
        self._log_dir = Path(run_dir) / "logs"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._shared_memory: list[str] = []  # files that vLLM's workers made, and leave behind when killed
        self._watchers: list[asyncio.Task[None]] = []
        self._gpus: list[str] = []  # CUDA_VISIBLE_DEVICES of each replica; empty on a CPU
        self._started_s = time.monotonic()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-fleet", daemon=True)
        self._thread.start()

    @classmethod
    def start(cls, cfg: RunConfig, hf_dir: Path | str, run_dir: Path | str, *, wait: bool = True) -> Fleet:
        """Start ``cfg.rollout.num_replicas`` engines on the model in ``hf_dir`` (config.json and tokenizer).

        Waits until all answer, unless ``wait`` is False: then call :meth:`wait_until_ready` before the first use, and
        do something else meanwhile. Raises EngineDeadError or EngineDeadlineError, which name the replica and end with
        its log; nothing is left running then. Raises ConfigError before anything starts when this host has too few
        GPUs or lacks a kernel that the configuration names.
        """
        fleet = cls(cfg, hf_dir, run_dir, cpu=not torch.cuda.is_available())
        atexit.register(fleet.shutdown)
        try:
            if not fleet._cpu:
                engine.require_backends(cfg)
                local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", cfg.parallel.world_size))
                fleet._gpus = placement.assign(cfg, placement.visible_gpus(), local_ranks=local_ranks)
            fleet._spawn_all()
            if wait:
                fleet.wait_until_ready()
        except BaseException:
            fleet.shutdown()
            raise
        return fleet

    def wait_until_ready(self) -> None:
        """Return when every replica answers, at most ``rollout.start_deadline_s`` after the start."""
        deadline_s = self.cfg.rollout.start_deadline_s

        async def all_ready() -> None:
            await asyncio.gather(*(self._wait_healthy(client) for client in self.clients))

        self.sync(all_ready(), deadline_s + 2 * _PROGRESS_S)
        groups = [client.replica.process_group for client in self.clients]
        self._shared_memory = [path for group in groups for path in _shared_memory_of(group)]
        _log.info("%d rollout replicas ready after %.0f s", len(self.clients), time.monotonic() - self._started_s)

    @property
    def kernels(self) -> dict[str, str]:
        """What the engines' logs say of their kernels: {"linear": ..., "moe": ..., "attention": ...}, as far as named."""
        if not self.clients:
            return {}
        return engine.chosen_kernels(self.clients[0].replica.log_path.read_text(errors="replace"))

    def sleep(self) -> None:
        """Free the GPU memory of all replicas, as ``rollout.sleep_level`` says; at level 0 and when asleep, nothing.

        Nothing may be sampled meanwhile. Raises what the calls of a client raise, within its deadlines.
        """
        if self.cfg.rollout.sleep_level:
            self._everywhere(lambda client: client.sleep(self.cfg.rollout.sleep_level))

    def wake(self, *tags: Tag) -> None:
        """Bring back memory of all replicas: "weights", "kv_cache", or all without tags. What is awake stays so.

        Weights of level 2 have no values until the next publication.
        """
        self._everywhere(lambda client: client.wake_up(*tags))

    def _everywhere(self, call: Callable[[EngineClient], Coroutine[Any, Any, None]]) -> None:
        async def all_clients() -> None:
            await asyncio.gather(*(call(client) for client in self.clients))

        self.sync(all_clients(), 3 * self.cfg.rollout.update_deadline_s)  # a client makes up to three calls

    def sync(self, coroutine: Coroutine[Any, Any, T], deadline_s: float) -> T:
        """Run ``coroutine`` on the fleet's event loop and return its result. Not from that loop itself.

        Raises TimeoutError, naming the coroutine, after ``deadline_s``; the coroutine is cancelled then.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout=deadline_s)
        except FutureTimeoutError:
            if future.done():  # the coroutine's own TimeoutError
                raise
            future.cancel()
            raise TimeoutError(f"{coroutine.__qualname__} took longer than {deadline_s:g} s") from None
        except BaseException:
            future.cancel()
            raise

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start ``coroutine`` on the fleet's event loop and leave it running."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def shutdown(self) -> None:
        """Stop all replicas and the event loop. May be called again."""
        atexit.unregister(self.shutdown)
        if not self._thread.is_alive():
            return
        with contextlib.suppress(Exception):
            self.sync(self._cancel_all(), _TERM_GRACE_S)
        _stop(self._processes)
        for path in self._shared_memory:
            Path(path).unlink(missing_ok=True)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_TERM_GRACE_S)
        self._loop.close()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _spawn_all(self) -> None:
        from transformers import AutoTokenizer

        self._log_dir.mkdir(parents=True, exist_ok=True)
        replicas = [self._spawn(index) for index in range(self.cfg.rollout.num_replicas)]
        tokenizer = AutoTokenizer.from_pretrained(self._hf_dir)  # while the engines import

        def decode(token_ids: Sequence[int]) -> str:
            return tokenizer.decode(token_ids, skip_special_tokens=True)

        async def build() -> tuple[EngineClient, ...]:
            return tuple(
                EngineClient(
                    self._watched(*replica),
                    sampling=Sampling.of(self.cfg.rollout, tokenizer.eos_token_id),
                    decode=decode,
                    request_deadline_s=self.cfg.rollout.request_deadline_s,
                    update_deadline_s=self.cfg.rollout.update_deadline_s,
                )
                for replica in replicas
            )

        self.clients = self.sync(build(), 10.0)

    def _spawn(self, index: int) -> tuple[str, str, Path, subprocess.Popen[bytes]]:
        """(name, url, log file, process) of a new replica. It inherits a bound socket: no port is free by guess."""
        name = f"rollout-{index}"
        log_path = self._log_dir / f"{name}.log"
        arguments = engine.engine_arguments(self.cfg, self._hf_dir, cpu=self._cpu)
        with socket.socket() as sock, log_path.open("wb") as log:
            sock.bind(("127.0.0.1", 0))
            process = subprocess.Popen(
                engine.server_command(arguments, listen_fd=sock.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(sock.fileno(),),
                env=self._environment(index),
                start_new_session=True,
            )
            url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        self._processes.append(process)
        return name, url, log_path, process

    def _environment(self, index: int) -> dict[str, str]:
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in (*_TORCHRUN_VARIABLES, *_TRAINER_VARIABLES) and not name.startswith(_TORCHRUN_PREFIXES)
        }
        package_root = str(Path(megatron_fp8rl.__file__).parents[1])
        if self._gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self._gpus[index]
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = package_root if not inherited else f"{package_root}{os.pathsep}{inherited}"
        return environment | engine.engine_environment(self.cfg, cpu=self._cpu)

    def _watched(self, name: str, url: str, log_path: Path, process: subprocess.Popen[bytes]) -> Replica:
        """The replica with a future that becomes its exit code. Call on the loop."""
        exited: asyncio.Future[int] = self._loop.create_future()

        async def watch() -> None:
            while (code := process.poll()) is None:
                await asyncio.sleep(_EXIT_POLL_S)
            exited.set_result(code)

        replica = Replica(name=name, url=url, log_path=log_path, process_group=process.pid, exited=exited)
        self._watchers.append(self._loop.create_task(watch()))
        return replica

    async def _wait_healthy(self, client: EngineClient) -> None:
        limit_s = self.cfg.rollout.start_deadline_s
        next_report_s = _PROGRESS_S
        while (waited_s := time.monotonic() - self._started_s) < limit_s:
            if await _answers(client):
                return
            if waited_s >= next_report_s:
                next_report_s += _PROGRESS_S
                last_line = client.replica.last_log_lines(1).strip()
                _log.info("%s is starting (%.0f of at most %g s): %s", client.name, waited_s, limit_s, last_line)
            await asyncio.sleep(_HEALTH_POLL_S)
        replica = client.replica
        raise EngineDeadlineError(
            f"rollout replica {replica.name} did not start within {limit_s:g} s; raise rollout.start_deadline_s or "
            f"look into {replica.log_path}, which ends with\n{replica.last_log_lines()}"
        )

    async def _cancel_all(self) -> None:
        for client in self.clients:
            await client.close()
        current = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not current]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answers(client: EngineClient) -> bool:
    """Whether the server listens and is healthy. Raises EngineDeadError when its process has ended."""
    replica = client.replica
    if replica.exited.done():
        raise EngineDeadError(
            f"rollout replica {replica.name} died with exit code {replica.exited.result()} while it started; "
            f"{replica.log_path} ends with\n{replica.last_log_lines()}"
        )
    port = int(replica.url.rpartition(":")[2])
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False  # bound, not yet listening
    writer.close()
    await client.health()
    return True


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """End process groups: a request first, so that vLLM can remove its shared memory, then by force."""
    for sign, grace_s in ((signal.SIGTERM, _TERM_GRACE_S), (signal.SIGKILL, _TERM_GRACE_S)):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
        deadline = time.monotonic() + grace_s
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))


def _shared_memory_of(group: int) -> set[str]:
    """Files in /dev/shm that the processes of a group have mapped."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # a process may end, or belong to someone else
            if os.getpgid(int(maps.parent.name)) == group:
                found |= set(re.findall(r"/dev/shm/\S+(?=\n)", maps.read_text()))
    return found
