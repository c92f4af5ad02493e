"""One interface to checkpoints of any kind: tensors by name, read in rows.

In:  a Hugging Face folder, a distributed Megatron checkpoint, or the folder of a run.
Out: a :class:`View`. With Hugging Face names both kinds have the same tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.megatron_folder import MegatronFolder, find_checkpoint, is_megatron
from checkpoint_tools.megatron_keys import KeyIndex
from checkpoint_tools.row_chunks import ROW_MULTIPLE, segments
from checkpoint_tools.torch_dist import PieceReader, StoredTensor, find_problems, read_metadata
from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.data import model_files
from megatron_fp8rl.data.gguf_folder import model_folder
from megatron_fp8rl.data.model_files import FP8, SCALE
from megatron_fp8rl.data.safetensors_file import Files
from megatron_fp8rl.data.safetensors_header import Entry
from megatron_fp8rl.names import registry
from megatron_fp8rl.names.table import Weight
from megatron_fp8rl.precision.quantizers import dequantize


@dataclass(frozen=True, slots=True)
class TensorInfo:
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_dequantized: bool = False  # the file has another type

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1


class View(Protocol):
    path: Path
    tensors: Mapping[str, TensorInfo]

    def rows(self, name: str, first: int, end: int) -> Tensor: ...


@dataclass
class HfView:
    """A Hugging Face folder; ``dequantize`` reads FP8 matrices as FP32 and hides their scales."""

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
    """A distributed checkpoint with Hugging Face names, in the stored types."""

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
        parts = []
        for segment in segments(weight, self.folder.model):
            low, high = max(first, segment.start), min(end, segment.stop)
            if segment.part == part and low < high:
                offset = segment.offset + low - segment.start
                parts.append(self.folder.rows(weight, offset, offset + high - low))
        return torch.cat(parts)


@dataclass
class KeyView:
    """A distributed checkpoint with Megatron-Core's keys, including optimizer states."""

    path: Path
    stored: dict[str, StoredTensor]

    def __post_init__(self) -> None:
        # Each key is read like a parameter that is not stacked.
        locations = {key: (KeyIndex(key), tensor) for key, tensor in self.stored.items()}
        self._folder = MegatronFolder(self.path, None, {}, locations, PieceReader(self.path))  # type: ignore[arg-type]

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {key: TensorInfo(tensor.dtype, tensor.shape) for key, tensor in self.stored.items()}

    def rows(self, name: str, first: int, end: int) -> Tensor:
        weight = Weight(name, ((name, self.stored[name].shape),), "none", "copy")
        return self._folder.rows(weight, first, end)


def open_view(
    path: str | Path, *, dequantize: bool = False, by_key: bool = False, model: ModelConfig | None = None
) -> View:
    """Open a checkpoint of any kind: the folder of a checkpoint or a run.

    ``dequantize``: read FP8 matrices as FP32. ``by_key``: name the tensors of a distributed checkpoint by
    Megatron-Core's keys. ``model``: the architecture, for distributed checkpoints of other programs, which do not
    record it. Raises CheckpointError that lists everything missing, damaged or misnamed.
    """
    path = model_folder(Path(path))
    if not path.is_dir():
        raise CheckpointError(path, "there is no such folder")
    if not is_megatron(path):
        entries, problems, _ = model_files.read_entries(path)
        if problems:
            raise CheckpointError(path, problems)
        return HfView(path, entries, dequantize)
    path = find_checkpoint(path)
    if not by_key:
        return MegatronView(MegatronFolder.open(path, model))
    stored = read_metadata(path)
    problems = find_problems(path, stored)
    if problems:
        raise CheckpointError(path, problems)
    return KeyView(path, stored)


def chunk_rows(info: TensorInfo, memory_bytes: int) -> int:
    """Rows to read at a time, so that comparing a chunk of two checkpoints takes about ``memory_bytes``."""
    row_bytes = math.prod(info.shape[1:]) * 16
    return max(ROW_MULTIPLE, memory_bytes // max(1, row_bytes) // ROW_MULTIPLE * ROW_MULTIPLE)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def model_order(name: str) -> list[Any]:
    """Sort key: embedding first, layers by number, head last."""
    rank = 0 if "embed" in name else 2 if re.match(r"(lm_head|output_layer|model\.norm|decoder\.final)", name) else 1
    return [rank, *((1, int(part), "") if part.isdigit() else (0, 0, part) for part in name.split("."))]
