"""Read and write rows of tensors in safetensors files with positioned reads and writes.

In:  a file, or the names, types and shapes of the tensors to write.
Out: the position of each tensor, and rows of it.

The safetensors library maps files into memory, and each page read counts as memory of the process. Here a process keeps
only the rows that it asked for. Format: 8 bytes with the header's length N, little endian; N bytes of JSON; then the
tensors without gaps, at the offsets in the header.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from checkpoint_tools.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors library
_ALIGNMENT_BYTES = 8
_LFS_PREFIX = b"version "
_REMEDY = "Fetch the file again"

Tensors = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # types and shapes by name


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize


def read_header(file: Path) -> dict[str, Entry]:
    """All tensors of a file. Raises CheckpointError when the file is missing, truncated or damaged."""
    try:
        size = file.stat().st_size
        with open(file, "rb") as stream:
            start = stream.read(8)
            if start == _LFS_PREFIX:
                raise CheckpointError(file, "a pointer of Git LFS instead of the file. Fetch it with git lfs pull")
            length = int.from_bytes(start, "little")
            if size < 8 or length > size - 8:
                raise CheckpointError(file, f"truncated: {size} bytes do not hold its header. {_REMEDY}")
            if length > _MAX_HEADER_BYTES:
                raise CheckpointError(file, f"damaged: a header of {length} bytes. {_REMEDY}")
            header = json.loads(stream.read(length))
        if not isinstance(header, dict):
            raise TypeError("it is not a JSON object")
        header.pop("__metadata__", None)
        entries = {name: _entry(file, name, entry, 8 + length) for name, entry in header.items()}
    except FileNotFoundError as error:
        raise CheckpointError(file, f"the file is missing. {_REMEDY}") from error
    except OSError as error:
        raise CheckpointError(file, f"cannot be read: {error.strerror}. Make it readable, or fetch it again") from error
    except CheckpointError:
        raise
    except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise CheckpointError(file, f"damaged: its header cannot be read ({error}). {_REMEDY}") from error
    position = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if entry.offset != position:
            raise CheckpointError(file, f"damaged: {name} does not start where the tensor before it ends. {_REMEDY}")
        position += entry.num_bytes
    if position != size:
        kind = "truncated" if position > size else "damaged"
        raise CheckpointError(file, f"{kind}: {size} bytes instead of the {position} of its header. {_REMEDY}")
    return entries


def _entry(file: Path, name: str, entry: dict, data_offset: int) -> Entry:
    if entry["dtype"] not in DTYPES:
        raise CheckpointError(file, f"{name}: type {entry['dtype']} is not known; known are {', '.join(DTYPES)}")
    start, end = entry["data_offsets"]
    result = Entry(file, DTYPES[entry["dtype"]], tuple(entry["shape"]), data_offset + start)
    if result.num_bytes != end - start:
        raise CheckpointError(file, f"damaged: {name} of shape {result.shape} in {end - start} bytes. {_REMEDY}")
    return result


def create_file(file: Path, tensors: Tensors) -> dict[str, Entry]:
    """Create a file of full size with its header; returns the positions of its tensors, in their order.

    A file of that size from an interrupted run stays. The space is reserved, so a full disk fails before the work.
    Raises OSError.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    start = 8 + len(text)
    if not (file.exists() and file.stat().st_size == start + position):
        with open(file, "wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.flush()
            os.posix_fallocate(stream.fileno(), 0, start + position)
            os.fsync(stream.fileno())
    return {
        name: Entry(file, dtype, tuple(shape), start + header[name]["data_offsets"][0])  # type: ignore[index]
        for name, (dtype, shape) in tensors.items()
    }


class Files:
    """Descriptors of open files, so that a process opens each file once."""

    def __init__(self, *, writable: bool = False):
        self._flags = os.O_RDWR if writable else os.O_RDONLY
        self._open: dict[Path, int] = {}

    def descriptor(self, file: Path) -> int:
        if file not in self._open:
            self._open[file] = os.open(file, self._flags | os.O_CLOEXEC)
        return self._open[file]

    def read(self, file: Path, offset: int, num_bytes: int) -> Tensor:
        """uint8 [num_bytes]. Raises CheckpointError when the file is too short."""
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        view, position = memoryview(buffer.numpy()), 0
        while position < num_bytes:
            count = os.preadv(self.descriptor(file), [view[position:]], offset + position)
            if count == 0:
                raise CheckpointError(file, f"truncated while it was read: it ends at byte {offset + position}")
            position += count
        return buffer

    def rows(self, entry: Entry, first: int = 0, end: int | None = None) -> Tensor:
        """A copy of rows [first, end) of a tensor, by default all. A scalar is read whole."""
        if not entry.shape:
            return self.read(entry.file, entry.offset, entry.num_bytes).view(entry.dtype)[0]
        end = entry.shape[0] if end is None else end
        raw = self.read(entry.file, entry.offset + first * entry.row_bytes, (end - first) * entry.row_bytes)
        return raw.view(entry.dtype).view(end - first, *entry.shape[1:])

    def write_rows(self, entry: Entry, first: int, rows: Tensor) -> None:
        """Write ``rows``, of the entry's type, at row ``first`` of a tensor. Raises OSError."""
        view = raw_bytes(rows)
        position, offset = 0, entry.offset + first * entry.row_bytes
        while position < len(view):
            position += os.pwrite(self.descriptor(entry.file), view[position:], offset + position)

    def sync(self) -> None:
        for descriptor in self._open.values():
            os.fsync(descriptor)

    def drop_cache(self, file: Path) -> None:
        """Ask the system to drop its cached pages of a file, so that the next read comes from the disk."""
        os.posix_fadvise(self.descriptor(file), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in C order."""
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
