"""Two checkpoints of any kind as the same thing: tensors by name, read a few rows at a time.

In:  a Hugging Face folder, a distributed Megatron checkpoint, or the folder of a run. Out: a :class:`View`.

Under Hugging Face names both kinds have the same tensors, so a conversion can be compared with what it was made of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from checkpoint_tools import hf_folder, strips
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.hf_folder import FP8, SCALE
from checkpoint_tools.keys import Place
from checkpoint_tools.megatron_folder import MegatronFolder, is_megatron, model_of, resolve
from checkpoint_tools.safetensors_file import Entry, Files
from checkpoint_tools.torch_dist import PieceReader, StoredTensor, problems_of, read_metadata
from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.names import registry
from megatron_fp8rl.names.table import Weight
from megatron_fp8rl.precision.quantizers import dequantize


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Type and shape of a tensor, as rows of it come."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    is_dequantized: bool = False  # no file has this type

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1


class View(Protocol):
    """A checkpoint that can be compared."""

    path: Path
    tensors: Mapping[str, TensorInfo]

    def rows(self, name: str, first: int, end: int) -> Tensor:
        """Rows [first, end) of a tensor."""
        ...


@dataclass
class HfView:
    """A Hugging Face folder; with ``dequantize``, FP8 matrices are FP32 and their scales are no tensors."""

    path: Path
    entries: dict[str, Entry]
    dequantize: bool
    files: Files = field(default_factory=Files, repr=False)

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {
            name: TensorInfo(torch.float32, entry.shape, is_dequantized=True)
            if self._is_quantized(name)
            else TensorInfo(entry.dtype, entry.shape)
            for name, entry in self.entries.items()
            if not (self.dequantize and name.endswith(SCALE))
        }

    def _is_quantized(self, name: str) -> bool:
        return self.dequantize and name + SCALE in self.entries

    def rows(self, name: str, first: int, end: int) -> Tensor:
        entry = self.entries[name]
        if not self._is_quantized(name):
            return self.files.rows(entry) if not entry.shape else self.files.rows(entry, first, end)
        block, end_block = FP8.blocks((first, end), 0)
        start = block * FP8.block_size(0)
        scales = self.files.rows(self.entries[name + SCALE], block, end_block).float()
        return dequantize(self.files.rows(entry, start, end), scales, FP8)[first - start :]


@dataclass
class MegatronView:
    """A distributed checkpoint under Hugging Face names: what a conversion would write, in the stored types."""

    folder: MegatronFolder
    _parts: dict[str, tuple[Weight, int]] = field(default_factory=dict, repr=False)  # (Megatron weight, part)

    def __post_init__(self) -> None:
        for weight in registry.weights(self.folder.model).values():
            self._parts |= {name: (weight, part) for part, (name, _) in enumerate(weight.parts)}
            self._parts |= dict.fromkeys(weight.copies, (weight, 0))

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {
            name: TensorInfo(self.folder.dtype(weight), weight.parts[part][1])
            for name, (weight, part) in self._parts.items()
        }

    def rows(self, name: str, first: int, end: int) -> Tensor:
        weight, part = self._parts[name]
        found = []
        for segment in strips.segments(weight, self.folder.model):
            low, high = max(first, segment.start), min(end, segment.stop)
            if segment.part == part and low < high:
                offset = segment.offset + low - segment.start
                found.append(self.folder.rows(weight, offset, offset + high - low))
        return found[0] if len(found) == 1 else torch.cat(found)


@dataclass
class KeyView:
    """A distributed checkpoint under its own keys, the states of the optimizer among them."""

    path: Path
    stored: dict[str, StoredTensor]

    def __post_init__(self) -> None:
        places = {key: (Place(key), tensor) for key, tensor in self.stored.items()}
        # A folder without a model: its keys stand for parameters that are not stacked.
        self._folder = MegatronFolder(self.path, None, {}, places, PieceReader(self.path))  # type: ignore[arg-type]

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {key: TensorInfo(tensor.dtype, tensor.shape) for key, tensor in self.stored.items()}

    def rows(self, name: str, first: int, end: int) -> Tensor:
        weight = Weight(name, ((name, self.stored[name].shape),), "none", "copy")
        return self._folder.rows(weight, first, end)


def open_view(
    path: str | Path, *, dequantize: bool = False, by_key: bool = False, model: ModelConfig | None = None
) -> View:
    """Open a checkpoint of any kind.

    ``by_key`` keeps Megatron's own keys. ``model`` is for distributed checkpoints of other programs, which do not say
    what they hold. Raises CheckpointError that lists everything missing, damaged or misnamed.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(path, "there is no such folder")
    if not is_megatron(path):
        entries, problems, _ = hf_folder.read_entries(path)
        if problems:
            raise CheckpointError(path, problems)
        return HfView(path, entries, dequantize)
    path = resolve(path)
    if not by_key:
        return MegatronView(MegatronFolder.open(path, model or model_of(path)))
    stored = read_metadata(path)
    problems = problems_of(path, stored)
    if problems:
        raise CheckpointError(path, problems)
    return KeyView(path, stored)


def strip_rows(info: TensorInfo, memory_bytes: int) -> int:
    """Rows to read at a time, whole blocks of FP8, so that one strip of two checkpoints stays near ``memory_bytes``."""
    row_bytes = math.prod(info.shape[1:]) * 16
    return max(strips.UNIT, memory_bytes // max(1, row_bytes) // strips.UNIT * strips.UNIT)
