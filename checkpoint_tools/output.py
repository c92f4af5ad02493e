"""An output folder that gets its name only when it is complete, and that the same command can continue.

In:  the folder's path and the inputs that determine its content.
Out: a partial folder beside it with a journal of finished buckets, and in the end the folder.
Runs on: the process of the command; its workers write into the partial folder.

    .NAME.partial/.journal    a line with the inputs, then a line per finished bucket
    .NAME.partial/.lock       locked while a program writes
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
    """A folder under construction, from :func:`output_folder`. ``done`` holds the results of buckets by index."""

    def __init__(self, path: Path, partial: Path, done: dict[int, dict[str, Any]]):
        self.path = path
        self.partial = partial
        self.done = done

    @property
    def digests(self) -> dict[str, str]:
        return {name: value for index in sorted(self.done) for name, value in self.done[index]["digests"].items()}

    def record(self, bucket: int, result: dict[str, Any]) -> None:
        """Record that a bucket is on disk and verified. The record survives a crash of the machine."""
        self.done[bucket] = result
        with open(self.partial / _JOURNAL, "a") as stream:
            stream.write(json.dumps({"bucket": bucket, "result": result}, separators=(",", ":")) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def commit(self) -> None:
        """Rename the partial folder to its final name. An older folder of that name is deleted last."""
        (self.partial / _JOURNAL).unlink()
        for file in self.partial.iterdir():
            _sync(file)
        _sync(self.partial)
        old = self.path.with_name(f".{self.path.name}.replaced")
        shutil.rmtree(old, ignore_errors=True)
        if self.path.exists():
            os.rename(self.path, old)
        os.rename(self.partial, self.path)
        (self.path / _LOCK).unlink()  # after the rename, so that no program takes the folder for an interrupted one
        _sync(self.path.parent)
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def output_folder(path: str | Path, inputs: Mapping[str, Any], *, overwrite: bool, num_bytes: int) -> Iterator[Output]:
    """Open the partial folder of ``path``; continue an interrupted run if its ``inputs`` were the same.

    ``inputs``: JSON that determines the content: the source, the model and the options. ``overwrite``: replace an
    existing folder that these tools wrote. ``num_bytes``: bytes of weights that will be written. Raises CheckpointError
    if the folder exists, is locked or cannot be written, or the disk is full. Finished buckets stay on disk, and the
    same command continues.
    """
    path = Path(os.path.realpath(path))  # the partial folder must be on the filesystem of a link's target
    _require_free(path, inputs, overwrite)
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
            _require_free(path, inputs, overwrite)  # again: the other program may have finished since
            output = Output(path, partial, _resume(partial, json.loads(json.dumps(inputs))))
            try:
                present = sum(file.stat().st_blocks * 512 for file in partial.iterdir() if file.is_file())
                if shutil.disk_usage(partial).free + present < num_bytes + _SPACE_MARGIN_BYTES:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                yield output
            except BaseException:
                if not output.done:
                    shutil.rmtree(partial, ignore_errors=True)
                raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free, needed = shutil.disk_usage(partial.parent).free, num_bytes + _SPACE_MARGIN_BYTES
        raise CheckpointError(
            path,
            f"the disk is full: {needed / 1e9:.2f} GB are needed in all, {free / 1e9:.2f} GB are free. Nothing was "
            "written under this name. Free some space and run the same command again; it continues the work",
        ) from error


def _require_free(path: Path, inputs: Mapping[str, Any], overwrite: bool) -> None:
    source = Path(inputs["source"][0])
    if path.resolve() in (source, *source.parents):
        raise CheckpointError(path, f"is or contains the source {source}; choose another name")
    if source in path.parents:
        raise CheckpointError(path, f"is inside the source {source}; choose another folder")
    if not path.exists():
        return
    if not overwrite:
        raise CheckpointError(path, "exists already; choose another name, or replace it with --overwrite")
    if not path.is_dir() or (any(path.iterdir()) and not (path / digests.FILE).is_file()):
        problem = f"these tools did not write it (no {digests.FILE}); remove it first, or choose another name"
        raise CheckpointError(path, problem)


def _resume(partial: Path, inputs: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Results of the buckets that an earlier run finished. Empties a folder of other inputs."""
    journal = partial / _JOURNAL
    lines = journal.read_bytes().split(b"\n")[:-1] if journal.exists() else []  # drops an incomplete last line
    try:
        entries = [json.loads(line) for line in lines]
    except ValueError:
        entries = []
    if entries and entries[0] == inputs:
        return {entry["bucket"]: entry["result"] for entry in entries[1:]}
    for file in partial.iterdir():
        if file.name != _LOCK:
            shutil.rmtree(file) if file.is_dir() else file.unlink()
    journal.write_text(json.dumps(inputs) + "\n")
    _sync(journal)
    return {}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fingerprint(files: list[Path]) -> list[list[Any]]:
    """Names, sizes and times of files, to detect a changed source."""
    return [[file.name, (stat := file.stat()).st_size, stat.st_mtime_ns] for file in files]
