"""End a process together with its parent, however the parent ends."""

import ctypes
import os
import signal
import threading
import time

_POLL_S = 0.5
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)  # loaded before any fork


def end_with(parent: int) -> None:
    """Kill this process and its group when its parent ends. Polls, because the kernel's signal (PR_SET_PDEATHSIG)
    follows the *thread* that started the process."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_S)
        if os.getpgid(0) == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def end_with_thread() -> None:
    """In a newly forked process: let the kernel kill it when the thread that started it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
