"""Processes that end with the one that started them, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

_POLL_S = 0.5
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)  # loaded before any fork


def end_with(parent: int) -> None:
    """Kill this process, and the group that it may lead, when its parent is gone. Polls: the kernel's own signal
    (PR_SET_PDEATHSIG) follows the *thread* that started a process, and threads end."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_S)
        if os.getpgid(0) == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def end_with_thread() -> None:
    """In a process that was just forked: it is killed when the thread that started it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
