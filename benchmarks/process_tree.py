"""A command with everything that it starts: engines that lead sessions of their own as well.

In: a command line, a file for its output. Out: its exit status, and no process, nor a file of one in /dev/shm, that
outlives it.
"""

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

_STRAGGLER_S = 3.0  # what is still there after its parent has ended may take so long, to clear up
_KILL_S = 15.0


def run_logged(command: Sequence[str], log: Path, limit_s: float, **environment: str) -> bool:
    """Run a command with its output in ``log`` and here; whether it ended well within ``limit_s``.

    Too late a command is asked to end and killed 15 s later. What it started ends with it in any case.
    """
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
    """A command in a session of its own, and its descendants as they are seen in :meth:`wait`."""

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
        """The exit status, after the command has ended or ``seconds`` are over; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self._look()
        return self._process.poll()

    def end(self, grace_s: float) -> None:
        """Ask, and kill what is left after ``grace_s``. Raises RuntimeError if anything survives that."""
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
        """The living; remembers them, so that one whose parent ends is still known."""
        alive = {process for process in self._seen if _is_alive(process)}
        # A session keeps its id from being given to another process as long as it has members.
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
