"""Checks that the pickles of a distributed checkpoint hold data alone, before PyTorch loads them without a check.

In: the folder of a torch_dist checkpoint. Out: its metadata, or an error that names what could run code. Runs on: every
process that reads a checkpoint.

PyTorch unpickles ``.metadata`` and the objects among the shards (FP8 scaling states, RNG states) with any class they
name; here, a short list of names is allowed. Whoever may write to the folder while it is read is not kept out.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

_METADATA = "torch.distributed.checkpoint.metadata"
_NAMES = {
    **dict.fromkeys(
        (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        ),
        _METADATA,
    ),
    "_StorageInfo": "torch.distributed.checkpoint.filesystem",
    "_get_layout": "torch.serialization",
    "Size": "torch",
    "PosixPath": "pathlib",
}
_PLAIN = [
    io.BytesIO,
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
    (np.empty(0).__reduce__()[0], "numpy._core.multiarray._reconstruct"),
]  # of NumPy's RNG state, and of Transformer Engine's states

_REMEDY = "Ask its author, or convert its weights to safetensors where it cannot harm"


class UnsafeError(RuntimeError):
    """A checkpoint could run code when it is loaded."""


class _Metadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or _NAMES.get(name) == module:
            return super().find_class(module, name)
        raise UnsafeError(f"it names {module}.{name}, which is no part of a checkpoint's metadata")


def read_metadata(folder: Path) -> Metadata:
    """The contents of ``.metadata``.

    Raises UnsafeError if it names what does not belong there; unpickling damaged bytes raises nearly anything.
    """
    path = folder / ".metadata"
    with path.open("rb") as file:
        try:
            return _Metadata(file).load()
        except UnsafeError as error:
            raise UnsafeError(f"{path} could run code: {error}. {_REMEDY}") from error


def require_only_data(folder: Path, rank: int = 0, num_ranks: int = 1) -> None:
    """Raise UnsafeError unless ``.metadata`` and this rank's share of the objects hold data alone."""
    metadata = read_metadata(folder)
    objects = [key for key, kind in metadata.state_dict_metadata.items() if isinstance(kind, BytesStorageMetadata)]
    places = {index.fqn: place for index, place in metadata.storage_data.items()}
    for key in sorted(objects)[rank::num_ranks]:
        _require_plain(key, folder / places[key].relative_path, places[key].offset, places[key].length)


def _require_plain(key: str, path: Path, offset: int, length: int) -> None:
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(length)
    try:
        with torch.serialization.safe_globals(_PLAIN):
            torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        reason = str(error).partition("WeightsUnpickler error: ")[2].partition(". Please")[0] or error
        raise UnsafeError(f"{path} could run code: the object {key} is no plain data ({reason}). {_REMEDY}") from error
