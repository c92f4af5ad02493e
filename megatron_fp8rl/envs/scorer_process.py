"""The trainer's handle of one scoring process (envs/score_worker.py) and its two pipes."""

import contextlib
import fcntl
import json
import os
import re
import select
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from megatron_fp8rl.envs import worker_memory

START_DEADLINE_S = 180.0  # covers importing all environments on a busy machine
_LATE_DEADLINE_S = 10.0  # the least time to read the reply, however long ago the worker started
_STDERR_TAIL_BYTES = 400
_MAX_STDERR_BYTES = 1 << 20  # limit of a scorer's output; checked once a second
MARK = "MEGATRON_FP8RL_SCORER"  # environment variable that marks a worker and its child processes
# Environment variables passed to scorers. Others, such as API keys, are withheld.
_VARIABLES = re.compile(
    r"FP8RL_RUN_DIR|PATH|HOME|USER|LANG|LC_.*|TZ|TMPDIR|LD_LIBRARY_PATH|PYTHON.*|VIRTUAL_ENV|OMP_.*|HF_HOME|"
    r"HF_.*_OFFLINE|SSL_CERT_.*|.*_(?:proxy|PROXY)|MEGATRON_FP8RL_.*|SLURM_JOB_ID"
)


class ScorePoolError(RuntimeError):
    """Scoring is impossible because a worker does not start."""


class WorkerLost(Exception):
    """A worker crashed or did not answer in time; the message completes "scorer of X ..."."""


def environ_of(names: Sequence[str]) -> dict[str, str]:
    """A worker's environment: the variables that programs need, and those in ``names``."""
    variables = {name: value for name, value in os.environ.items() if name in names or _VARIABLES.fullmatch(name)}
    # Omit this interpreter's default paths: programs started by a worker may use another interpreter.
    known = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    extra_paths = [path for path in sys.path if path and not path.startswith(known)]
    variables |= {"PYTHONPATH": os.pathsep.join(extra_paths), "CUDA_VISIBLE_DEVICES": ""}
    return {"OMP_NUM_THREADS": "1", **variables}


class Output:
    """A worker's output, in a temporary file instead of a pipe: it needs no reader, and its tail explains a crash."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        fcntl.fcntl(self.file, fcntl.F_SETFL, os.O_RDWR | os.O_APPEND)  # it is truncated while the process writes

    def bound(self) -> None:
        """Discard the output when it exceeds the limit."""
        if os.fstat(self.file.fileno()).st_size > _MAX_STDERR_BYTES:
            os.ftruncate(self.file.fileno(), 0)

    def tail(self) -> str:
        self.file.seek(max(self.file.seek(0, os.SEEK_END) - _STDERR_TAIL_BYTES, 0))
        return self.file.read().decode(errors="replace").strip()


class Worker:
    """One scoring process and its two pipes. Used by one thread at a time, except :meth:`kill`."""

    def __init__(self, greeting: Mapping[str, Any], environ: Mapping[str, str]):
        self._greeting = greeting
        self._environ = environ
        self._lock = threading.Lock()
        self._number = 0  # of the last request
        self.start()

    def start(self) -> None:
        """Start the process and send the environments, without waiting for a reply."""
        self._stderr = Output()
        self._token = os.urandom(8).hex()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron_fp8rl.envs.score_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr.file,
            env={**self._environ, MARK: self._token},
            start_new_session=True,  # separate process group, to kill all children of a scorer
            bufsize=0,
        )
        self._is_alive = True
        self._first_bytes = self._last_bytes = 0  # of its address space, after its first and its last score
        self._state = "started"  # later "ready" or the reason of the failure
        self._buffer = b""
        self._started_at = time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # reported with its reason when the reply is read
            self._send(self._greeting)

    def ensure_started(self) -> None:
        """Wait until the environments are built; a build failure is final for this process."""
        if self._state == "started":
            try:
                # The first score of a slow run is asked late, and the reply has been waiting for long.
                remaining_s = self._started_at + START_DEADLINE_S - time.monotonic()
                reply = self._receive(max(remaining_s, _LATE_DEADLINE_S))
                failure = reply.get("error", "")
            except WorkerLost as lost:
                if self.was_killed():
                    raise
                failure = f"it {lost}"
            self._state = failure or "ready"
        if self._state != "ready":
            raise ScorePoolError(f"a score worker cannot build its environments: {self._state}")

    def ask(self, request: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """Send one request and return the reply."""
        try:
            self._send(request)
        except BrokenPipeError:
            raise WorkerLost(self._exit_message()) from None
        reply = self._receive(deadline_s)
        self._last_bytes = reply["address_bytes"]
        self._first_bytes = self._first_bytes or self._last_bytes
        return reply

    @property
    def has_scored(self) -> bool:
        """Whether the process has answered a request, so that earlier scores may have left something in it."""
        return self._first_bytes > 0

    @property
    def is_nearly_full(self) -> bool:
        """Whether scores have filled most of the memory that the process may use."""
        return worker_memory.is_nearly_full(self._first_bytes, self._last_bytes, self._greeting["memory_bytes"])

    def kill(self) -> None:
        """Kill the process and its children. Once per process: its PID may be reused later."""
        with self._lock:
            if not self._is_alive:
                return
            self._is_alive = False
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            kill_marked(self._token)

    def close_pipes(self) -> None:
        """Close the file descriptors of a killed process once no thread reads them."""
        for stream in (self._process.stdin, self._process.stdout, self._stderr.file):
            stream.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        self._number += 1
        data = memoryview(json.dumps({**message, "number": self._number}).encode() + b"\n")
        while data:
            data = data[self._process.stdin.write(data) :]

    def _receive(self, deadline_s: float) -> dict[str, Any]:
        stop_at = time.monotonic() + deadline_s
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        while (reply := self._next_reply()) is None:
            remaining_s = stop_at - time.monotonic()
            if remaining_s <= 0:
                raise WorkerLost(f"did not answer within {deadline_s:.3g} s")
            if poll.poll(min(remaining_s, 1.0) * 1000):
                chunk = os.read(self._process.stdout.fileno(), 1 << 16)
                if not chunk:
                    raise WorkerLost(self._exit_message())
                self._buffer += chunk
            self._stderr.bound()
        return reply

    def _next_reply(self) -> dict[str, Any] | None:
        """The reply to the last request, or None if it has not arrived; older replies are dropped."""
        while b"\n" in self._buffer:
            line, _, self._buffer = self._buffer.partition(b"\n")
            reply = json.loads(line)
            if reply.get("number") == self._number:
                return reply
        return None

    def was_killed(self) -> bool:
        """Whether something other than :meth:`kill` sent SIGKILL or SIGSTOP to the process."""
        if (status := self._process.poll()) is not None:
            return status == -signal.SIGKILL
        return psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED

    def _exit_message(self) -> str:
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        tail = self._stderr.tail()
        return f"ended with exit code {code}" + (f": {tail}" if tail else "")


def kill_marked(token: str) -> None:
    """Kill processes that a worker started in separate sessions; its mark in their environment identifies them."""
    mark = f"{MARK}={token}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process ended or belongs to another user
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
