"""Detect that a file of rows was truncated or rewritten while a run reads it, and identify its content for a resume."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_log = logging.getLogger(__name__)
_WHOLE_BYTES = 64 << 20  # smaller files are compared as a whole, larger ones by samples
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 256 << 10


class DataChangedError(RuntimeError):
    """A file of rows is no longer the one that the run opened."""


class _State(NamedTuple):
    size: int
    written_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> _State:
        state = os.stat(path)
        return cls(state.st_size, state.st_mtime_ns, state.st_ino)

    def __str__(self) -> str:
        written = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.written_ns / 1e9))
        return f"{self.size:,} bytes, written {written}"


class DataFile:
    """A file as it was when the run opened it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state = _State.of(path)
        self._seen = self._state  # of the last check
        self.digest = self._digest()

    def check(self) -> None:
        """Raise DataChangedError if the rows that the run knows were changed in place. A file that was replaced by
        another of the same name, deleted, or only extended, still has these rows: open files keep their content."""
        try:
            now = _State.of(self.path)
        except FileNotFoundError:
            return
        if now == self._seen or now.inode != self._state.inode:
            return
        if now.size < self._state.size or self._digest() != self.digest:
            self.fail()
        if now.size > self._seen.size:
            _log.warning("%s has grown; the run does not use the new rows", self.path)
        self._seen = now

    def fail(self) -> None:
        """Raise DataChangedError with the file's state now and when it was opened."""
        now, before = _State.of(self.path), self._state
        raise DataChangedError(
            f"{self.path} was {'truncated' if now.size < before.size else 'rewritten'} during the run: it had "
            f"{before}, and now has {now}. Restore its content, or give new data another file "
            "name, and start the run again"
        )

    def _digest(self) -> str:
        """A digest of the bytes that the file had when it was opened, of samples if they are many."""
        size = self._state.size
        places = [(0, size)]
        if size > _WHOLE_BYTES:
            last = size - _SAMPLE_BYTES
            places = [(last * i // (_NUM_SAMPLES - 1), _SAMPLE_BYTES) for i in range(_NUM_SAMPLES)]
        digest = hashlib.blake2b(str(size).encode(), digest_size=16)
        with self.path.open("rb") as file:
            for start, length in places:
                file.seek(start)
                digest.update(file.read(length))
        return digest.hexdigest()


def digest_of(files: Sequence[DataFile]) -> str:
    """One digest of the content of several files, whatever their names."""
    return hashlib.blake2b("".join(file.digest for file in files).encode(), digest_size=8).hexdigest()
