"""A Megatron-Core checkpoint folder as a source of rows: one of these tools, of a run, or of another program.

In:  a folder with a distributed checkpoint (torch_dist) of any layout, or the folder of a run, whose newest complete
     checkpoint is taken.
Out: its architecture, and the rows of every parameter of the name table.

Megatron-Core itself is not needed. The optimizer's tensors and scaling history beside the weights are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint_tools import digests
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.keys import Place, places
from checkpoint_tools.torch_dist import METADATA, Piece, PieceReader, StoredTensor, problems_of, read_metadata
from megatron_fp8rl.config import MlaConfig, ModelConfig, RopeScaling, RouterConfig
from megatron_fp8rl.data.checkpoint_dir import STATE_FILE as STATE
from megatron_fp8rl.data.checkpoint_dir import latest
from megatron_fp8rl.names import registry
from megatron_fp8rl.names.table import Weight

_PREFIXES = ("", "model.", "module.")  # of keys, as different programs save them
_MODEL_KEYS = ("embedding.", "decoder.", "output_layer.", "mtp.")
_NOT_WEIGHTS = ("fp8.history", "_extra_state")
_PARTS = {"rope_scaling": RopeScaling, "mla": MlaConfig, "router": RouterConfig}


@dataclass
class MegatronFolder:
    """An open checkpoint. Build it with :meth:`open`; it pickles without its open files."""

    path: Path
    model: ModelConfig
    recorded: dict[str, str]  # digests.json, by Hugging Face name
    found: dict[str, tuple[Place, StoredTensor]]  # by global Megatron name
    reader: PieceReader
    _by_index: dict[str, dict[tuple[int, ...], list[Piece]]] = field(default_factory=dict, repr=False)

    @classmethod
    def open(
        cls, path: str | Path, model: ModelConfig | None = None, *, check_crc: bool = True, keep_mtp: bool = True
    ) -> MegatronFolder:
        """Read the metadata and check keys, shapes and files of all parameters.

        ``model`` is for folders of other programs, which do not say what they hold; ``keep_mtp`` False leaves out
        multi-token prediction layers. Raises CheckpointError that lists everything that is missing or damaged.
        """
        path = resolve(Path(path))
        problems = _wrong_sizes(path)
        if problems:
            raise CheckpointError(path, problems)
        model = model or model_of(path)
        if not keep_mtp:
            model = replace(model, num_mtp_layers=0)
        tensors = read_metadata(path)
        found, problems = _find(tensors, model)
        if not problems:
            problems = problems_of(path, {place.key: tensor for place, tensor in found.values()})
        if problems:
            raise CheckpointError(path, problems)
        return cls(path, model, digests.read(path), found, PieceReader(path, check_crc))

    def dtype(self, weight: Weight) -> torch.dtype:
        return self.found[weight.name][1].dtype

    def rows(self, weight: Weight, first: int, end: int) -> Tensor:
        """Rows [first, end) of the whole Megatron tensor, put together from the pieces of all ranks."""
        place, stored = self.found[weight.name]
        num_stacked = len(place.index)
        result = torch.empty(end - first, *weight.shape[1:], dtype=stored.dtype)
        for piece in self._pieces(place, stored):
            offsets, sizes = piece.offsets[num_stacked:], piece.sizes[num_stacked:]
            low, high = max(first, offsets[0]), min(end, offsets[0] + sizes[0])
            if low >= high:
                continue
            index = tuple(i - o for i, o in zip(place.index, piece.offsets[:num_stacked], strict=True))
            rows = self.reader.rows(weight.name, piece, stored.dtype, index, low - offsets[0], high - offsets[0])
            box = result[low - first : high - first]
            for axis in range(1, len(sizes)):
                box = box.narrow(axis, offsets[axis], sizes[axis])
            box.copy_(rows)
        return result

    def files_of(self, weight: Weight) -> list[str]:
        """Names of the files that hold a parameter."""
        return sorted({piece.file for piece in self._pieces(*self.found[weight.name])})

    def _pieces(self, place: Place, stored: StoredTensor) -> list[Piece]:
        """The pieces that hold parts of ``key[index]``."""
        if place.key not in self._by_index:
            self._by_index[place.key] = by_index = {}
            for piece in stored.pieces:
                for index in _indices(piece, len(place.index)):
                    by_index.setdefault(index, []).append(piece)
        return self._by_index[place.key].get(place.index, [])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_by_index": {}}


def _indices(piece: Piece, num_stacked: int) -> Iterator[tuple[int, ...]]:
    """Indices over the stacked axes that a piece has a part of."""
    if num_stacked == 0:
        yield ()
        return
    for head in range(piece.offsets[0], piece.offsets[0] + piece.sizes[0]):
        if num_stacked == 1:
            yield (head,)
        else:
            yield from ((head, i) for i in range(piece.offsets[1], piece.offsets[1] + piece.sizes[1]))


def is_megatron(path: Path) -> bool:
    """Whether a folder is a distributed checkpoint, or a run or a collection of checkpoints that has one."""
    inside = (METADATA, "*.distcp", f"step_*/{METADATA}", "checkpoints")
    return any(True for pattern in inside for _ in path.glob(pattern))


def resolve(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest complete one of a run or of its checkpoint folder.

    Raises CheckpointError when there is none.
    """
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
        "neither a distributed checkpoint (.metadata) nor a run with a complete one (checkpoints/step_*/state.json)",
    )


