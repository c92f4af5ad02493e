"""The header of a safetensors file: name, type, shape and position of every tensor. No weight is read.

Format: 8 bytes with the header's length N, little endian; N bytes of JSON; then the tensors without gaps, at the
offsets in the header.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_fp8rl.data.checkpoint_error import CheckpointError

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
Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # types and shapes of tensors by name
_MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors library
_LFS_PREFIX = b"version "
_REMEDY = "Fetch the file again"


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
