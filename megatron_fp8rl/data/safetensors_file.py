"""Read and write rows of tensors in safetensors files with positioned reads and writes.

The safetensors library maps files into memory, and each page read counts as memory of the process. Here a process keeps
only the rows that it asked for. Format: 8 bytes with the header's length N, little endian; N bytes of JSON; then the
tensors without gaps, at the offsets in the header.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import torch
from torch import Tensor

from megatron_fp8rl.data.checkpoint_error import CheckpointError
from megatron_fp8rl.data.fused_experts import ExpertEntry
from megatron_fp8rl.data.packed_int4 import PackedEntry, unpack
from megatron_fp8rl.data.safetensors_header import DTYPES, Entry, Shapes

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT_BYTES = 8


def create_file(file: Path, tensors: Shapes) -> dict[str, Entry]:
    """Create a file of full size with its header; returns the positions of its tensors, in their order. Keeps a file of
    that size from an interrupted run. Reserves the space, so a full disk fails before the work. Raises OSError."""
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
        self._open: dict[str, int] = {}

    def descriptor(self, file: Path) -> int:
        name = str(file)
        if name not in self._open:
            opened = os.open(file, self._flags | os.O_CLOEXEC)
            if self._open.setdefault(name, opened) != opened:  # another thread has opened it meanwhile
                os.close(opened)
        return self._open[name]

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
        if isinstance(entry, PackedEntry):
            return unpack(*(self.rows(stored, first, end) for stored in (entry.packed, entry.scale)))
        if isinstance(entry, ExpertEntry):
            return entry.read(self.rows)[first:end]
        if not entry.shape:
            return self.read(entry.file, entry.offset, entry.num_bytes).view(entry.dtype)[0]
        end = entry.shape[0] if end is None else end
        raw = self.read(entry.file, entry.offset + first * entry.row_bytes, (end - first) * entry.row_bytes)
        return raw.view(entry.dtype).view(end - first, *entry.shape[1:])

    def write_rows(self, entry: Entry, first: int, rows: Tensor) -> None:
        """Write ``rows``, of the entry's type, at row ``first`` of a tensor. Raises OSError."""
        if isinstance(entry, ExpertEntry):
            self.descriptor(entry.file)  # for sync
            content = torch.from_file(str(entry.file), shared=True, size=entry.file.stat().st_size, dtype=torch.uint8)
            entry.place(content)[first : first + len(rows)] = rows
            return
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

    __del__ = close


def raw_bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
