"""Find the complete checkpoints of a run, and damaged files in them, without loading weights or importing torch.

step_00000040/            complete; state.json lists sizes and CRC-32 of files
.partial_00000080/        being written, or left by a killed run
damaged_step_00000040/    complete, but its bytes changed after writing; kept for analysis
"""

import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

STATE_FILE = "state.json"
PARTIAL_PREFIX = ".partial_"
DAMAGED_PREFIX = "damaged_"
_NUM_THREADS = 4  # zlib releases the GIL
_CHUNK_BYTES = 8 << 20
_COMPLETE = re.compile(r"step_(\d{8,})(?:_r(\d+))?")


def complete(folder: Path) -> list[Path]:
    """Folders with the name of a complete checkpoint, oldest first."""
    if not folder.is_dir():
        return []
    matches = [(match, path) for path in folder.iterdir() if (match := _COMPLETE.fullmatch(path.name))]
    return [path for _, path in sorted(matches, key=lambda item: (int(item[0][1]), int(item[0][2] or 0)))]


def missing_part(path: Path) -> str | None:
    """Describe the missing part of a checkpoint folder; None if it is complete."""
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
    return next((path for path in reversed(complete(Path(folder))) if missing_part(path) is None), None)


def digests_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """CRC-32 (hexadecimal) by file name in ``folder``; reads several files in parallel."""
    names = list(names)
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        return dict(zip(names, threads.map(_digest, [folder / name for name in names]), strict=True))


def _digest(path: Path) -> str:
    value = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return f"{value:08x}"


def damaged_files(path: Path, share: int, num_shares: int) -> list[str]:
    """Files in this share of a complete checkpoint whose bytes differ from those that were written. Skips files without
    a digest (older and converted checkpoints). Raises OSError with the path of an unreadable file."""
    known = json.loads((path / STATE_FILE).read_text()).get("digests", {})
    names = sorted(known)[share::num_shares]
    return [name for name, digest in digests_of(path, names).items() if digest != known[name]]


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint so that it is no longer loaded; return the new path."""
    aside, attempt = path.with_name(DAMAGED_PREFIX + path.name), 1
    while aside.exists():
        aside, attempt = path.with_name(f"{DAMAGED_PREFIX}{path.name}_{attempt}"), attempt + 1
    path.rename(aside)
    return aside


def damaged(folder: Path) -> list[Path]:
    """Checkpoints that :func:`set_aside` renamed."""
    return sorted(folder.glob(f"{DAMAGED_PREFIX}*")) if folder.is_dir() else []


def make_folder(path: Path) -> None:
    """Create a folder and its parents, and sync them to disk so that they survive a power loss."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_to_disk(folder.parent)


@contextmanager
def errors_name(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError of the block that has none, such as that of a full disk in a write."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, f"{error.strerror or error}: cannot write", str(path)) from error


def sync_to_disk(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
