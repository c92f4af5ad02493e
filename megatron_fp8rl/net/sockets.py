"""The folder for the sockets between the processes of one engine's server, which vLLM leaves behind.

A server removes its own at its end; that of a server that was killed is removed when the next one starts on this host, and
when a run begins or ends here.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "fp8rl-sockets-"


def make_folder() -> str:
    """A folder of this process."""
    remove_left()
    return tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")


def left() -> list[Path]:
    """The folders of processes that are no more."""
    found = []
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            found.append(folder)
    return found


def remove_left() -> None:
    """Remove them."""
    for folder in left():
        shutil.rmtree(folder, ignore_errors=True)
