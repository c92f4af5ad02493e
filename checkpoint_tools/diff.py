"""Compare two checkpoints tensor by tensor: names, types, shapes and values.

In:  two folders of any kind (Hugging Face in any supported type, distributed Megatron, a run).
Out: a list of differences, in the order of the model. Exit status 0: equal; 1: different; 2: an unusable checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

import torch
import tyro
from torch import Tensor

from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.megatron_folder import is_megatron
from checkpoint_tools.views import TensorInfo, View, chunk_rows, dtype_name, model_order, open_view
from megatron_fp8rl.data import model_files
from megatron_fp8rl.names import registry

Kind = Literal["missing", "extra", "shape", "type", "values"]


@dataclass(frozen=True, kw_only=True)
class Options:
    a: Annotated[Path, tyro.conf.Positional]  # first checkpoint
    b: Annotated[Path, tyro.conf.Positional]  # second checkpoint
    dequantize: bool = False  # compare dequantized FP8
    by_key: bool = False  # compare two distributed checkpoints by key, including the optimizer
    hf_config: Path | None = None  # folder with config.json, for distributed checkpoints of other programs
    max_shown: int = 20  # number of differences to list
    memory_mib: int = 256  # memory for the compared rows
    json: bool = False  # print a JSON object instead of text


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A tensor that differs."""

    name: str
    kind: Kind  # "missing": only in a; "extra": only in b
    detail: str
    max_abs: float = 0.0  # largest |a - b|; infinite with NaN
    num_different: int = 0
    first: tuple[int, ...] = ()  # index of the first different element


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All differences of two checkpoints."""

    num_compared: int  # tensors in both checkpoints with equal shapes
    num_numbers: int
    differences: tuple[Difference, ...]

    def of_kind(self, kind: Kind) -> list[Difference]:
        return [difference for difference in self.differences if difference.kind == kind]

    @property
    def is_equal(self) -> bool:
        return not self.differences


def compare(a: View, b: View, *, memory_bytes: int = 256 << 20) -> Comparison:
    """Compare every tensor: by bits if the types are equal, else by values."""
    in_a, in_b = a.tensors, b.tensors
    differences: list[Difference] = []
    num_compared = num_numbers = 0
    for name in sorted(in_a.keys() | in_b.keys(), key=model_order):
        if name not in in_b:
            differences.append(Difference(name=name, kind="missing", detail=f"only in {a.path}"))
        elif name not in in_a:
            differences.append(Difference(name=name, kind="extra", detail=f"only in {b.path}"))
        elif in_a[name].shape != in_b[name].shape:
            shapes = f"{in_a[name].shape} and {in_b[name].shape}"
            differences.append(Difference(name=name, kind="shape", detail=shapes))
        else:
            num_compared += 1
            num_numbers += math.prod(in_a[name].shape)
            differences += _compare_tensor(name, a, b, in_a[name], in_b[name], memory_bytes)
    return Comparison(num_compared=num_compared, num_numbers=num_numbers, differences=tuple(differences))


def _compare_tensor(
    name: str, a: View, b: View, in_a: TensorInfo, in_b: TensorInfo, memory_bytes: int
) -> Iterator[Difference]:
    dtypes = f"{dtype_name(in_a.dtype)} and {dtype_name(in_b.dtype)}"
    if in_a.dtype != in_b.dtype and 1 in (in_a.dtype.itemsize, in_b.dtype.itemsize):
        yield Difference(name=name, kind="type", detail=f"{dtypes}; --dequantize compares the values of FP8")
        return
    if in_a.dtype != in_b.dtype and not (in_a.is_dequantized or in_b.is_dequantized):
        yield Difference(name=name, kind="type", detail=dtypes)
    max_abs, num_different, first = 0.0, 0, ()
    step = chunk_rows(in_a, memory_bytes)
    for start in range(0, in_a.num_rows, step):
        end = min(start + step, in_a.num_rows)
        x, y = a.rows(name, start, end), b.rows(name, start, end)
        differs = _different(x, y)
        count = int(differs.sum())
        if not count:
            continue
        if not num_different and differs.ndim:
            row, *index = torch.nonzero(differs)[0].tolist()
            first = (row + start, *index)
        num_different += count
        gap = (x.double() - y.double()).abs()
        max_abs = max(max_abs, float(gap.nan_to_num(nan=float("inf")).max()))
    if num_different:
        detail = f"{num_different:,} of {math.prod(in_a.shape):,} elements, by up to {max_abs:.6g}"
        yield Difference(
            name=name, kind="values", detail=detail, max_abs=max_abs, num_different=num_different, first=first
        )


def _different(x: Tensor, y: Tensor) -> Tensor:
    """Mask of elements with different bits, or different values if the types differ. -0 and 0 differ in bits."""
    if x.dtype != y.dtype:
        x, y = x.double(), y.double()
        return (x != y) & ~(x.isnan() & y.isnan())
    if not x.dtype.is_floating_point:
        return x != y
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    return x.contiguous().view(bits) != y.contiguous().view(bits)


def config_differences(a: Path, b: Path) -> list[str]:
    """Different keys of two config.json; empty if a folder has none."""
    if not all((path / "config.json").is_file() for path in (a, b)):
        return []
    in_a, in_b = model_files.read_config(a), model_files.read_config(b)
    return [
        f"{key}: {json.dumps(in_a.get(key))[:60]} and {json.dumps(in_b.get(key))[:60]}"
        for key in sorted(in_a.keys() | in_b.keys())
        if in_a.get(key) != in_b.get(key)
    ]


def run(options: Options) -> int:
    """Print the differences; returns 0 when equal, else 1."""
    if options.by_key and not (is_megatron(options.a) and is_megatron(options.b)):
        raise CheckpointError(options.a, "--by_key compares two distributed checkpoints")
    model = None
    if options.hf_config is not None:
        model = registry.from_hf_config(model_files.read_config(options.hf_config), keep_mtp=True, fp8_weights=True)
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
        lines.append(f"equal: {result.num_compared:,} tensors, {result.num_numbers:,} elements, bit for bit")
        return "\n".join(lines)
    for difference in result.differences[:max_shown]:
        where = f", first at {list(difference.first)}" if difference.first else ""
        lines.append(f"{difference.kind}: {difference.name}: {difference.detail}{where}")
    rest = len(result.differences) - max_shown
    if rest > 0:
        lines.append(f"and {rest:,} more")
    kinds = ", ".join(f"{len(group):,} {kind}" for kind in get_args(Kind) if (group := result.of_kind(kind)))
    lines.append(f"different: {kinds}; compared {result.num_compared:,} tensors")
    values = result.of_kind("values")
    if values:
        worst = max(values, key=lambda difference: difference.max_abs)
        lines.append(f"largest |a - b|: {worst.max_abs:.6g} in {worst.name}; first different tensor: {values[0].name}")
    return "\n".join(lines)
