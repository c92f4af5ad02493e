"""Folders for sockets between processes of an engine server, which vLLM does not delete.

Folders of killed servers are removed when another server starts, or a run starts or ends on this host.
"""

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
    folders = Path(tempfile.gettempdir()).glob(f"{_PREFIX}*")
    owners = {folder: folder.name.removeprefix(_PREFIX).partition("-")[0] for folder in folders}
    return [folder for folder, pid in owners.items() if pid.isdigit() and not Path("/proc", pid).exists()]


def remove_stale() -> None:
    """Remove the folders of processes that ended."""
    for folder in stale():
        shutil.rmtree(folder, ignore_errors=True)
