"""Random access to rows of files on disk: a file of ten million rows opens in seconds.

The cache (``$MEGATRON_FP8RL_CACHE`` or ``~/.cache/megatron_fp8rl``) has a line index of each ``.jsonl`` file, so that a
malformed line affects only its row, and unpacked copies of compressed files.
"""

import bisect
import gzip
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from megatron_fp8rl.data.dropped import RowError
from megatron_fp8rl.data.unchanged import DataFile
from megatron_fp8rl.envs.source_kind import HUB, files_of, is_saved, kind_of
from megatron_fp8rl.kernels import compile_cache

_CHUNK_BYTES = 64 << 20


class Rows(Protocol):
    """A fixed list of rows."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """The row at an index from 0. Raises for an unreadable row."""


def open_rows(dataset: str, options: Mapping[str, Any]) -> Rows:
    """Open a source of rows.

    ``options``: for ``hub:NAME``, arguments of ``datasets.load_dataset``; for a folder with several splits, ``split``
    (default "train"). Raises FileNotFoundError for a missing file, ValueError for an unreadable one.
    """
    sys.set_int_max_str_digits(0)  # tests of programs may have integers of more than 4,300 digits
    if kind_of(dataset) == "hub":
        import datasets

        try:
            return datasets.load_dataset(dataset.removeprefix(HUB), **{"split": "train", **options})
        except Exception as error:  # from the network, the hub or the options
            raise ValueError(f"{dataset}: {type(error).__name__}: {error}") from error
    parts: list[Rows] = []
    parquet: list[str] = []
    for file in files_of(dataset):
        if file.name.endswith(".parquet"):
            parquet.append(str(file))
        elif is_saved(file):
            parts.append(_saved(file, options))
        else:
            parts.append(JsonLines(_lines_of(file)))
    if parquet:
        import datasets

        parts.append(datasets.Dataset.from_parquet(parquet, cache_dir=str(cache_dir() / "arrow")))
    return parts[0] if len(parts) == 1 else _Joined(parts)


def cache_dir() -> Path:
    """Create and return the folder for indices and unpacked files."""
    folder = compile_cache.root()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises RowError for a repeated key: Python would keep the last value without a word."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise RowError(f"has the key {next(key for key in keys if keys.count(key) > 1)!r} twice in one object")
    return found


class JsonLines(Sequence):
    """The lines of a file, one JSON object each; blank lines are skipped."""

    def __init__(self, path: Path):
        self.file = DataFile(path)
        self._bytes = path.open("rb")  # read, not mapped: a file that is truncated would kill the process
        self._ends = _line_ends(path)  # int64 [2, rows]: start and end byte (exclusive)
        self.file.check()

    def __len__(self) -> int:
        return self._ends.shape[1]

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        start, end = self._ends[:, index].tolist()
        self.file.check()
        line = os.pread(self._bytes.fileno(), end - start, start)
        if len(line) < end - start:
            self.file.fail()
        try:
            row = json.loads(line, object_pairs_hook=_without_repeats)
        except (ValueError, RecursionError) as error:
            self.file.check()
            raise error if isinstance(error, RowError) else RowError(f"is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise RowError(f"is a JSON {type(row).__name__}, not an object")
        return row


class _Joined(Sequence):
    def __init__(self, parts: Sequence[Rows]):
        self._parts, self._starts = parts, [0, *accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        part = bisect.bisect_right(self._starts, index) - 1
        return self._parts[part][index - self._starts[part]]


class _Saved(Sequence):
    """The rows of a saved data set, whose files ``datasets`` maps into memory."""

    def __init__(self, rows: Rows, files: Sequence[DataFile]):
        self._rows, self._files = rows, files

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        for file in self._files:
            file.check()  # reading a truncated mapped file would kill the process
        return self._rows[index]


def data_files(dataset: str) -> list[Path]:
    """The files on disk that contain the rows of a source; none for ``hub:NAME``."""
    if kind_of(dataset) == "hub":
        return []
    files = files_of(dataset)
    return [part for file in files for part in (sorted(file.rglob("*.arrow")) if file.is_dir() else [file])]


def _saved(folder: Path, options: Mapping[str, Any]) -> Rows:
    import datasets

    files = [DataFile(path) for path in data_files(str(folder))]
    saved = datasets.load_from_disk(str(folder))
    if isinstance(saved, datasets.Dataset):
        return _Saved(saved, files)
    split = options.get("split", "train")
    if split not in saved:
        raise ValueError(f"{folder} has the splits {', '.join(saved)} and no {split!r}; set options.split")
    return _Saved(saved[split], files)


def _line_ends(path: Path) -> np.ndarray:
    index = cache_dir() / f"{_fingerprint(path)}.lines.npy"
    if not index.exists():
        with _written(index) as file:
            np.save(file, _scan(path))
    return np.load(index, mmap_mode="r")


def _scan(path: Path) -> np.ndarray:
    """int64 [2, rows]: start and end of every non-blank line."""
    ends, offset = [], 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            ends.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + offset)
            offset += len(chunk)
    ends.append(np.array([offset]))  # last line without a line break
    stops = np.concatenate(ends)
    starts = np.concatenate([[0], stops[:-1] + 1])
    lines = np.stack([starts, stops])
    short = np.flatnonzero((stops - starts) < 8)  # only short lines can be blank
    with path.open("rb") as file:

        def is_blank(line: int) -> bool:
            file.seek(starts[line])
            return not file.read(stops[line] - starts[line]).strip()

        blank = [line for line in short.tolist() if is_blank(line)]
    return np.delete(lines, blank, axis=1)


def _lines_of(path: Path) -> Path:
    """A JSON-lines file with the rows of ``path``: the file itself, or a converted copy in the cache."""
    is_packed = path.suffix in (".gz", ".zst")
    if not is_packed and not _is_array(path):
        return path
    target = cache_dir() / f"{_fingerprint(path)}.jsonl"
    if not target.exists():
        try:
            with _written(target) as file:
                if is_packed:
                    with _decompressed(path) as source:
                        shutil.copyfileobj(source, file, _CHUNK_BYTES)
                else:
                    rows = json.loads(path.read_bytes(), object_pairs_hook=_without_repeats)
                    file.writelines(json.dumps(row).encode() + b"\n" for row in rows)
        except (OSError, EOFError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
    return target


def _is_array(path: Path) -> bool:
    """Whether a ``.json`` file is one JSON array instead of JSON lines."""
    with path.open("rb") as file:
        return path.suffix == ".json" and file.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


@contextmanager
def _decompressed(path: Path) -> Iterator[IO[bytes]]:
    if path.suffix == ".gz":
        with gzip.open(path) as source:
            yield source
        return
    import zstandard

    with path.open("rb") as file:
        try:
            yield zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        except zstandard.ZstdError as error:
            raise OSError(str(error)) from error


@contextmanager
def _written(target: Path) -> Iterator[IO[bytes]]:
    """Write to a temporary file and rename it when complete; safe with concurrent writers."""
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file:
        try:
            yield file
        except OSError as error:
            os.unlink(file.name)
            if error.errno is None:  # the file that is read is damaged
                raise
            raise OSError(error.errno, f"{error.strerror or error}: cannot write the cache", str(target)) from error
        except BaseException:
            os.unlink(file.name)
            raise
    os.replace(file.name, target)


def _fingerprint(path: Path) -> str:
    state = path.stat()
    return hashlib.blake2b(f"{path.resolve()}/{state.st_size}/{state.st_mtime_ns}".encode(), digest_size=12).hexdigest()
