"""Two checkpoints, tensor by tensor: which names, types and shapes differ, which numbers, where and by how much.

In:  two folders of any kind (Hugging Face in any supported type, distributed Megatron, a run).
Out: a list of differences, in the order of the model.

Rows are read a strip at a time, so ``memory_mib`` bounds memory whatever the size of the checkpoints. Exit status 0:
equal; 1: different; 2: a checkpoint is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
import tyro
from torch import Tensor

from checkpoint_tools import hf_folder
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.megatron_folder import is_megatron
from checkpoint_tools.views import TensorInfo, View, open_view, strip_rows
from megatron_fp8rl.names import registry

Kind = Literal["missing", "extra", "shape", "type", "values"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which checkpoints, and how to compare them."""

    a: Annotated[Path, tyro.conf.Positional]  # one checkpoint
    b: Annotated[Path, tyro.conf.Positional]  # the other
    dequantize: bool = False  # compare FP8 by what it stands for: bytes times scales
    by_key: bool = False  # two distributed checkpoints by their own keys, the optimizer included
    hf_config: Path | None = None  # folder with the config.json of a distributed checkpoint that another program wrote
    max_shown: int = 20  # differences that are listed; all of them count
    memory_mib: int = 256  # for the rows that are compared at a time
    json: bool = False  # one JSON object instead of text


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One tensor that is not the same in both."""

    name: str
    kind: Kind  # "missing": only in a; "extra": only in b
    detail: str
    max_abs: float = 0.0  # largest |a - b|; infinite where one is not a number
    num_different: int = 0
    first: tuple[int, ...] = ()  # index of the first number that differs


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All differences of two checkpoints."""

    num_compared: int  # tensors that both have, with equal shapes
    num_numbers: int
    differences: tuple[Difference, ...]

    def of(self, kind: Kind) -> list[Difference]:
        return [difference for difference in self.differences if difference.kind == kind]

    @property
    def is_equal(self) -> bool:
        return not self.differences


def compare(a: View, b: View, *, memory_bytes: int = 256 << 20) -> Comparison:
    """Compare every tensor. Numbers of one type are compared by their bits, of two types by their values."""
    ours, theirs = a.tensors, b.tensors
    found: list[Difference] = []
    num_compared = num_numbers = 0
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if name not in theirs:
            found.append(Difference(name=name, kind="missing", detail=f"only in {a.path}"))
        elif name not in ours:
            found.append(Difference(name=name, kind="extra", detail=f"only in {b.path}"))
        elif ours[name].shape != theirs[name].shape:
            found.append(Difference(name=name, kind="shape", detail=f"{ours[name].shape} and {theirs[name].shape}"))
        else:
            num_compared += 1
            num_numbers += math.prod(ours[name].shape)
            found += _compare_tensor(name, a, b, ours[name], theirs[name], memory_bytes)
    found.sort(key=lambda difference: _natural(difference.name))
    return Comparison(num_compared=num_compared, num_numbers=num_numbers, differences=tuple(found))


def _natural(name: str) -> list[Any]:
    """Layer 10 after layer 9; the embedding first and the head last, as in the model."""
    place = 0 if "embed" in name else 2 if re.match(r"(lm_head|output_layer|model\.norm|decoder\.final)", name) else 1
    return [place, *((1, int(p), "") if p.isdigit() else (0, 0, p) for p in name.split("."))]


def _compare_tensor(
    name: str, a: View, b: View, ours: TensorInfo, theirs: TensorInfo, memory_bytes: int
) -> Iterator[Difference]:
    dtypes = f"{_short(ours.dtype)} and {_short(theirs.dtype)}"
    if ours.dtype != theirs.dtype and 1 in (ours.dtype.itemsize, theirs.dtype.itemsize):
        yield Difference(name=name, kind="type", detail=f"{dtypes}; compare what FP8 stands for with --dequantize")
        return
    if ours.dtype != theirs.dtype and not (ours.is_dequantized or theirs.is_dequantized):
        yield Difference(name=name, kind="type", detail=dtypes)
    max_abs, num_different, first = 0.0, 0, ()
    step = strip_rows(ours, memory_bytes)
    for start in range(0, ours.num_rows, step):
        end = min(start + step, ours.num_rows)
        x, y = a.rows(name, start, end), b.rows(name, start, end)
        differs = _different(x, y)
        count = int(differs.sum())
        if count and not num_different:
            index = torch.nonzero(differs)[0].tolist() if differs.ndim else []
            first = (index[0] + start, *index[1:]) if index else ()
        if count:
            num_different += count
            max_abs = max(max_abs, _max_abs(x, y))
    if num_different:
        detail = f"{num_different:,} of {math.prod(ours.shape):,} numbers, by up to {max_abs:.6g}"
        yield Difference(
            name=name, kind="values", detail=detail, max_abs=max_abs, num_different=num_different, first=first
        )


