"""Write a Hugging Face checkpoint of many shards from several processes, and read it back.

In:  names, types and shapes of its tensors, in order. Out: shard files of full size with their index, whose rows are
     then written in any order; config.json and the files that belong to the model.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint_tools import digests
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.hf_folder import INDEX, SINGLE
from checkpoint_tools.safetensors_file import Entry, Files, plan_file, write_header
from checkpoint_tools.strips import strips

Tensors = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def plan_shards(folder: Path, tensors: Tensors, max_shard_bytes: int) -> list[dict[str, Entry]]:
    """Where every tensor is to lie: shards of at most ``max_shard_bytes``, or of one larger tensor."""
    shards: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = [{}]
    total = 0
    for name, (dtype, shape) in tensors.items():
        num_bytes = math.prod(shape) * dtype.itemsize
        if shards[-1] and total + num_bytes > max_shard_bytes:
            shards.append({})
            total = 0
        shards[-1][name] = dtype, shape
        total += num_bytes
    return [
        plan_file(folder / (SINGLE if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"), shard)
        for i, shard in enumerate(shards, 1)
    ]


def shard_bytes(shard_gb: float) -> int:
    """Largest shard in bytes. Raises ValueError."""
    if not 0 < shard_gb < math.inf:
        raise ValueError(f"--shard_gb {shard_gb}: expected GB of a file, more than 0")
    return int(shard_gb * 1e9)


def create_shards(shards: list[dict[str, Entry]]) -> None:
    """Make the files, of full size, except those that an interrupted run has made. Raises OSError."""
    for shard in shards:
        write_header(shard)


@dataclass
class HfWriter:
    """Rows into the shards. Each worker has one; it pickles without its open files."""

    entries: dict[str, Entry]
    memory_bytes: int
    _files: Files = field(default_factory=lambda: Files(writable=True), repr=False)

    def write(self, name: str, first: int, rows: Tensor) -> None:
        """Put ``rows`` at rows ``first`` and following of a tensor. Raises OSError."""
        self._files.write_rows(self.entries[name], first, rows)

    def verify(self, written: Mapping[str, str]) -> None:
        """Bring everything to the disk and compare what is there with the digests of what was written.

        Raises CheckpointError that names the file and the tensor.
        """
        self._files.sync()
        for file in {self.entries[name].file for name in written}:
            self._files.forget_cache(file)
        again = digests.Running("")
        for name, value in written.items():
            entry = self.entries[name]
            for first, end in strips(entry.shape, self.memory_bytes):
                again.add(name, first, self._files.rows(entry, first, end), entry.shape[0])
            if again.done[name] != value:
                raise CheckpointError(
                    entry.file, f"{name}: what is on the disk is not what was written. Check the disk"
                )
        self._files.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": Files(writable=True)}


def write_rest(folder: Path, shards: list[dict[str, Entry]], config: Mapping[str, Any], side_files: list[Path]) -> None:
    """Everything besides the weights: index, config.json, generation_config.json, tokenizer."""
    if len(shards) > 1:
        total = sum(entry.num_bytes for shard in shards for entry in shard.values())
        where = {name: entry.file.name for shard in shards for name, entry in shard.items()}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    write_json(folder / "config.json", config)
    for file in side_files:
        shutil.copyfile(file, folder / file.name)
    if not (folder / "generation_config.json").exists():
        special = {
            key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) is not None
        }
        write_json(folder / "generation_config.json", special)


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
