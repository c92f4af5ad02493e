"""Check that the pickles of a distributed checkpoint contain only data, before PyTorch loads them unchecked.

PyTorch unpickles ``.metadata`` and objects in shards (FP8 scaling states, RNG states) with any class. This module
allows a short list of names. It does not protect against a writer that changes files during reading.
"""

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
            *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
            *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
        ),
        _METADATA,
    ),
    **dict.fromkeys(  # plans of all ranks, which PyTorch 2.13 no longer drops from the metadata
        ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
        "torch.distributed.checkpoint.planner",
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
]  # for NumPy's RNG state and Transformer Engine's states

_REMEDY = "Ask its author, or convert its weights to safetensors on an isolated machine"


class UnsafeError(RuntimeError):
    """Loading this checkpoint could run code."""


class _Metadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or _NAMES.get(name) == module:
            return super().find_class(module, name)
        raise UnsafeError(f"it names {module}.{name}, which is not allowed in checkpoint metadata")


def read_metadata(folder: Path) -> Metadata:
    """The contents of ``.metadata``. Raises UnsafeError if it names a class that is not allowed. Damaged bytes may
    raise any exception."""
    path = folder / ".metadata"
    with path.open("rb") as file:
        try:
            return _Metadata(file).load()
        except UnsafeError as error:
            raise UnsafeError(f"{path} could run code: {error}. {_REMEDY}") from error


def require_only_data(folder: Path, rank: int, num_ranks: int) -> None:
    """Raise UnsafeError unless ``.metadata`` and this rank's share of the objects contain only data."""
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
        raise UnsafeError(f"{path} could run code: object {key} is not plain data ({reason}). {_REMEDY}") from error