def _different(x: Tensor, y: Tensor) -> Tensor:
    """Where two tensors differ: in their bits, or in their values when their types differ. -0 and 0 differ in bits."""
    if x.dtype != y.dtype:
        x, y = x.double(), y.double()
        return (x != y) & ~(x.isnan() & y.isnan())
    if not x.dtype.is_floating_point:
        return x != y
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    return x.contiguous().view(bits) != y.contiguous().view(bits)


def _max_abs(x: Tensor, y: Tensor) -> float:
    gap = (x.double() - y.double()).abs()
    return float(gap.nan_to_num(nan=float("inf")).max())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def config_differences(a: Path, b: Path) -> list[str]:
    """Keys in which two config.json differ; empty when a folder has none."""
    if not all((path / "config.json").is_file() for path in (a, b)):
        return []
    ours, theirs = hf_folder.read_config(a), hf_folder.read_config(b)
    return [
        f"{key}: {json.dumps(ours.get(key))[:60]} and {json.dumps(theirs.get(key))[:60]}"
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key) != theirs.get(key)
    ]


def run(options: Options) -> int:
    """Print the differences; returns 0 when there are none and 1 otherwise."""
    if options.by_key and not (is_megatron(options.a) and is_megatron(options.b)):
        raise CheckpointError(options.a, "--by_key compares two distributed checkpoints")
    model = None
    if options.hf_config is not None:
        model = registry.from_hf_config(hf_folder.read_config(options.hf_config), keep_mtp=True, fp8_weights=True)
    a, b = (
        open_view(path, dequantize=options.dequantize, by_key=options.by_key, model=model)
        for path in (options.a, options.b)
    )
    result = compare(a, b, memory_bytes=options.memory_mib << 20)
    configs = config_differences(a.path, b.path)
    if options.json:
        content = {
            "a": str(a.path),
            "b": str(b.path),
            "equal": result.is_equal,
            "num_compared": result.num_compared,
            "num_numbers": result.num_numbers,
            "config": configs,
            "differences": [asdict(difference) for difference in result.differences],
        }
        print(json.dumps(content, indent=1))
    else:
        print(_text(a, b, result, configs, options.max_shown))
    return 0 if result.is_equal else 1


def _text(a: View, b: View, result: Comparison, configs: list[str], max_shown: int) -> str:
    lines = [f"a: {a.path}", f"b: {b.path}"]
    lines += [f"config.json: {line}" for line in configs]
    if result.is_equal:
        return "\n".join(
            [*lines, f"equal: {result.num_compared:,} tensors, {result.num_numbers:,} numbers, bit for bit"]
        )
    for difference in result.differences[:max_shown]:
        where = f", first at {list(difference.first)}" if difference.first else ""
        lines.append(f"{difference.kind}: {difference.name}: {difference.detail}{where}")
    rest = len(result.differences) - max_shown
    if rest > 0:
        lines.append(f"and {rest:,} more")
    kinds = ", ".join(f"{len(found):,} {kind}" for kind in get_args(Kind) if (found := result.of(kind)))
    lines.append(f"different: {kinds}; {result.num_compared:,} tensors were compared")
    values = result.of("values")
    if values:
        worst = max(values, key=lambda difference: difference.max_abs)
        lines.append(f"largest |a - b|: {worst.max_abs:.6g} in {worst.name}; first that differs: {values[0].name}")
    return "\n".join(lines)
