"""Write a sharded Hugging Face checkpoint from several processes, and read it back.

In:  names, types and shapes of its tensors, in order.
Out: shard files of full size whose rows are written in any order; then index, digests, config.json and tokenizer.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from checkpoint_tools import digests
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.output import Output
from checkpoint_tools.row_chunks import row_chunks
from megatron_fp8rl.data.fused_tensors import SEPARATE, Fusion
from megatron_fp8rl.data.model_files import INDEX, SINGLE
from megatron_fp8rl.data.safetensors_file import Files, create_file
from megatron_fp8rl.data.safetensors_header import Entry, Shapes


@dataclass
class HfWriter:
    """Writes rows into the shards of a folder. Each worker has a pickled copy, without open files."""

    entries: dict[str, Entry]
    memory_bytes: int
    fusion: Fusion = SEPARATE
    _files: Files = field(default_factory=lambda: Files(writable=True), repr=False)

    @classmethod
    def create(
        cls, folder: Path, tensors: Shapes, shard_gb: float, memory_bytes: int, *, fusion: Fusion = SEPARATE
    ) -> HfWriter:
        """Create shards of at most ``shard_gb`` 10^9 bytes; a larger tensor gets its own shard. Raises OSError.
        ``fusion``: how the files combine tensors."""
        if not 0 < shard_gb < math.inf:
            raise ValueError(f"--shard_gb {shard_gb}: expected GB of a file, more than 0")
        shards: list[dict] = [{}]
        total = 0
        for name, (dtype, shape) in fusion.shapes(tensors).items():
            num_bytes = math.prod(shape) * dtype.itemsize
            if shards[-1] and total + num_bytes > int(shard_gb * 1e9):
                shards.append({})
                total = 0
            shards[-1][name] = dtype, shape
            total += num_bytes
        entries: dict[str, Entry] = {}
        for i, shard in enumerate(shards, 1):
            file = SINGLE if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
            entries |= create_file(folder / file, shard)
        return cls(fusion.split_entries(entries), memory_bytes, fusion)

    def write(self, name: str, first: int, rows: Tensor) -> None:
        """Write ``rows`` at row ``first`` of a tensor. Raises OSError."""
        self._files.write_rows(self.entries[name], first, rows)

    def verify(self, written: Mapping[str, str]) -> None:
        """Read tensors back from the disk and compare them with the digests of what was written. Raises CheckpointError
        that names the file and the tensor."""
        self._files.sync()
        for file in {self.entries[name].file for name in written}:
            self._files.drop_cache(file)
        stored = digests.TensorDigests("")
        for name, value in written.items():
            entry = self.entries[name]
            for first, end in row_chunks(entry.shape, self.memory_bytes):
                stored.add(name, first, self._files.rows(entry, first, end), entry.shape[0])
            if stored.done[name] != value:
                raise CheckpointError(entry.file, f"{name}: the disk has other bytes than were written. Check the disk")
        self._files.close()

    def finish(self, output: Output, source: str, config: dict[str, Any], side_files: list[Path]) -> None:
        folder, values, files = output.partial, output.digests, {entry.file.name for entry in self.entries.values()}
        digests.write(folder, {name: values[name] for name in self.entries}, source=source)
        if len(files) > 1:
            total = sum(entry.num_bytes for entry in self.entries.values())
            weight_map = {self.fusion.name(name): entry.file.name for name, entry in self.entries.items()}
            write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        write_json(folder / "config.json", config)
        for file in side_files:
            shutil.copyfile(file, folder / file.name)
        if not (folder / "generation_config.json").exists():
            keys = ("bos_token_id", "eos_token_id", "pad_token_id")
            write_json(
                folder / "generation_config.json", {key: config[key] for key in keys if config.get(key) is not None}
            )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": Files(writable=True)}


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
