"""Folders for sockets between processes of an engine server. vLLM does not delete these sockets.

A server removes its folder when it ends. Folders of killed servers are removed when another server starts on this host,
or when a run starts or ends here.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "fp8rl-sockets-"


def make_folder() -> str:
    """Create a folder for this process."""
    remove_stale()
    return tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")


def stale() -> list[Path]:
    """Folders of processes that ended."""
    found = []
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            found.append(folder)
    return found


def remove_stale() -> None:
    """Remove the folders of processes that ended."""
    for folder in stale():
        shutil.rmtree(folder, ignore_errors=True)
