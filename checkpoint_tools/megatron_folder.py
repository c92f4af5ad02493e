"""Read rows of a Megatron-Core checkpoint from these tools, from a run, or from another program.

In:  a distributed checkpoint (torch_dist) of any layout, or the folder of a run (its newest complete checkpoint).
Out: its architecture, and rows of every parameter in the name table, without optimizer states and FP8 scaling history.

Needs no Megatron-Core.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint_tools import digests
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.megatron_keys import KeyIndex, possible_keys
from checkpoint_tools.torch_dist import METADATA, Piece, PieceReader, StoredTensor, find_problems, read_metadata
from megatron_fp8rl.config import GdnConfig, MlaConfig, ModelConfig, RopeScaling, RouterConfig
from megatron_fp8rl.data.checkpoint_dir import STATE_FILE as STATE
from megatron_fp8rl.data.checkpoint_dir import latest
from megatron_fp8rl.names import registry
from megatron_fp8rl.names.table import Weight

_PREFIXES = ("", "model.", "module.")  # of keys; programs differ
_MODEL_KEYS = ("embedding.", "decoder.", "output_layer.", "mtp.")
_NOT_WEIGHTS = ("fp8.history", "_extra_state")
_PARTS = {"rope_scaling": RopeScaling, "mla": MlaConfig, "gdn": GdnConfig, "router": RouterConfig}


@dataclass
class MegatronFolder:
    """A checkpoint, from :meth:`open`. Pickles without its open files."""

    path: Path
    model: ModelConfig
    recorded_digests: dict[str, str]  # by Hugging Face name
    locations: dict[str, tuple[KeyIndex, StoredTensor]]  # by global Megatron name
    reader: PieceReader
    _by_index: dict[str, dict[tuple[int, ...], list[Piece]]] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, path: str | Path, model: ModelConfig | None = None, *, check_crc: bool = True) -> MegatronFolder:
        """Read the metadata and check keys, shapes and files of all parameters.

        ``path``: a checkpoint, or the folder of a run. ``model``: the architecture, for folders of other programs,
        which do not record it. ``check_crc``: check the CRC-32 of each piece at its first use. Raises CheckpointError
        that lists everything missing or damaged.
        """
        path = find_checkpoint(Path(path))
        if problems := _size_problems(path):
            raise CheckpointError(path, problems)
        if read_state(path).get("config", {}).get("lora", {}).get("rank"):
            raise CheckpointError(path, ["contains adapters only (lora.rank). Use the folder hf of the finished run"])
        model = model or read_model(path)
        locations, problems = _locate(read_metadata(path), model)
        if not problems:
            problems = find_problems(path, {location.key: tensor for location, tensor in locations.values()})
        if problems:
            raise CheckpointError(path, problems)
        return cls(path, model, digests.read(path), locations, PieceReader(path, check_crc))

    def dtype(self, weight: Weight) -> torch.dtype:
        return self.locations[weight.name][1].dtype

    def rows(self, weight: Weight, first: int, end: int) -> Tensor:
        """Rows [first, end) of the whole Megatron tensor, from the pieces of all ranks."""
        location, stored = self.locations[weight.name]
        num_stacked = len(location.index)
        result = torch.empty(end - first, *weight.shape[1:], dtype=stored.dtype)
        for piece in self._pieces(location, stored):
            offsets, sizes = piece.offsets[num_stacked:], piece.sizes[num_stacked:]
            low, high = max(first, offsets[0]), min(end, offsets[0] + sizes[0])
            if low >= high:
                continue
            index = tuple(i - o for i, o in zip(location.index, piece.offsets[:num_stacked], strict=True))
            rows = self.reader.rows(weight.name, piece, stored.dtype, index, low - offsets[0], high - offsets[0])
            box = result[low - first : high - first]
            for axis in range(1, len(sizes)):
                box = box.narrow(axis, offsets[axis], sizes[axis])
            box.copy_(rows)
        return result

    def files_with(self, weight: Weight) -> list[str]:
        return sorted({piece.file for piece in self._pieces(*self.locations[weight.name])})

    def _pieces(self, location: KeyIndex, stored: StoredTensor) -> list[Piece]:
        if location.key not in self._by_index:
            self._by_index[location.key] = by_index = {}
            for piece in stored.pieces:
                stacked = list(zip(piece.offsets, piece.sizes, strict=True))[: len(location.index)]
                for index in itertools.product(*(range(offset, offset + size) for offset, size in stacked)):
                    by_index.setdefault(index, []).append(piece)
        return self._by_index[location.key].get(location.index, [])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_by_index": {}}


def is_megatron(path: Path) -> bool:
    """Whether a folder is a distributed checkpoint, a run, or a run's ``checkpoints`` folder."""
    patterns = (METADATA, "*.distcp", f"step_*/{METADATA}", "checkpoints")
    return any(True for pattern in patterns for _ in path.glob(pattern))


