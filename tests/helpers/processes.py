"""Waiting for what other processes do, which takes its time on a busy machine, and whether they run."""

import time
from collections.abc import Callable
from pathlib import Path

DEADLINE_S = 150.0  # far beyond what anything here takes, on a machine whose cores are shared by many


def until(condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait until a condition holds. Raises AssertionError with its name after ``deadline_s`` seconds."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, f"waited {deadline_s:g} s for {what}"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether a process runs. A zombie does not: in a container its parent may never wait for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:  # it may end between the opening of the file and the reading
        return False
