"""Read rows of a Hugging Face checkpoint, whose names, types and shapes are checked before any weight is read.

In:  a folder with config.json and safetensors, sharded or not, in BF16, FP16, FP32 or 128x128 block FP8.
Out: its architecture, rows of every tensor in the name table, and its tokenizer and other small files.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint_tools import digests
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.row_chunks import row_chunks
from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.data.gguf_folder import model_folder
from megatron_fp8rl.data.model_files import FP8, FP8_DTYPE, INDEX, SCALE, compare, read_config, read_entries
from megatron_fp8rl.data.safetensors_file import Files
from megatron_fp8rl.data.safetensors_header import Entry
from megatron_fp8rl.names import registry
from megatron_fp8rl.precision.quantizers import dequantize

# Tokenizer, chat template, generation defaults, code and license.
_SIDE_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py", "LICENSE*")
_NOT_SIDE_FILES = {"config.json", INDEX, digests.FILE, "state.json", "metadata.json"}


@dataclass
class HfFolder:
    """A checkpoint, from :meth:`open`. Pickles without its open files."""

    path: Path
    config: dict[str, Any]
    model: ModelConfig
    entries: dict[str, Entry]  # tensors of the name table, and the scales of FP8 tensors
    skipped: dict[str, str]  # tensors that are not converted, and why
    recorded_digests: dict[str, str]
    untied_head: Entry | None = None  # a stored output head that config.json ties to the embedding
    _files: Files = field(default_factory=Files, repr=False)
    _digests: digests.TensorDigests | None = field(default=None, repr=False)
    _scales: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, path: str | Path, *, keep_mtp: bool | None = False) -> HfFolder:
        """Read headers and check names, types and shapes of all tensors. A GGUF file is converted first.

        ``keep_mtp``: include multi-token prediction layers. None includes them if the files have them; transformers
        drops them but leaves their number in config.json. Raises CheckpointError that lists every missing, damaged or
        unexpected tensor by name.
        """
        path = model_folder(Path(path))
        config = read_config(path)
        try:
            model = registry.from_hf_config(config, keep_mtp=keep_mtp is not False, fp8_weights=True)
        except ValueError as error:
            raise CheckpointError(path, str(error)) from error
        entries, problems, unreadable = read_entries(path)
        if problems and not (path / INDEX).is_file():
            raise CheckpointError(path, problems)  # the list of tensors is incomplete
        without_mtp = replace(model, num_mtp_layers=0)
        mtp = registry.hf_tensors(model).keys() - registry.hf_tensors(without_mtp).keys()
        if keep_mtp is None and mtp.isdisjoint(entries.keys() | unreadable):
            model = without_mtp
        skipped, table_problems = compare(entries, model, unreadable)
        problems += table_problems
        if problems:
            raise CheckpointError(path, problems)
        head = entries["lm_head.weight"] if model.tie_embeddings and "lm_head.weight" in skipped else None
        entries = {name: entry for name, entry in entries.items() if name not in skipped}
        return cls(path, config, model, entries, skipped, digests.read(path), head)

    @property
    def files(self) -> list[Path]:
        return sorted({entry.file for entry in self.entries.values()})

    @property
    def custom_code(self) -> list[str]:
        """Python classes and files in the folder, which no command runs."""
        auto_map = self.config.get("auto_map") or {}
        classes = sorted({str(value) for value in auto_map.values()}) if isinstance(auto_map, dict) else [str(auto_map)]
        return [*classes, *sorted(file.name for file in self.path.glob("*.py"))]

    def is_fp8(self, name: str) -> bool:
        return self.entries[name].dtype == FP8_DTYPE

    def dtype(self, name: str) -> torch.dtype:
        """Type of :meth:`rows`: FP8 is dequantized to BF16."""
        return torch.bfloat16 if self.is_fp8(name) else self.entries[name].dtype

    def rows(self, name: str, first: int, end: int) -> Tensor:
        """Rows [first, end) of a tensor; they must be read in order. Raises CheckpointError after the last row when the
        digest is not the recorded one."""
        entry = self.entries[name]
        block, end_block = FP8.blocks((first, end), 0)
        start = block * FP8.block_size(0) if self.is_fp8(name) else first
        rows = self._files.rows(entry, start, end)
        self._check_digest(name, start, rows)
        if not self.is_fp8(name):
            return rows
        return dequantize(rows, self._scale(name)[block:end_block], FP8)[first - start :].to(torch.bfloat16)

    def require_tied_head(self, memory_bytes: int) -> None:
        """Raise CheckpointError when a stored head differs from the embedding to which config.json ties it."""
        head = self.untied_head
        if head is None:
            return
        embedding = self.entries["model.embed_tokens.weight"]
        same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape) and all(
            torch.equal(*(self._files.rows(entry, *rows).view(torch.uint8) for entry in (head, embedding)))
            for rows in row_chunks(head.shape, memory_bytes)
        )
        if not same:
            raise CheckpointError(
                head.file,
                "lm_head.weight: differs from model.embed_tokens.weight, to which config.json ties it. If the head was "
                'trained separately, set "tie_word_embeddings" to false in config.json; else remove it from the file',
            )

    def stored(self, name: str, first: int = 0, end: int | None = None) -> Tensor:
        """Rows of a tensor as stored, without dequantization and digest check."""
        return self._files.rows(self.entries[name], first, end)

    def whole(self, name: str) -> Tensor:
        """All rows of a tensor, without digest check; FP8 is dequantized to BF16."""
        stored = self.stored(name)
        if not self.is_fp8(name):
            return stored
        return dequantize(stored, self._files.rows(self.entries[name + SCALE]).float(), FP8).to(torch.bfloat16)

    def _check_digest(self, name: str, first: int, rows: Tensor) -> None:
        if self.recorded_digests:
            self._digests = self._digests or digests.TensorDigests(self.path, self.recorded_digests)
            self._digests.add(name, first, rows, self.entries[name].shape[0])

    def _scale(self, name: str) -> Tensor:
        """Float32 scales of a whole FP8 matrix: a thousandth of its bytes."""
        if name not in self._scales:
            self._scales.clear()
            stored = self._files.rows(self.entries[name + SCALE])
            self._check_digest(name + SCALE, 0, stored)
            self._scales[name] = stored.float()
        return self._scales[name]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": Files(), "_digests": None, "_scales": {}}


def side_files(path: Path) -> list[Path]:
    """Files of a model besides config.json and weights: tokenizer, templates, license."""
    files = {file for pattern in _SIDE_FILES for file in path.glob(pattern) if file.is_file()}
    return sorted(file for file in files if file.name not in _NOT_SIDE_FILES)
