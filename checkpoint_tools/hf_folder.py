"""A Hugging Face checkpoint folder as a source of rows, checked against the name table before any weight is read.

In:  a folder with config.json and safetensors, sharded or not, in BF16, FP16, FP32 or 128x128 block FP8.
Out: its architecture, the rows of every tensor of the table, and the names of the files that belong to it.
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
from checkpoint_tools.safetensors_file import Entry, Files, read_header
from checkpoint_tools.strips import strips
from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.names import registry
from megatron_fp8rl.precision.formats import BLOCKWISE_FP32, SCALE_SUFFIX
from megatron_fp8rl.precision.quantizers import dequantize

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SCALE = SCALE_SUFFIX
FP8 = BLOCKWISE_FP32  # in which FP8 weights are read: scales that are powers of two are FP32 scales too
_FP8_DTYPE = getattr(torch, FP8.element)
_PLAIN = (torch.bfloat16, torch.float16, torch.float32)
_NUMBERED = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")
# What belongs to a model besides its weights: tokenizer, chat template, generation defaults, code and license.
_SIDE_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py", "LICENSE*")
_NOT_SIDE_FILES = {"config.json", INDEX, digests.FILE, "state.json", "metadata.json"}


@dataclass
class HfFolder:
    """An open checkpoint. Build it with :meth:`open`; it pickles without its open files."""

    path: Path
    config: dict[str, Any]
    model: ModelConfig
    entries: dict[str, Entry]  # tensors of the table, and the scales of those that are FP8
    left_out: dict[str, str]  # tensors that are not converted, and why
    recorded: dict[str, str]  # digests.json
    untied_head: Entry | None = None  # an output head that is stored although config.json ties it to the embedding
    _files: Files = field(default_factory=Files, repr=False)
    _running: digests.Running | None = field(default=None, repr=False)
    _scales: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, path: str | Path, *, keep_mtp: bool | None = False) -> HfFolder:
        """Read headers and check names, types and shapes of all tensors.

        ``keep_mtp`` None keeps multi-token prediction layers where the files have them: transformers writes none, and
        leaves their number in config.json as it was. Raises CheckpointError that lists everything that is missing, damaged or unexpected, by name.
        """
        path = Path(path)
        config = read_config(path)
        try:
            model = registry.from_hf_config(config, keep_mtp=keep_mtp is not False, fp8_weights=True)
        except ValueError as error:
            raise CheckpointError(path, str(error)) from error
        entries, problems, unreadable = read_entries(path)
        if problems and not (path / INDEX).is_file():
            raise CheckpointError(path, problems)  # what the files hold besides is not known
        if keep_mtp is None and not _has_mtp(entries.keys() | unreadable, model):
            model = replace(model, num_mtp_layers=0)
        left_out, wrong = _compare(entries, model, unreadable)
        problems += wrong
        if problems:
            raise CheckpointError(path, problems)
        wanted = {name for base in registry.hf_tensors(model) for name in (base, base + SCALE)}
        kept = {name: entry for name, entry in entries.items() if name in wanted}
        head = entries["lm_head.weight"] if model.tie_embeddings and "lm_head.weight" in left_out else None
        return cls(path, config, model, kept, left_out, digests.read(path), head)

    @property
    def files(self) -> list[Path]:
        return sorted({entry.file for entry in self.entries.values()})

    @property
    def own_code(self) -> list[str]:
        """Files and classes of code in the folder, which no command runs."""
        classes = self.config.get("auto_map") or {}
        named = sorted({str(value) for value in classes.values()}) if isinstance(classes, dict) else [str(classes)]
        return [*named, *sorted(file.name for file in self.path.glob("*.py"))]

    def is_fp8(self, name: str) -> bool:
        return self.entries[name].dtype == _FP8_DTYPE

    def dtype(self, name: str) -> torch.dtype:
        """Type in which rows come: FP8 is dequantized to BF16."""
        return torch.bfloat16 if self.is_fp8(name) else self.entries[name].dtype

    def rows(self, name: str, first: int, end: int) -> Tensor:
        """Rows [first, end) of a tensor. Rows of one tensor have to be asked for in order.

        Raises CheckpointError, after the last row, when a tensor is not the one of digests.json.
        """
        entry = self.entries[name]
        block, end_block = FP8.blocks((first, end), 0)
        start = block * FP8.block_size(0) if self.is_fp8(name) else first
        rows = self._files.rows(entry, start, end)
        if self.recorded:
            self._digests.add(name, start, rows, entry.shape[0])
        if not self.is_fp8(name):
            return rows
        return dequantize(rows, self._scale(name)[block:end_block], FP8)[first - start :].to(torch.bfloat16)

    def require_tied_head(self, memory_bytes: int) -> None:
        """Read a head that is stored beside the embedding to which it is tied: it may be left out if it is the same.

        Raises CheckpointError when it is not.
        """
        head = self.untied_head
        if head is None:
            return
        embedding = self.entries["model.embed_tokens.weight"]
        same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape) and all(
            torch.equal(*(self._files.rows(entry, *rows).view(torch.uint8) for entry in (head, embedding)))
            for rows in strips(head.shape, memory_bytes)
        )
        if not same:
            raise CheckpointError(
                head.file,
                "lm_head.weight: differs from model.embed_tokens.weight, to which config.json ties it. If the head was "
                'trained apart, write "tie_word_embeddings": false into config.json; else remove it from the file',
            )

    def stored(self, name: str, first: int = 0, end: int | None = None) -> Tensor:
        """Rows of a tensor, scales included, as the file has them; not compared with digests.json."""
        return self._files.rows(self.entries[name], first, end)

    @property
    def _digests(self) -> digests.Running:
        if self._running is None:
            self._running = digests.Running(self.path, self.recorded)
        return self._running

    def _scale(self, name: str) -> Tensor:
        """Float32 scales of a whole FP8 matrix: a thousandth of its size."""
        if name not in self._scales:
            self._scales.clear()
            stored = self._files.rows(self.entries[name + SCALE])
            if self.recorded:
                self._digests.add(name + SCALE, 0, stored, len(stored))
            self._scales[name] = stored.float()
        return self._scales[name]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": Files(), "_running": None, "_scales": {}}


def read_config(path: Path) -> dict[str, Any]:
    """Content of config.json. Raises CheckpointError when there is none or it is damaged."""
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
    """Files that belong to a model besides config.json and its weights."""
    found = {file for pattern in _SIDE_FILES for file in path.glob(pattern) if file.is_file()}
    return sorted(file for file in found if file.name not in _NOT_SIDE_FILES)


def has_tokenizer(files: Iterable[Path]) -> bool:
    return any(file.name in ("tokenizer.json", "tokenizer.model", "vocab.json") for file in files)


def read_entries(path: Path) -> tuple[dict[str, Entry], list[str], set[str]]:
    """(every tensor in a folder's safetensors, what is wrong with the files, tensors of files that cannot be read)."""
    index = path / INDEX
    if index.is_file():
        try:
            listed: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
            shards = sorted(set(listed.values()))
            if not all(isinstance(file, str) for file in shards):
                raise TypeError("weight_map has something else than names of files")
            if outside := [file for file in shards if Path(file).name != file]:
                raise ValueError(f"weight_map names {outside[0]!r}, which is not a file of this folder")
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(index, f"damaged: {error}. Fetch the file again") from error
        if SINGLE not in shards and (path / SINGLE).exists():
            raise CheckpointError(path, f"{SINGLE} is there, and {INDEX}, which does not name it. Remove one of them")
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
            found = read_header(path / shard)
        except CheckpointError as error:
            problems += [f"{shard}: {problem}" for problem in error.problems]
            unreadable |= {name for name, file in listed.items() if file == shard}
            continue
        problems += [f"{name}: in {shard} and in {entries[name].file.name}" for name in found if name in entries]
        entries |= found
        expected = {name for name, file in listed.items() if file == shard}
        if listed:
            problems += [
                f"{name}: {INDEX} says {shard}, which does not hold it" for name in sorted(expected - set(found))
            ]
            problems += [f"{name}: in {shard}, but not in {INDEX}" for name in sorted(set(found) - expected)]
    return entries, problems, unreadable


def _no_safetensors(path: Path) -> str:
    """What is there instead of safetensors, and what to do about it."""
    said = f"neither {SINGLE} nor {INDEX} is there; other formats of weights are not read"
    if any(path.glob("*.distcp")):
        return f"{said}. This is a Megatron-Core checkpoint: make it one of Hugging Face by megatron_to_hf"
    others = sorted(path.glob("pytorch_model*.bin"))
    if not others:
        return f"{said}. Fetch the model again, or name its folder"
    model = f'AutoModelForCausalLM.from_pretrained("{path}", dtype="auto")'
    return f"{said}. For {others[0].name}: {model}.save_pretrained(NEW_FOLDER) of transformers makes safetensors of it"


def _missing_numbers(shards: Sequence[str], listed: dict[str, str]) -> list[str]:
    """Files of a numbered series that are not there, when no index could say so."""
    series = [match for shard in shards if (match := _NUMBERED.fullmatch(shard))]
    if listed or not series:
        return []
    total, digits = max(int(match[2]) for match in series), len(series[0][1])
    wanted = {f"model-{i:0{digits}}-of-{total:0{digits}}.safetensors" for i in range(1, total + 1)}
    return [f"{name}: the file is missing. Fetch it" for name in sorted(wanted - set(shards))]


def _has_mtp(stored: Iterable[str], model: ModelConfig) -> bool:
    """Whether any tensor of the multi-token prediction layers is there."""
    mtp = registry.hf_tensors(model).keys() - registry.hf_tensors(replace(model, num_mtp_layers=0)).keys()
    return not mtp.isdisjoint(stored)


def _compare(entries: dict[str, Entry], model: ModelConfig, unreadable: set[str]) -> tuple[dict[str, str], list[str]]:
    """(tensors to leave out and why, problems) of a folder's tensors against the name table."""
    expected = registry.hf_tensors(model)
    missing = [name for name in expected if name not in entries and name not in unreadable]
    left_out: dict[str, str] = {}
    problems = []
    for name in entries:
        base = name.removesuffix(SCALE)
        if base in expected:
            continue
        reason = registry.reason_to_skip(base, model)
        if reason is not None:
            left_out[name] = reason
            continue
        near = difflib.get_close_matches(name, missing, n=1, cutoff=0.8)
        hint = f"; is it {near[0]}, which is missing?" if near else ""
        problems.append(f"{name}: not a tensor of a {model.family} model of this config.json{hint}")
    problems += [f"{name}: missing; no file holds it" for name in missing]
    for name, shape in expected.items():
        if name in entries:
            problems += _wrong_with(name, entries, shape)
    return left_out, problems


def _wrong_with(name: str, entries: dict[str, Entry], shape: tuple[int, ...]) -> list[str]:
    entry, scale = entries[name], entries.get(name + SCALE)
    if entry.shape != shape:
        return [f"{name}: shape {entry.shape} in {entry.file.name}, but config.json says {shape}"]
    if entry.dtype == _FP8_DTYPE:
        if len(shape) != 2:
            return [f"{name}: FP8 of shape {shape}; block FP8 is read for matrices only"]
        if scale is None:
            return [f"{name}{SCALE}: missing; {name} is FP8 and means nothing without its scales"]
        if scale.shape != (blocks := FP8.scale_shape(shape)):
            return [f"{name}{SCALE}: shape {scale.shape}, but blocks of {FP8.block_size(0)} need {blocks}"]
        if scale.dtype not in (*_PLAIN, torch.float8_e8m0fnu):
            return [f"{name}{SCALE}: type {scale.dtype}; scales are read as BF16, FP16, FP32 or E8M0"]
        return []
    if entry.dtype not in _PLAIN:
        return [f"{name}: type {entry.dtype}; read are BF16, FP16, FP32 and block FP8 (E4M3)"]
    return [f"{name}{SCALE}: scales of a tensor that is {entry.dtype}"] if scale is not None else []