def find_checkpoint(path: Path) -> Path:
    """The path itself, or the newest complete checkpoint of a run. Raises CheckpointError when there is none."""
    if not path.is_dir():
        raise CheckpointError(path, "there is no such folder")
    if (path / METADATA).exists() or (path / STATE).exists() or any(path.glob("*.distcp")):
        return path
    for folder in (path, path / "checkpoints"):
        newest = latest(folder)
        if newest is not None:
            return newest
    raise CheckpointError(
        path,
        "neither a distributed checkpoint (.metadata) nor a run with a complete checkpoint "
        "(checkpoints/step_*/state.json)",
    )


def read_state(path: Path) -> dict[str, Any]:
    """Content of state.json; empty without the file. Raises CheckpointError when it is damaged."""
    file = path / STATE
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(file, f"damaged: it is not JSON ({error}). Restore the file") from error
    if not isinstance(content, dict) or not isinstance(content.get("files", {}), dict):
        raise CheckpointError(file, "damaged: it has no file sizes. Restore the file")
    return content


def read_model(path: Path) -> ModelConfig:
    """The architecture in state.json. Raises CheckpointError when it is not recorded."""
    try:
        saved = read_state(path)["config"]["model"]
        parts = {key: kind(**saved[key]) for key, kind in _PARTS.items() if saved.get(key) is not None}
        return ModelConfig(**(saved | parts | {"hf_path": None}))
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            path,
            f"{STATE} does not record the model ({error}); name a folder with its config.json by --hf_config",
        ) from error


def _size_problems(path: Path) -> list[str]:
    problems = []
    for name, size in read_state(path).get("files", {}).items():
        file = path / name
        if not file.is_file():
            problems.append(f"{name}: the file is missing")
        elif file.stat().st_size != size:
            problems.append(f"{name}: truncated or damaged: {file.stat().st_size} bytes instead of {size}")
    return problems


def _locate(
    tensors: dict[str, StoredTensor], model: ModelConfig
) -> tuple[dict[str, tuple[KeyIndex, StoredTensor]], list[str]]:
    """(location of every parameter in the name table, problems)."""
    prefix = next((p for p in _PREFIXES if f"{p}embedding.word_embeddings.weight" in tensors), "")
    locations: dict[str, tuple[KeyIndex, StoredTensor]] = {}
    problems = []
    for name, weight in registry.weights(model).items():
        candidates = [KeyIndex(prefix + p.key, p.index, p.sizes) for p in possible_keys(weight, model)]
        location = next((p for p in candidates if p.key in tensors), None)
        if location is None:
            problems.append(f"{name}: missing; there is no key {candidates[0].key}")
            continue
        stored = tensors[location.key]
        expected = (*location.sizes, *weight.shape)
        # A saved vocabulary has the padding of its layout.
        padded = weight.padded and stored.shape[0] >= weight.shape[0] and stored.shape[1:] == weight.shape[1:]
        if stored.shape != expected and not padded:
            problems.append(f"{name}: {location.key} has shape {stored.shape}, but the model needs {expected}")
        elif not stored.dtype.is_floating_point or stored.dtype.itemsize < 2:
            problems.append(f"{name}: {location.key} is {stored.dtype}; supported are BF16, FP16 and FP32")
        locations[name] = location, stored
    known = {location.key for location, _ in locations.values()}
    for key in tensors:
        plain = key.removeprefix(prefix)
        dropped = plain.startswith("mtp.") and not model.num_mtp_layers
        if plain.startswith(_MODEL_KEYS) and key not in known and not dropped and not key.endswith(_NOT_WEIGHTS):
            problems.append(f"{key}: not a parameter of a {model.family} model of this configuration")
    return locations, problems
