"""Finds the complete checkpoints of a run by the names and sizes of files, without reading weights.

In: the folder of a run's checkpoints. Out: the complete ones. Runs in any process; no torch, no Megatron-Core.

    step_00000040/       complete, otherwise it would not have this name; state.json lists the sizes of its files
    .partial_00000080/   being written, or left by a run that was killed
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

STATE_FILE = "state.json"
PARTIAL_PREFIX = ".partial_"
_COMPLETE = re.compile(r"step_(\d{8,})(?:_r(\d+))?")


def complete(folder: Path) -> list[Path]:
    """Folders named as complete checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    found = [(match, path) for path in folder.iterdir() if (match := _COMPLETE.fullmatch(path.name))]
    return [path for _, path in sorted(found, key=lambda item: (int(item[0][1]), int(item[0][2] or 0)))]


def missing_part(path: Path) -> str | None:
    """What a checkpoint folder lacks; None if it is complete."""
    try:
        files = json.loads((path / STATE_FILE).read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"{STATE_FILE} cannot be read ({error})"
    for name, size in files.items():
        file = path / name
        if not file.is_file():
            return f"file {name} is missing"
        if file.stat().st_size != size:
            return f"file {name} has {file.stat().st_size} bytes instead of {size}"
    return None


def latest(folder: str | Path) -> Path | None:
    """The newest complete checkpoint in ``folder``, ignoring damaged and partial ones; None if there is none."""
    for path in reversed(complete(Path(folder))):
        if missing_part(path) is None:
            return path
    return None


def sync_to_disk(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
