"""List the tensors of a checkpoint with shapes, types and sizes, and count parameters.

In:  a Hugging Face folder (BF16, FP16, FP32 or block FP8), a distributed Megatron checkpoint, or the folder of a run
     (its newest checkpoint).
Out: a table. Only headers and metadata are read. Errors name missing or damaged files and unexpected tensors.
"""

from __future__ import annotations

import fnmatch
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from checkpoint_tools import hf_folder
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.megatron_folder import MegatronFolder, is_megatron, read_model
from checkpoint_tools.views import KeyView, dtype_name, model_order, open_view
from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.data import model_files
from megatron_fp8rl.data.gguf_folder import model_folder
from megatron_fp8rl.names import registry
from megatron_fp8rl.observe.display import text_table
from megatron_fp8rl.precision.parameters import count

_GIB = 1 << 30
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_OPTIMIZER = "optimizer."


@dataclass(frozen=True, kw_only=True)
class Options:
    path: Annotated[Path, tyro.conf.Positional]  # folder of a checkpoint or a run
    all: bool = False  # one line per tensor, instead of one line for all layers and experts
    filter: str | None = None  # names to list, with * and ?; None lists all but optimizer states
    json: bool = False  # print a JSON object instead of a table


@dataclass(frozen=True, kw_only=True)
class Tensor:
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
    """A checkpoint without its weights."""

    path: Path
    kind: str
    tensors: tuple[Tensor, ...]
    model: ModelConfig | None  # None if unknown or unsupported
    notes: tuple[str, ...]  # unchecked or skipped tensors, and why

    @property
    def num_parameters(self) -> int:
        """Elements of all weights, without FP8 scales and optimizer states."""
        return sum(t.numel for t in self.tensors if is_weight(t.name))


def is_weight(name: str) -> bool:
    """Whether a stored tensor is a model parameter."""
    return not name.endswith(model_files.SCALE) and not name.startswith(_OPTIMIZER) and "fp8.history" not in name


def read(path: str | Path) -> Contents:
    """Read headers and metadata. Raises CheckpointError that lists everything missing, damaged or misnamed."""
    path = model_folder(Path(path))
    if not path.is_dir():
        raise CheckpointError(path, "there is no such folder")
    return _read_megatron(path) if is_megatron(path) else _read_hf(path)


def _read_hf(path: Path) -> Contents:
    entries, problems, _ = model_files.read_entries(path)
    if problems:
        raise CheckpointError(path, problems)
    model, notes = None, []
    config = model_files.read_config(path)
    try:
        configured = registry.from_hf_config(config, keep_mtp=True, fp8_weights=True)
    except ValueError as error:
        notes.append(f"names and shapes are not checked: {error}")
    else:
        folder = hf_folder.HfFolder.open(path, keep_mtp=None)
        model = folder.model
        notes += [
            f"a conversion skips {count} tensors: {reason}"
            for reason, count in sorted(Counter(folder.skipped.values()).items())
        ]
        if configured.num_mtp_layers > model.num_mtp_layers:
            notes.append("config.json lists multi-token prediction layers, but no file has their tensors")
    tensors = tuple(
        Tensor(
            name=name,
            dtype=dtype_name(entry.dtype),
            shape=entry.shape,
            num_bytes=entry.num_bytes,
            files=(entry.file.name,),
        )
        for name, entry in sorted(entries.items(), key=lambda item: model_order(item[0]))
    )
    return Contents(path=path, kind="Hugging Face", tensors=tensors, model=model, notes=tuple(notes))


def _read_megatron(path: Path) -> Contents:
    view = open_view(path, by_key=True)
    assert isinstance(view, KeyView)
    notes, model = [], None
    try:
        model = read_model(view.path)
    except CheckpointError:
        notes.append("state.json does not record the model, so names and shapes are not checked")
    if model is not None:
        MegatronFolder.open(view.path, model)  # checks every parameter's key, shape and files
    tensors = tuple(
        Tensor(
            name=key,
            dtype=dtype_name(tensor.dtype),
            shape=tensor.shape,
            num_bytes=math.prod(tensor.shape) * tensor.dtype.itemsize,
            files=tuple(sorted({piece.file for piece in tensor.pieces})),
        )
        for key, tensor in sorted(view.stored.items(), key=lambda item: model_order(item[0]))
    )
    return Contents(path=view.path, kind="Megatron torch_dist", tensors=tensors, model=model, notes=tuple(notes))


@dataclass(frozen=True, kw_only=True)
class Line:
    """Tensors whose names differ only in numbers."""

    name: str  # with ranges of numbers
    count: int
    dtype: str
    shape: tuple[int, ...]
    num_parameters: int  # 0 for scales and optimizer states
    num_bytes: int


def lines(contents: Contents, *, every: bool = False, pattern: str | None = None) -> list[Line]:
    """One line per kind of tensor, or per tensor with ``every``, for names that match ``pattern``.

    Without a pattern optimizer states are omitted.
    """
    groups: dict[tuple, list[Tensor]] = defaultdict(list)
    for tensor in contents.tensors:
        name = tensor.name
        if not name.startswith(_OPTIMIZER) if pattern is None else fnmatch.fnmatchcase(name, pattern):
            groups[name if every else _NUMBER.sub("#", name), tensor.dtype, tensor.shape].append(tensor)
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
    """For example ``model.layers.{0-3}.mlp.gate.weight``; only existing numbers are in the ranges."""
    numbers = [[int(number) for number in _NUMBER.findall(name)] for name in members]
    for position in range(kind.count("#")):
        kind = kind.replace("#", _ranges(sorted({row[position] for row in numbers})), 1)
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
    """Totals, one per line."""
    tensors = contents.tensors
    weights = [t for t in tensors if is_weight(t.name)]
    files = {file for tensor in tensors for file in tensor.files}
    total = sum(t.num_bytes for t in tensors)
    result = [
        f"{len(tensors):,} tensors, {total / _GIB:.3f} GiB in {len(files)} files",
        f"{contents.num_parameters:,} parameters in {len(weights):,} tensors: {_by_dtype(weights)}",
    ]
    if contents.model is not None and contents.model.is_moe:
        result.append(f"{count(contents.model).active:,} parameters are active per token")
    others = [t for t in tensors if not is_weight(t.name)]
    if others:
        size = sum(t.num_bytes for t in others) / _GIB
        result.append(f"{len(others):,} tensors are no parameters (scales, optimizer): {size:.3f} GiB")
    return result


def _by_dtype(tensors: Iterable[Tensor]) -> str:
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[tensor.dtype] += tensor.num_bytes
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
    return "\n".join(text_table(rows, right={1, 4, 5}))
