"""A command with everything that it starts: engines that lead sessions of their own as well.

In: a command line, a file for its output. Out: its exit status, and no process, nor a file of one in /dev/shm, that
outlives it. Follows the processes in /proc, hence Linux only.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

_POLL_S = 0.5
_LOOK_S = 1.0  # between two looks at all processes
_STRAGGLER_S = 3.0  # what is still there after its parent has ended may take so long, to clear up
_KILL_S = 15.0


class _Process(NamedTuple):
    parent: int
    session: int
    start: int  # clock ticks since boot: tells processes apart that had the same id


class ProcessTree:
    """A command in a session of its own, and its descendants as they are seen in ``poll``."""

    def __init__(self, process: subprocess.Popen[bytes]):
        self._process = process
        self._seen: dict[int, int] = {}  # id -> start
        self._asked_s: float | None = None
        self._looked_s = 0.0
        self._look()

    @classmethod
    def start(cls, command: Sequence[str], log: IO[bytes], environment: Mapping[str, str]) -> ProcessTree:
        return cls(subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            env=dict(environment),
        ))  # fmt: skip

    def poll(self) -> int | None:
        """The exit status of the command; None while it runs."""
        if time.monotonic() - self._looked_s > _LOOK_S:
            self._look()
        return self._process.poll()

    def wait(self, deadline_s: float) -> int | None:
        """The same, after the command has ended or ``deadline_s`` are over."""
        end = time.monotonic() + deadline_s
        while self.poll() is None and (left_s := end - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(min(left_s, _POLL_S))
        return self._process.poll()

    def ask(self) -> None:
        """Ask a command that still runs to end."""
        if self._asked_s is None and self._process.poll() is None:
            self._asked_s = time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)

    def ask_command(self) -> None:
        """Ask the command alone to end, which then ends by itself what it has started."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def end(self, grace_s: float) -> None:
        """Ask, and kill what is left ``grace_s`` after the question. Raises RuntimeError if anything survives that."""
        self.ask()
        if self._asked_s is None:
            self._wait_for_all(time.monotonic() + min(grace_s, _STRAGGLER_S))
        else:
            self._wait_for_all(self._asked_s + grace_s)
        shared = self._shared_memory()
        end = time.monotonic() + _KILL_S
        while left := self._look():
            if time.monotonic() > end:
                raise RuntimeError(f"processes {sorted(left)} of {self._process.args} outlive SIGKILL for {_KILL_S} s")
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.1)
            self._process.poll()  # or it stays a zombie
        for path in shared:
            path.unlink(missing_ok=True)

    def _wait_for_all(self, end: float) -> None:
        while self._look() and time.monotonic() < end:
            self._process.poll()
            time.sleep(0.1)

    def _look(self) -> set[int]:
        """Ids of the living; remembers them, so that one whose parent ends is still known."""
        table, self._looked_s = _living(), time.monotonic()
        if self._process.pid in table and not self._seen:
            self._seen[self._process.pid] = table[self._process.pid].start
        ours = {pid for pid, start in self._seen.items() if pid in table and table[pid].start == start}
        # A session keeps its id from being given to another process as long as it has members.
        sessions = {pid for pid in self._seen if pid not in table or pid in ours}
        while found := {p for p, of in table.items() if of.parent in ours or of.session in sessions} - ours:
            ours |= found
            sessions |= found
        self._seen |= {pid: table[pid].start for pid in ours}
        return ours

    def _shared_memory(self) -> set[Path]:
        """Files in /dev/shm that living processes of the tree have mapped."""
        found: set[Path] = set()
        for pid in self._look():
            with contextlib.suppress(OSError):  # it may end
                maps = Path(f"/proc/{pid}/maps").read_text()
                found |= {Path(name) for name in re.findall(r"/dev/shm/\S+(?=\n)", maps)}
        return found


def _living() -> dict[int, _Process]:
    """All processes of this machine but zombies."""
    found = {}
    for name in os.listdir("/proc"):  # thousands on a large machine
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # or it has ended
                state, parent, _, session, *rest = file.read().rpartition(b")")[2].split()
                if state not in (b"Z", b"X"):
                    found[int(name)] = _Process(int(parent), int(session), int(rest[15]))
    return found
