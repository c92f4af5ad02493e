"""Sources of replicas: processes that the fleet starts on this host, or endpoint files of replicas on other hosts.

Out: successive incarnations of each replica as :class:`Replica` objects, which report their end. Runs on trainer rank
0, on the fleet's event loop.

    local    started by :class:`LocalReplicas`; restarted after a death, at most ``engine.max_replica_restarts`` times
    remote   started by agents (``rollout/replica.py``); :class:`RemoteReplicas` reads their endpoint files and pings
             their ports: a replica has ended if its port is closed, its host is silent, or its file names another
             incarnation
"""

import asyncio
import contextlib
import logging
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from megatron_fp8rl.config import EngineConfig
from megatron_fp8rl.net.address import LOOPBACK
from megatron_fp8rl.net.auth import new_token
from megatron_fp8rl.net.endpoint import Endpoint, endpoint_path, replica_name
from megatron_fp8rl.rollout.errors import EXCEPTION, Exit
from megatron_fp8rl.rollout.server_process import is_stopped, kill_group, shared_memory_of, start_server, stop

_log = logging.getLogger(__name__)

_EXIT_POLL_S = 0.1
_STILL_POLL_S = 2.0
_FILE_POLL_S = 0.5
_PING_S = 0.5  # interval of pings to a remote replica
_SILENCE_S = 15.0  # a host that is silent longer is lost
_LOG_TAIL_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Replica:
    name: str
    url: str
    log_path: Path
    process_group: int  # of the server and its children; 0 on another host
    exited: asyncio.Future[Exit]  # set once it has ended
    token: str = ""  # authorizes requests to the server

    def last_log_lines(self, count: int = 15) -> str:
        """The end of the replica's log after its first exception, which usually causes vLLM's later ones."""
        return last_lines(self.log_path, count)

    @property
    def was_killed(self) -> bool:
        return self.exited.done() and self.exited.result().was_killed

    def exit_message(self, when: str = "") -> str:
        how = self.exited.result()
        return f"rollout replica {self.name} {how}{when}; {self.log_path} ends with\n{self.last_log_lines()}"


def last_lines(path: Path, count: int = 15) -> str:
    """Return the last ``count`` lines of a log, after the line of its first exception."""
    try:
        lines = _tail(path)
    except OSError as error:
        return f"(no log: {error})"
    first = _errors(lines[:-count])[:1] if count > 1 else []
    return "\n".join(f"    {line}" for line in [*first, *lines[-count:]])


def _tail(path: Path) -> list[str]:
    with path.open("rb") as log:
        log.seek(max(0, log.seek(0, 2) - _LOG_TAIL_BYTES))
        return log.read().decode(errors="replace").splitlines()


def _errors(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if EXCEPTION.search(line) and "WARNING" not in line]


def _has_no_error(path: Path) -> bool:
    """Whether the end of a log has no exception. False if there is no log."""
    try:
        return not _errors(_tail(path))
    except OSError:
        return False


class Replicas(Protocol):
    """A source of replicas. Use from one event loop."""

    starts_here: bool  # a local replica that dies during startup ends the run

    async def next(self, index: int) -> Replica | None:
        """Return replica ``index``'s next incarnation after the previous one ended; None if there is none."""

    def note_ready(self, replica: Replica) -> None:
        """Record that the replica answers."""

    def end(self, replica: Replica, how: Exit) -> None:
        """End a replica that hangs, and set its ``exited`` to ``how``."""

    def missing(self, index: int) -> str:
        """Describe why a replica does not answer, for an error message."""

    def stop(self) -> None:
        """End all processes that this source started."""


class LocalReplicas:
    """Servers on this host. ``gpus``: the value of ``CUDA_VISIBLE_DEVICES`` for each; empty on a CPU."""

    starts_here = True

    def __init__(
        self,
        engine: EngineConfig,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        log_dir: Path,
        gpus: list[str],
    ) -> None:
        self._hang_s = engine.hang_s
        self._arguments, self._environment = arguments, environment
        self._log_dir = log_dir
        self._gpus = gpus
        # Colocated: the trainer now uses the GPU memory that a restarted replica would need.
        may_restart = not gpus or engine.placement != "colocated"
        self._num_restarts_left = engine.max_replica_restarts if may_restart else 0
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._num_starts: dict[int, int] = {}
        self._shared_memory: dict[int, set[str]] = {}  # by process group; killed workers of vLLM leave these files
        self._watchers: set[asyncio.Task[None]] = set()
        self._ended: dict[int, Exit] = {}  # by process group, for replicas that end() killed

    async def next(self, index: int) -> Replica | None:
        num_starts = self._num_starts.get(index, 0)
        if num_starts:
            if not self._num_restarts_left:
                return None
            self._num_restarts_left -= 1
            _log.warning("starting %s again (%d more restarts)", replica_name(index), self._num_restarts_left)
        return self.spawn(index)

    def spawn(self, index: int) -> Replica:
        """Start a server. Call on the event loop."""
        name, num_starts = replica_name(index), self._num_starts.get(index, 0)
        self._num_starts[index] = num_starts + 1
        self._log_dir.mkdir(parents=True, exist_ok=True)
        log_path = self._log_dir / (f"{name}.restart{num_starts}.log" if num_starts else f"{name}.log")
        token = new_token()
        with log_path.open("wb") as log:
            gpus = self._gpus[index] if self._gpus else None
            process, url = start_server(
                self._arguments, self._environment, host=LOOPBACK, token=token, gpus=gpus, log=log
            )
        self._processes[index] = process
        exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()

        async def watch() -> None:
            ended = asyncio.get_running_loop().create_task(self._kill_if_stopped(name, process))
            while (code := process.poll()) is None:
                await asyncio.sleep(_EXIT_POLL_S)
            ended.cancel()
            kill_group(process.pid)  # orphans would keep the GPU memory
            self._remove_shared_memory(process.pid)
            exited.set_result(self._ended.pop(process.pid, Exit.from_returncode(code)))

        task = asyncio.get_running_loop().create_task(watch())
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)
        return Replica(name=name, url=url, log_path=log_path, process_group=process.pid, exited=exited, token=token)

    async def _kill_if_stopped(self, name: str, process: subprocess.Popen[bytes]) -> None:
        """Kill a server that is stopped (SIGSTOP) during startup. Health checks cover ready servers."""
        moved = time.monotonic()
        while process.pid not in self._shared_memory:
            await asyncio.sleep(_STILL_POLL_S)
            if not is_stopped(process.pid):
                moved = time.monotonic()
            elif (still_s := time.monotonic() - moved) > self._hang_s:
                _log.warning("%s was stopped for %.0f s during startup: killed", name, still_s)
                return kill_group(process.pid)

    def note_ready(self, replica: Replica) -> None:
        self._shared_memory[replica.process_group] = shared_memory_of(replica.process_group)

    def end(self, replica: Replica, how: Exit) -> None:
        self._ended[replica.process_group] = how
        kill_group(replica.process_group)

    def missing(self, index: int) -> str:
        log_path = max(self._log_dir.glob(f"{replica_name(index)}.*log"), key=lambda path: path.stat().st_mtime)
        return f"see {log_path}, which ends with\n{last_lines(log_path)}"

    def stop(self) -> None:
        stop(list(self._processes.values()))
        for group in list(self._shared_memory):
            self._remove_shared_memory(group)

    def _remove_shared_memory(self, group: int) -> None:
        for path in self._shared_memory.pop(group, ()):
            Path(path).unlink(missing_ok=True)