def read_state(path: Path) -> dict[str, Any]:
    """Content of state.json; empty when another program wrote the folder. Raises CheckpointError when damaged."""
    file = path / STATE
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(file, f"damaged: it is not JSON ({error}). Restore the file") from error
    if not isinstance(content, dict) or not isinstance(content.get("files", {}), dict):
        raise CheckpointError(file, "damaged: it is not what Megatron folders here have. Restore the file")
    return content


def model_of(path: Path) -> ModelConfig:
    """The architecture that state.json records."""
    try:
        saved = read_state(path)["config"]["model"]
        parts = {key: kind(**saved[key]) for key, kind in _PARTS.items() if saved.get(key) is not None}
        return ModelConfig(**(saved | parts | {"hf_path": None}))
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            path,
            f"{STATE} does not say which model this is ({error}); name a folder with its config.json by --hf_config",
        ) from error


def _wrong_sizes(path: Path) -> list[str]:
    """Files that are not as long as state.json says."""
    problems = []
    for name, size in read_state(path).get("files", {}).items():
        file = path / name
        if not file.is_file():
            problems.append(f"{name}: the file is missing")
        elif file.stat().st_size != size:
            problems.append(f"{name}: truncated or damaged: {file.stat().st_size} bytes instead of {size}")
    return problems


def _find(
    tensors: dict[str, StoredTensor], model: ModelConfig
) -> tuple[dict[str, tuple[Place, StoredTensor]], list[str]]:
    """Where every parameter of the table lies, and what is wrong with it."""
    prefix = next((p for p in _PREFIXES if f"{p}embedding.word_embeddings.weight" in tensors), "")
    found: dict[str, tuple[Place, StoredTensor]] = {}
    problems = []
    for name, weight in registry.weights(model).items():
        candidates = [Place(prefix + p.key, p.index, p.sizes) for p in places(weight, model)]
        place = next((p for p in candidates if p.key in tensors), None)
        if place is None:
            problems.append(f"{name}: missing; there is no key {candidates[0].key}")
            continue
        stored = tensors[place.key]
        expected = (*place.sizes, *weight.shape)
        # A vocabulary is saved with the padding of the layout that wrote it.
        padded = weight.padded and stored.shape[0] >= weight.shape[0] and stored.shape[1:] == weight.shape[1:]
        if stored.shape != expected and not padded:
            problems.append(f"{name}: {place.key} has shape {stored.shape}, but the model needs {expected}")
        elif not stored.dtype.is_floating_point or stored.dtype.itemsize < 2:
            problems.append(f"{name}: {place.key} is {stored.dtype}; read are BF16, FP16 and FP32")
        found[name] = place, stored
    known = {place.key for place, _ in found.values()}
    for key in tensors:
        plain = key.removeprefix(prefix)
        dropped = plain.startswith("mtp.") and not model.num_mtp_layers
        if plain.startswith(_MODEL_KEYS) and key not in known and not dropped and not key.endswith(_NOT_WEIGHTS):
            problems.append(f"{key}: not a parameter of a {model.family} model of this configuration")
    return found, problems
