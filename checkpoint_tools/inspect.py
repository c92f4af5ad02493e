"""What is in a checkpoint: tensors with shapes, types and sizes, and how many parameters they make up.

In:  a Hugging Face folder (BF16, FP16, FP32 or block FP8), a distributed Megatron checkpoint, or the folder of a run,
     whose newest checkpoint is taken. Out: a table. Headers and metadata are read, weights are not.

Files that are missing, truncated or do not fit their index, and tensors whose names or shapes do not fit config.json,
are refused by name.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from checkpoint_tools import hf_folder
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.megatron_folder import is_megatron, model_of, resolve
from checkpoint_tools.torch_dist import problems_of, read_metadata
from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.names import registry
from megatron_fp8rl.precision.parameters import count

_GIB = 1 << 30
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_OPTIMIZER = "optimizer."


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to list."""

    path: Annotated[Path, tyro.conf.Positional]  # checkpoint folder, or the folder of a run
    all: bool = False  # every tensor in a line of its own, instead of one line for all layers and experts
    filter: str | None = None  # names to list, with * and ?; None: all but the states of an optimizer
    json: bool = False  # one JSON object instead of a table


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor as a file declares it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    files: tuple[str, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Everything that can be known of a checkpoint without reading weights."""

    path: Path
    kind: str
    tensors: tuple[Tensor, ...]
    model: ModelConfig | None  # None when it is not known, or not supported
    notes: tuple[str, ...]  # what was not checked or is left out, and why

    @property
    def num_parameters(self) -> int:
        """Numbers in weights: without scales of FP8 and without states of an optimizer."""
        return sum(t.numel for t in self.tensors if is_weight(t.name))


def is_weight(name: str) -> bool:
    """Whether a stored tensor counts as parameters."""
    return not name.endswith(hf_folder.SCALE) and not name.startswith(_OPTIMIZER) and "fp8.history" not in name


def read(path: str | Path) -> Contents:
    """Look into a checkpoint. Raises CheckpointError that lists everything missing, damaged or misnamed."""
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(path, "there is no such folder")
    return _read_megatron(path) if is_megatron(path) else _read_hf(path)


def _read_hf(path: Path) -> Contents:
    entries, problems, _ = hf_folder.read_entries(path)
    if problems:
        raise CheckpointError(path, problems)
    model, notes = None, []
    config = hf_folder.read_config(path)
    try:
        said = registry.from_hf_config(config, keep_mtp=True, fp8_weights=True)
    except ValueError as error:
        notes.append(f"names and shapes are not checked: {error}")
    else:
        folder = hf_folder.HfFolder.open(path, keep_mtp=None)
        model = folder.model
        notes += _left_out(folder)
        if said.num_mtp_layers > model.num_mtp_layers:
            notes.append("config.json counts multi-token prediction layers, of which no file holds a tensor")
    tensors = tuple(
        Tensor(
            name=name,
            dtype=_short(entry.dtype),
            shape=entry.shape,
            num_bytes=entry.num_bytes,
            files=(entry.file.name,),
        )
        for name, entry in sorted(entries.items(), key=lambda item: _natural(item[0]))
    )
    return Contents(path=path, kind="Hugging Face", tensors=tensors, model=model, notes=tuple(notes))


def _left_out(folder: hf_folder.HfFolder) -> list[str]:
    return [
        f"{len(list(group))} tensors are left out by a conversion: {reason}"
        for reason, group in itertools.groupby(sorted(folder.left_out.values()))
    ]


def _read_megatron(path: Path) -> Contents:
    path = resolve(path)
    stored = read_metadata(path)
    problems = problems_of(path, stored)
    if problems:
        raise CheckpointError(path, problems)
    notes = []
    model = None
    try:
        model = model_of(path)
    except CheckpointError:
        notes.append("state.json does not say which model this is, so names and shapes are not checked")
    if model is not None:
        from checkpoint_tools.megatron_folder import MegatronFolder

        MegatronFolder.open(path, model)  # compares every parameter's key, shape and files
    tensors = tuple(
        Tensor(
            name=key,
            dtype=_short(tensor.dtype),
            shape=tensor.shape,
            num_bytes=math.prod(tensor.shape) * tensor.dtype.itemsize,
            files=tuple(sorted({piece.file for piece in tensor.pieces})),
        )
        for key, tensor in sorted(stored.items(), key=lambda item: _natural(item[0]))
    )
    return Contents(path=path, kind="Megatron torch_dist", tensors=tensors, model=model, notes=tuple(notes))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _natural(name: str) -> list[Any]:
    """Order in which layer 10 comes after layer 9; what is outside layers keeps its place by name."""
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in name.split(".")]


@dataclass(frozen=True, kw_only=True)
class Line:
    """Tensors that differ in the numbers of their names alone."""

    name: str  # with ranges for numbers
    count: int
    dtype: str
    shape: tuple[int, ...]
    num_parameters: int  # 0 for scales and optimizer states
    num_bytes: int


def lines(contents: Contents, *, every: bool = False, pattern: str | None = None) -> list[Line]:
    """The table: one line for each kind of tensor, or for ``every`` tensor, whose name matches ``pattern``.

    Without a pattern the states of an optimizer are left out.
    """
    groups: dict[tuple, list[Tensor]] = {}
    for tensor in contents.tensors:
        is_listed = (
            not tensor.name.startswith(_OPTIMIZER) if pattern is None else fnmatch.fnmatchcase(tensor.name, pattern)
        )
        if is_listed:
            kind = tensor.name if every else _NUMBER.sub("#", tensor.name)
            groups.setdefault((kind, tensor.dtype, tensor.shape), []).append(tensor)
    return [
        Line(
            name=_with_ranges(kind, [t.name for t in members]),
            count=len(members),
            dtype=dtype,
            shape=shape,
            num_parameters=sum(t.numel for t in members if is_weight(t.name)),
            num_bytes=sum(t.num_bytes for t in members),
        )
        for (kind, dtype, shape), members in groups.items()
    ]


def _with_ranges(kind: str, members: Sequence[str]) -> str:
    """``model.layers.{0-3}.mlp.gate.weight`` for the numbers that occur; gaps are shown as such."""
    numbers = [[int(number) for number in _NUMBER.findall(name)] for name in members]
    for position in range(kind.count("#")):
        kind = kind.replace("#", _ranges(sorted({found[position] for found in numbers})), 1)
    return kind


def _ranges(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return "{" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) + "}"


def summary(contents: Contents) -> list[str]:
    """Totals, one sentence a line."""
    tensors = contents.tensors
    weights = [t for t in tensors if is_weight(t.name)]
    files = {file for tensor in tensors for file in tensor.files}
    total = sum(t.num_bytes for t in tensors)
    found = [
        f"{len(tensors):,} tensors, {total / _GIB:.3f} GiB in {len(files)} files",
        f"{contents.num_parameters:,} parameters in {len(weights):,} tensors: {_by_dtype(weights)}",
    ]
    if contents.model is not None and contents.model.is_moe:
        found.append(f"{count(contents.model).active:,} parameters are active for a token")
    others = [t for t in tensors if not is_weight(t.name)]
    if others:
        size = sum(t.num_bytes for t in others) / _GIB
        found.append(f"{len(others):,} tensors are no parameters (scales, optimizer): {size:.3f} GiB")
    return found


def _by_dtype(tensors: Iterable[Tensor]) -> str:
    sizes: dict[str, int] = {}
    for tensor in tensors:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.num_bytes
    return ", ".join(f"{dtype} {size / _GIB:.3f} GiB" for dtype, size in sorted(sizes.items()))


def run(options: Options) -> int:
    """Print the table; returns 0."""
    contents = read(options.path)
    table = lines(contents, every=options.all, pattern=options.filter)
    if options.json:
        model = None if contents.model is None else asdict(contents.model)
        content = {
            "path": str(contents.path),
            "kind": contents.kind,
            "num_parameters": contents.num_parameters,
            "model": model,
            "tensors": [asdict(line) for line in table],
            "notes": contents.notes,
        }
        print(json.dumps(content, indent=1))
        return 0
    family = f", {contents.model.family}" if contents.model is not None else ""
    print(f"{contents.path}: {contents.kind}{family}\n")
    print(_text(table))
    print("\n" + "\n".join([*summary(contents), *contents.notes]))
    return 0


def _text(table: Sequence[Line]) -> str:
    rows = [("tensor", "number", "type", "shape", "parameters", "MiB")]
    rows += [
        (
            line.name,
            f"{line.count:,}",
            line.dtype,
            " x ".join(map(str, line.shape)) or "scalar",
            f"{line.num_parameters:,}" if line.num_parameters else "-",
            f"{line.num_bytes / 2**20:,.3f}",
        )
        for line in table
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    right = {1, 4, 5}
    return "\n".join(
        "  ".join(
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