class RemoteReplicas:
    """Servers that agents started, located by endpoint files in ``<run>/replicas``."""

    starts_here = False

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._known: dict[int, Endpoint] = {}  # the last incarnation returned
        self._watchers: set[asyncio.Task[None]] = set()

    async def next(self, index: int) -> Replica | None:
        path = endpoint_path(self._run_dir, index)
        while True:
            endpoint = await asyncio.to_thread(Endpoint.read, path)
            if endpoint is not None and endpoint != self._known.get(index) and await ping(endpoint.url) is None:
                break
            await asyncio.sleep(_FILE_POLL_S)
        self._known[index] = endpoint
        exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        task = asyncio.get_running_loop().create_task(_watch(endpoint, path, exited))
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)
        return Replica(
            name=endpoint.name,
            url=endpoint.url,
            log_path=Path(endpoint.log),
            process_group=0,
            exited=exited,
            token=endpoint.token,
        )

    def note_ready(self, replica: Replica) -> None:
        """Do nothing: the replica's host cleans up its shared memory."""

    def end(self, replica: Replica, how: Exit) -> None:
        """Remove the endpoint file. The parent of the server then kills it, and the agent starts another."""
        for index, endpoint in self._known.items():
            if endpoint.name == replica.name:
                endpoint.withdraw(endpoint_path(self._run_dir, index))
        if not replica.exited.done():
            replica.exited.set_result(how)

    def missing(self, index: int) -> str:
        path = endpoint_path(self._run_dir, index)
        endpoint = Endpoint.read(path)
        state = f"{path} does not exist"
        if endpoint is not None:
            state = f"{path} names {endpoint.url} on {endpoint.host}, where nothing answers"
        logs = sorted((self._run_dir / "logs").glob(f"{replica_name(index)}.*log"))
        ends = [f"{log} ends with\n{last_lines(log)}" for log in logs]
        return "; ".join([state, *(ends or [f"it has no log in {self._run_dir / 'logs'}"])])

    def stop(self) -> None:
        """Do nothing: agents end their replicas."""


async def _watch(endpoint: Endpoint, path: Path, exited: asyncio.Future[Exit]) -> None:
    """Watch a remote replica until it has ended, and set ``exited``."""
    heard_s = time.monotonic()
    num_refusals = 0

    async def has_ended(reason: str) -> None:
        left_no_error = await asyncio.to_thread(_has_no_error, Path(endpoint.log))
        if not exited.done():
            exited.set_result(Exit(reason=reason, left_no_error=left_no_error))

    while True:
        await asyncio.sleep(_PING_S)
        newer = await asyncio.to_thread(Endpoint.read, path)
        if exited.done():
            return None
        if newer is not None and newer != endpoint:
            return await has_ended(f"was started again on {newer.host} (incarnation {newer.incarnation})")
        problem = await ping(endpoint.url)
        if exited.done():
            return None
        if problem is None:
            heard_s, num_refusals = time.monotonic(), 0
            continue
        num_refusals = num_refusals + 1 if isinstance(problem, ConnectionRefusedError) else 0
        silent_s = time.monotonic() - heard_s
        if num_refusals >= 2:
            return await has_ended(f"has ended: nothing listens at {endpoint.url} on {endpoint.host} any more")
        if silent_s > _SILENCE_S:
            return await has_ended(f"was lost: {endpoint.host} has been silent for {silent_s:.0f} s ({problem})")


async def ping(url: str) -> OSError | None:
    """Return None if a server listens at ``url``, otherwise the error of the connection."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(_SILENCE_S / 3):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except OSError as error:  # includes TimeoutError
        return error
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return None
