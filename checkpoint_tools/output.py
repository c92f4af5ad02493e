"""A folder that appears under its name only when it is complete, and that an interrupted program goes on to fill.

In:  the name of the folder, and what decides its content. Out: a partial folder beside it, with a journal of the
     buckets of work that are done; in the end the folder. Runs in the process of the command; its workers write into
     the partial folder.

    .NAME.partial/.journal    one line for what decides the content, one for every finished bucket
    .NAME.partial/.lock       held while a program writes
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checkpoint_tools import digests
from checkpoint_tools.errors import CheckpointError

_JOURNAL, _LOCK = ".journal", ".lock"
_SPACE_MARGIN_BYTES = 16 << 20  # for everything but weights


class Output:
    """A folder under construction. Make it with :func:`output_folder`."""

    def __init__(self, path: Path, partial: Path, done: dict[int, dict[str, Any]]):
        self.path = path
        self.partial = partial
        self.done = done  # what finished buckets recorded, by their index; those of an interrupted run included

    def record(self, bucket: int, result: dict[str, Any]) -> None:
        """Note that a bucket is on disk and verified. Survives a crash of the machine."""
        self.done[bucket] = result
        with open(self.partial / _JOURNAL, "a") as stream:
            stream.write(json.dumps({"bucket": bucket, "result": result}, separators=(",", ":")) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def commit(self) -> None:
        """Give the folder its name, in place of an older folder of that name, which is deleted last."""
        (self.partial / _JOURNAL).unlink()
        for file in self.partial.iterdir():
            sync(file)
        sync(self.partial)
        old = self.path.with_name(f".{self.path.name}.replaced")
        shutil.rmtree(old, ignore_errors=True)
        if self.path.exists():
            os.rename(self.path, old)
        os.rename(self.partial, self.path)
        (self.path / _LOCK).unlink()  # held up to here: nobody else may take the folder for an interrupted one
        sync(self.path.parent)
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def output_folder(path: str | Path, decides: Mapping[str, Any], *, overwrite: bool, num_bytes: int) -> Iterator[Output]:
    """Open the partial folder of ``path``: what an interrupted run left if ``decides`` (JSON) is the same, else empty.

    ``num_bytes`` of weights are to be written. Raises CheckpointError when the folder exists and is not to be replaced,
    when another program is writing it, when it cannot be written, and when the disk is too small or becomes full: what
    is done stays then, and the same command goes on from there.
    """
    path = Path(os.path.realpath(path))  # where a link points, beside which there is room, too
    _require_free(path, decides, overwrite)
    partial = path.with_name(f".{path.name}.partial")
    try:
        try:
            partial.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"cannot be written: {error.filename}: {error.strerror}. Choose another folder"
            raise CheckpointError(path, problem) from error
        with open(partial / _LOCK, "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise CheckpointError(path, "another program is writing it; wait for it, or stop it first") from error
            _require_free(path, decides, overwrite)  # again: the other program may just have finished
            output = Output(path, partial, _resume(partial, json.loads(json.dumps(decides))))
            try:
                _require_space(partial, num_bytes)
                yield output
            except BaseException:
                if not output.done:
                    shutil.rmtree(partial, ignore_errors=True)  # there is nothing to go on from
                raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free, needed = shutil.disk_usage(partial.parent).free, num_bytes + _SPACE_MARGIN_BYTES
        raise CheckpointError(
            path,
            f"the disk is full: {needed / 1e9:.2f} GB are needed in all, {free / 1e9:.2f} GB are free. Nothing was "
            "written under this name; make room and run the same command again, it goes on from what is done",
        ) from error


def _require_free(path: Path, decides: Mapping[str, Any], overwrite: bool) -> None:
    """Nothing but an earlier result may lie under the name, and not the source."""
    source = Path(decides["source"][0])
    if path.resolve() in (source, *source.parents):
        raise CheckpointError(path, f"is, or holds, the source {source}; choose another name")
    if source in path.parents:
        raise CheckpointError(path, f"lies inside the source {source}; choose another folder")
    if not path.exists():
        return
    if not overwrite:
        raise CheckpointError(path, "exists already; choose another name, or replace it with --overwrite")
    if not path.is_dir() or (any(path.iterdir()) and not (path / digests.FILE).is_file()):
        raise CheckpointError(
            path, f"is not a folder that these tools made (no {digests.FILE}); remove it first, or choose another name"
        )


def _resume(partial: Path, decides: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Buckets that an earlier run finished; the folder is emptied when it was to hold something else."""
    journal = partial / _JOURNAL
    lines = journal.read_bytes().split(b"\n")[:-1] if journal.exists() else []  # a last line without an end is cut off
    try:
        entries = [json.loads(line) for line in lines]
    except ValueError:
        entries = []
    if entries and entries[0] == decides:
        return {entry["bucket"]: entry["result"] for entry in entries[1:]}
    for file in partial.iterdir():
        if file.name != _LOCK:
            shutil.rmtree(file) if file.is_dir() else file.unlink()
    journal.write_text(json.dumps(decides) + "\n")
    sync(journal)
    return {}


def _require_space(partial: Path, num_bytes: int) -> None:
    present = sum(file.stat().st_blocks * 512 for file in partial.iterdir() if file.is_file())
    if shutil.disk_usage(partial).free + present < num_bytes + _SPACE_MARGIN_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def sync(path: Path) -> None:
    """Have a file or folder reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fingerprint(files: list[Path]) -> list[list[Any]]:
    """What changes when a source changes: names, sizes and times of its files."""
    return [[file.name, (stat := file.stat()).st_size, stat.st_mtime_ns] for file in files]
