"""Read and write the files of a distributed checkpoint (torch_dist): pieces of tensors, each a torch.save archive.

In:  ``.metadata`` and the ``.distcp`` files of a folder, from any number of ranks in any layout.
Out: rows of the tensors, after a check of each piece's CRC-32; or new pieces and metadata.

Rows are read by their position in the file, so memory does not depend on the size of a piece.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from checkpoint_tools.errors import CheckpointError
from megatron_fp8rl.data import checkpoint_pickle
from megatron_fp8rl.data.safetensors_file import Files

METADATA = ".metadata"
_CRC_READ_BYTES = 1 << 20
_LOCAL_HEADER_BYTES = 30  # of a zip member, before its name


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a key's tensor, and its position in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    position: int  # of its archive, in bytes
    length: int

    def to_json(self) -> list[Any]:
        return [list(self.offsets), list(self.sizes), self.file, self.position, self.length]

    @classmethod
    def from_json(cls, data: list[Any]) -> Piece:
        return cls(tuple(data[0]), tuple(data[1]), *data[2:])


@dataclass(frozen=True, slots=True)
class StoredTensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def read_metadata(folder: Path) -> dict[str, StoredTensor]:
    """Tensors of a folder by key. Raises CheckpointError when the metadata is missing or damaged."""
    file = folder / METADATA
    try:
        metadata = checkpoint_pickle.read_metadata(folder)
        stored = {(index.fqn, tuple(index.offset or ())): info for index, info in metadata.storage_data.items()}
        return {
            key: _stored(key, tensor, stored)
            for key, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
    except FileNotFoundError as error:
        raise CheckpointError(file, "the file is missing; the checkpoint cannot be read without it") from error
    except checkpoint_pickle.UnsafeError as error:
        raise CheckpointError(file, str(error)) from error
    except Exception as error:  # unpickling damaged bytes raises many types
        raise CheckpointError(file, f"damaged: {type(error).__name__}: {error}. Restore the file") from error


def _stored(key: str, tensor: TensorStorageMetadata, stored: Mapping[tuple[str, tuple], _StorageInfo]) -> StoredTensor:
    pieces = []
    for chunk in tensor.chunks:
        info = stored[key, tuple(chunk.offsets)]
        pieces.append(Piece(tuple(chunk.offsets), tuple(chunk.sizes), info.relative_path, info.offset, info.length))
    return StoredTensor(tensor.properties.dtype, tuple(tensor.size), tuple(pieces))


def find_problems(folder: Path, tensors: Mapping[str, StoredTensor]) -> list[str]:
    """Problems of files that are missing or too short, and of tensors that the pieces do not cover."""
    ends: dict[str, int] = {}
    problems = []
    for key, tensor in tensors.items():
        for piece in tensor.pieces:
            ends[piece.file] = max(ends.get(piece.file, 0), piece.position + piece.length)
        covered = sum(math.prod(piece.sizes) for piece in tensor.pieces)
        if covered != math.prod(tensor.shape):
            problems.append(f"{key}: its pieces cover {covered} of {math.prod(tensor.shape)} elements")
    for name, end in sorted(ends.items()):
        file = folder / name
        if not file.is_file():
            problems.append(f"{name}: the file is missing")
        elif file.stat().st_size < end:
            problems.append(f"{name}: truncated: {file.stat().st_size} bytes instead of {end}")
    return problems


class _View(io.RawIOBase):
    def __init__(self, stream: BinaryIO, start: int, length: int):
        self._stream, self._start, self._length, self._at = stream, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._at))
        self._stream.seek(self._start + self._at)
        count = self._stream.readinto(memoryview(buffer)[:count])
        self._at += count
        return count


class _Layout(pickle.Unpickler):
    """Reads (offset, size, stride) of a pickled tensor, without building it."""

    def persistent_load(self, pid: Any) -> Any:
        return pid

    def find_class(self, module: str, name: str) -> Any:
        known = {
            ("torch._utils", "_rebuild_tensor_v2"): lambda storage, offset, size, stride, *rest: (offset, size, stride),
            ("torch._utils", "_rebuild_parameter"): lambda data, *rest: data,
            ("collections", "OrderedDict"): OrderedDict,
        }
        if module == "torch":
            return name  # a storage type
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"{module}.{name} instead of a tensor")
        return known[module, name]


def _require_rows(layout: Any, sizes: tuple[int, ...]) -> None:
    offset, size, stride = layout
    expected = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    differs = any(n > 1 and have != want for n, have, want in zip(sizes, stride, expected, strict=True))
    if offset != 0 or tuple(size) != sizes or differs:
        raise ValueError(f"a tensor of shape {tuple(size)}, strides {tuple(stride)} instead of rows of {sizes}")


@dataclass
class PieceReader:
    """Reads rows of a folder's pieces. Checks a whole piece at its first use."""

    folder: Path
    check_crc: bool = True
    display_folder: Path | None = None  # replaces ``folder`` in errors
    _files: Files = field(default_factory=Files)
    _data: dict[tuple[str, int], int] = field(default_factory=dict)  # (file, position) -> byte of the first element

    def rows(self, name: str, piece: Piece, dtype: torch.dtype, index: tuple[int, ...], first: int, end: int) -> Tensor:
        """Rows [first, end) of ``piece[index]``. Raises CheckpointError with ``name`` and the file when damaged."""
        sizes = piece.sizes[len(index) :]
        flat = 0  # index over the stacked axes
        for position, size in zip(index, piece.sizes[: len(index)], strict=True):
            flat = flat * size + position
        row_bytes = math.prod(sizes[1:]) * dtype.itemsize
        offset = self._data_offset(name, piece, dtype) + (flat * sizes[0] + first) * row_bytes
        raw = self._files.read(self.folder / piece.file, offset, (end - first) * row_bytes)
        return raw.view(dtype).view(end - first, *sizes[1:])

    def _data_offset(self, name: str, piece: Piece, dtype: torch.dtype) -> int:
        key = piece.file, piece.position
        if key not in self._data:
            file = (self.display_folder or self.folder) / piece.file
            try:
                with open(self.folder / piece.file, "rb") as stream:
                    self._data[key] = self._check(_View(stream, piece.position, piece.length), piece, dtype)
            except FileNotFoundError as error:
                raise CheckpointError(file, f"the file is missing; it contains {name}") from error
            except Exception as error:  # damaged archives and pickles raise many types
                problem = f"{name}: damaged piece at byte {piece.position}: {error}. Restore the file from a copy"
                raise CheckpointError(file, problem) from error
        return self._data[key]

    def _check(self, view: _View, piece: Piece, dtype: torch.dtype) -> int:
        """Check an archive; returns the file position of the first element."""
        with zipfile.ZipFile(view) as archive:
            members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            layout, data = members["data.pkl"], members["data/0"]
            if data.file_size != math.prod(piece.sizes) * dtype.itemsize or data.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{data.file_size} bytes do not hold {piece.sizes} of {dtype}")
            _require_rows(_Layout(io.BytesIO(archive.read(layout))).load(), piece.sizes)
            if self.check_crc:
                for info in members.values():
                    with archive.open(info) as member:
                        while member.read(_CRC_READ_BYTES):
                            pass
        view.seek(data.header_offset)
        header = view.read(_LOCAL_HEADER_BYTES)
        names_bytes = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        return piece.position + data.header_offset + _LOCAL_HEADER_BYTES + names_bytes

    def close(self) -> None:
        self._files.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": Files(), "_data": {}}


