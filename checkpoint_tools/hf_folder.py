"""Read rows of a Hugging Face checkpoint, whose names, types and shapes are checked before any weight is read.

In:  a folder with config.json and safetensors, sharded or not, in BF16, FP16, FP32 or 128x128 block FP8.
Out: its architecture, rows of every tensor in the name table, and its tokenizer and other small files.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint_tools import digests
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.row_chunks import row_chunks
from checkpoint_tools.safetensors_file import Entry, Files, read_header
from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.names import registry
from megatron_fp8rl.precision.formats import BLOCKWISE_FP32, SCALE_SUFFIX
from megatron_fp8rl.precision.quantizers import dequantize

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SCALE = SCALE_SUFFIX
FP8 = BLOCKWISE_FP32  # also reads power-of-two scales
_FP8_DTYPE = getattr(torch, FP8.element)
_PLAIN = (torch.bfloat16, torch.float16, torch.float32)
_NUMBERED = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")
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
        """Read headers and check names, types and shapes of all tensors.

        Args:
            path: The folder.
            keep_mtp: Include multi-token prediction layers. None includes them if the files have them; transformers
                drops them but leaves their number in config.json.

        Raises:
            CheckpointError: lists every missing, damaged or unexpected tensor by name.
        """
        path = Path(path)
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
        skipped, table_problems = _compare(entries, model, unreadable)
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
        return self.entries[name].dtype == _FP8_DTYPE

    def dtype(self, name: str) -> torch.dtype:
        """Type of :meth:`rows`: FP8 is dequantized to BF16."""
        return torch.bfloat16 if self.is_fp8(name) else self.entries[name].dtype

    def rows(self, name: str, first: int, end: int) -> Tensor:
        """Rows [first, end) of a tensor. A tensor's rows must be read in order.

        Raises CheckpointError after the last row when the tensor's digest is not the recorded one.
        """
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


def read_config(path: Path) -> dict[str, Any]:
    """Content of config.json. Raises CheckpointError when it is missing or damaged."""
    file = path / "config.json"
    if not path.is_dir():
        raise CheckpointError(path, "there is no such folder")
    if not file.is_file():
        raise CheckpointError(path, "config.json is missing; is this a Hugging Face checkpoint?")
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(file, f"damaged: it is not JSON ({error}). Fetch the file again") from error
    if not isinstance(content, dict):
        raise CheckpointError(file, "damaged: it is not a JSON object. Fetch the file again")
    return content


def side_files(path: Path) -> list[Path]:
    """Files of a model besides config.json and weights: tokenizer, templates, license."""
    files = {file for pattern in _SIDE_FILES for file in path.glob(pattern) if file.is_file()}
    return sorted(file for file in files if file.name not in _NOT_SIDE_FILES)


def has_tokenizer(files: Iterable[Path]) -> bool:
    return any(file.name in ("tokenizer.json", "tokenizer.model", "vocab.json") for file in files)


def read_entries(path: Path) -> tuple[dict[str, Entry], list[str], set[str]]:
    """(all tensors in a folder's safetensors, problems of the files, tensors of unreadable files)."""
    index = path / INDEX
    if index.is_file():
        try:
            listed: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
            shards = sorted(set(listed.values()))
            if not all(isinstance(file, str) for file in shards):
                raise TypeError("weight_map has values that are not file names")
            if outside := [file for file in shards if Path(file).name != file]:
                raise ValueError(f"weight_map names {outside[0]!r}, which is not a file of this folder")
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(index, f"damaged: {error}. Fetch the file again") from error
        if SINGLE not in shards and (path / SINGLE).exists():
            raise CheckpointError(path, f"{SINGLE} exists, but {INDEX} does not list it. Remove one of them")
    elif (path / SINGLE).is_file():
        listed, shards = {}, [SINGLE]
    else:
        listed, shards = {}, sorted(file.name for file in path.glob("model-*.safetensors"))
        if not shards:
            raise CheckpointError(path, _no_safetensors(path))
    entries: dict[str, Entry] = {}
    unreadable: set[str] = set()
    problems = _missing_numbers(shards, listed) if not (path / SINGLE).is_file() else []
    for shard in shards:
        try:
            stored = read_header(path / shard)
        except CheckpointError as error:
            problems += [f"{shard}: {problem}" for problem in error.problems]
            unreadable |= {name for name, file in listed.items() if file == shard}
            continue
        problems += [f"{name}: in {shard} and in {entries[name].file.name}" for name in stored if name in entries]
        entries |= stored
        if listed:
            expected, names = {name for name, file in listed.items() if file == shard}, set(stored)
            problems += [f"{name}: {INDEX} says {shard}, which lacks it" for name in sorted(expected - names)]
            problems += [f"{name}: in {shard}, but not in {INDEX}" for name in sorted(names - expected)]
    return entries, problems, unreadable


def _no_safetensors(path: Path) -> str:
    """Error of a folder without safetensors, with a remedy for the format that it has."""
    missing = f"neither {SINGLE} nor {INDEX} exists; other weight formats are not supported"
    if any(path.glob("*.distcp")):
        return f"{missing}. This is a Megatron-Core checkpoint: convert it with megatron_to_hf"
    others = sorted(path.glob("pytorch_model*.bin"))
    if not others:
        return f"{missing}. Fetch the model again, or name its folder"
    model = f'AutoModelForCausalLM.from_pretrained("{path}", dtype="auto")'
    return f"{missing}. Convert {others[0].name} with transformers: {model}.save_pretrained(NEW_FOLDER)"


def _missing_numbers(shards: Sequence[str], listed: dict[str, str]) -> list[str]:
    """Missing files of a numbered series without an index."""
    series = [match for shard in shards if (match := _NUMBERED.fullmatch(shard))]
    if listed or not series:
        return []
    total, digits = max(int(match[2]) for match in series), len(series[0][1])
    wanted = {f"model-{i:0{digits}}-of-{total:0{digits}}.safetensors" for i in range(1, total + 1)}
    return [f"{name}: the file is missing. Fetch it" for name in sorted(wanted - set(shards))]


def _compare(entries: dict[str, Entry], model: ModelConfig, unreadable: set[str]) -> tuple[dict[str, str], list[str]]:
    """Compare stored tensors with the name table: (tensors to skip and why, problems)."""
    expected = registry.hf_tensors(model)
    missing = [name for name in expected if name not in entries and name not in unreadable]
    skipped: dict[str, str] = {}
    problems = []
    for name in entries:
        base = name.removesuffix(SCALE)
        if base in expected:
            continue
        reason = registry.reason_to_skip(base, model)
        if reason is not None:
            skipped[name] = reason
            continue
        near = difflib.get_close_matches(name, missing, n=1, cutoff=0.8)
        hint = f"; is it {near[0]}, which is missing?" if near else ""
        problems.append(f"{name}: not a tensor of this {model.family} model{hint}")
    problems += [f"{name}: missing; no file holds it" for name in missing]
    for name, shape in expected.items():
        if name in entries:
            problems += _tensor_problems(name, entries, shape)
    return skipped, problems


def _tensor_problems(name: str, entries: dict[str, Entry], shape: tuple[int, ...]) -> list[str]:
    entry, scale = entries[name], entries.get(name + SCALE)
    if entry.shape != shape:
        return [f"{name}: shape {entry.shape} in {entry.file.name}, but config.json says {shape}"]
    if entry.dtype == _FP8_DTYPE:
        if len(shape) != 2:
            return [f"{name}: FP8 of shape {shape}; block FP8 is supported for matrices only"]
        if scale is None:
            return [f"{name}{SCALE}: missing; {name} is FP8 and needs its scales"]
        if scale.shape != (blocks := FP8.scale_shape(shape)):
            return [f"{name}{SCALE}: shape {scale.shape}, but blocks of {FP8.block_size(0)} need {blocks}"]
        if scale.dtype not in (*_PLAIN, torch.float8_e8m0fnu):
            return [f"{name}{SCALE}: type {scale.dtype}; supported scales are BF16, FP16, FP32 and E8M0"]
        return []
    if entry.dtype not in _PLAIN:
        return [f"{name}: type {entry.dtype}; supported are BF16, FP16, FP32 and block FP8 (E4M3)"]
    return [f"{name}{SCALE}: scales of a tensor that is {entry.dtype}"] if scale is not None else []
