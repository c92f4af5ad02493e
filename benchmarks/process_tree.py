"""Run a command, and end it with all of its descendants, including engines in new sessions, and their files in
/dev/shm."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

_STRAGGLER_S = 3.0  # time for descendants to end after the command has ended
_KILL_S = 15.0


def run_logged(command: Sequence[str], log: Path, limit_s: float, **environment: str) -> bool:
    """Run a command and copy its output to ``log`` and stdout; whether it succeeded within ``limit_s``. After that it
    gets SIGTERM, and SIGKILL 15 s later. Its descendants always end with it."""
    end, status = time.monotonic() + limit_s, None
    with log.open("wb") as file, log.open(encoding="utf-8", errors="replace") as shown:
        tree = ProcessTree(command, file, {**os.environ, **environment})
        try:
            while status is None and (left_s := end - time.monotonic()) > 0:
                status = tree.wait(min(1.0, left_s))
                sys.stdout.write(shown.read())
                sys.stdout.flush()
        finally:
            tree.end(_KILL_S)
    return status == 0


class ProcessTree:
    """A command in a new session, and the descendants that :meth:`wait` sees."""

    def __init__(self, command: Sequence[str], log: IO[bytes], environment: Mapping[str, str]):
        self._process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=dict(environment),
        )
        self._seen = {psutil.Process(self._process.pid)}

    def wait(self, seconds: float) -> int | None:
        """The exit status, or None if the command still runs after ``seconds``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self._look()
        return self._process.poll()

    def end(self, grace_s: float) -> None:
        """Send SIGTERM, and SIGKILL after ``grace_s``. Raises RuntimeError if a process survives."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
        else:
            grace_s = min(grace_s, _STRAGGLER_S)
        self._poll_until_gone(grace_s)
        shared: set[Path] = set()
        for process in self._look():
            with contextlib.suppress(psutil.Error):
                shared |= {Path(part.path) for part in process.memory_maps() if part.path.startswith("/dev/shm/")}
        if left := self._poll_until_gone(_KILL_S, kill=True):
            raise RuntimeError(f"{left} of {self._process.args} outlive SIGKILL for {_KILL_S} s")
        for path in shared:
            path.unlink(missing_ok=True)

    def _poll_until_gone(self, seconds: float, *, kill: bool = False) -> set[psutil.Process]:
        end = time.monotonic() + seconds
        while (left := self._look()) and time.monotonic() < end:
            for process in left if kill else ():
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.1)
            self._process.poll()  # or it stays a zombie
        return left

    def _look(self) -> set[psutil.Process]:
        """The running processes. Remembers them, because a process whose parent ends gets another parent."""
        alive = {process for process in self._seen if _is_alive(process)}
        # The system does not reuse the id of a session that has members.
        parents, sessions = {process.pid for process in alive}, {process.pid for process in self._seen}
        grown = True
        while grown:
            grown = False
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error, ProcessLookupError):
                    is_ours = process.ppid() in parents or os.getsid(process.pid) in sessions
                    if is_ours and process not in alive and _is_alive(process):
                        alive.add(process)
                        parents.add(process.pid)
                        sessions.add(process.pid)
                        grown = True
        self._seen |= alive
        return alive


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