def append(stream: BinaryIO, data: Tensor | list, file: str, offsets: Iterable[int]) -> Piece:
    """Write a tensor or a list of objects at the end of an open file. Raises OSError."""
    position = stream.tell()
    try:
        torch.save(data, stream)
    except RuntimeError as error:  # torch hides a failed write behind an error of its own
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    sizes = tuple(data.shape) if isinstance(data, Tensor) else ()
    return Piece(tuple(offsets), sizes, file, position, stream.tell() - position)


def write_metadata(folder: Path, tensors: Mapping[str, StoredTensor], objects: Mapping[str, Piece]) -> None:
    """Write ``.metadata`` and ``metadata.json`` for pieces on disk. Raises OSError."""
    state_dict_metadata: dict[str, Any] = {}
    results = []
    for key, tensor in tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in tensor.pieces]
        properties = TensorProperties(dtype=tensor.dtype)
        state_dict_metadata[key] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        for number, piece in enumerate(tensor.pieces):
            results.append(_result(MetadataIndex(key, piece.offsets, number), piece))
    for key, piece in objects.items():
        state_dict_metadata[key] = BytesStorageMetadata()
        results.append(_result(MetadataIndex(key), piece))
    FileSystemWriter(folder).finish(Metadata(state_dict_metadata), [results])
    # Megatron-Core requires this file in a distributed checkpoint.
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')


def _result(index: MetadataIndex, piece: Piece) -> WriteResult:
    return WriteResult(index, piece.length, _StorageInfo(piece.file, piece.position, piece.length))
