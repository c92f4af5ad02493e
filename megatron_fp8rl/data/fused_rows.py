"""Checkpoints that store matrices of a layer under each other in one tensor: Phi's.

``self_attn.qkv_proj`` has the rows of queries, keys and values, ``mlp.gate_up_proj`` those of gate and up. Everything
else here knows single matrices (``names/phi3.py``). A part is a range of rows, so it is an entry of its own in a file.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from megatron_fp8rl.data.safetensors_header import Entry, Shapes
from megatron_fp8rl.names.blocks import ENGINE_FUSIONS

_MODULE = re.compile(r"(.*\.(?:self_attn|mlp))\.(\w+)\.(\w+)")
_WHOLE = {part: whole for whole in ("qkv_proj", "gate_up_proj") for part in ENGINE_FUSIONS[whole]}


def fused_name(name: str) -> str:
    """The tensor of a checkpoint that contains the tensor ``name``; ``name`` itself for any other."""
    match = _MODULE.fullmatch(name)
    return f"{match[1]}.{_WHOLE[match[2]]}.{match[3]}" if match and match[2] in _WHOLE else name


def _parts(name: str, rows: int, columns_of: Callable[[str], int | None]) -> dict[str, tuple[int, int]]:
    """The tensors in a stored one and the range of rows of each; empty for any other tensor. ``columns_of`` returns the
    columns of a stored tensor: those of the output projection are the rows of the queries."""
    match = _MODULE.fullmatch(name)
    if match is None or match[2] not in _WHOLE.values():
        return {}
    parts = ENGINE_FUSIONS[match[2]]
    first = columns_of(f"{match[1]}.o_proj.{match[3]}") if len(parts) == 3 else None
    first = rows // len(parts) if first is None else first
    if not 0 < first < rows:
        return {}
    each = (rows - first) // (len(parts) - 1)
    ends = [0, first, *(first + each * index for index in range(1, len(parts) - 1)), rows]
    return {f"{match[1]}.{part}.{match[3]}": (ends[i], ends[i + 1]) for i, part in enumerate(parts)}


def split(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The single matrices of a checkpoint's tensors, as views."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        columns = {other: stored.shape[1] for other, stored in tensors.items() if stored.ndim == 2}
        parts = _parts(name, tensor.shape[0] if tensor.ndim else 0, columns.get)
        result |= {part: tensor[slice(*bounds)] for part, bounds in parts.items()} or {name: tensor}
    return result


def fuse(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint from single matrices, which may have any order; all parts of one must be there."""
    fused: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        whole = fused_name(name)
        if whole == name:
            fused[name] = tensor
        elif whole not in fused:
            parent, _, kind = name.rsplit(".", 2)
            parts = ENGINE_FUSIONS[whole.rsplit(".", 2)[1]]
            fused[whole] = torch.cat([tensors[f"{parent}.{part}.{kind}"] for part in parts])
    return fused


def fused_shapes(shapes: Shapes) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Types and shapes of the tensors of a checkpoint, from those of single matrices."""
    result: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, (dtype, shape) in shapes.items():
        whole = fused_name(name)
        rows = result[whole][1][0] if whole in result else 0
        result[whole] = dtype, shape if whole == name else (rows + shape[0], *shape[1:])
    return result


def split_entries(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Entries of single matrices in place of those that contain several."""

    def columns_of(name: str) -> int | None:
        return entries[name].shape[1] if name in entries and len(entries[name].shape) == 2 else None

    result: dict[str, Entry] = {}
    for name, entry in entries.items():
        parts = _parts(name, entry.shape[0] if entry.shape else 0, columns_of)
        for part, (first, end) in parts.items():
            shape, offset = (end - first, *entry.shape[1:]), entry.offset + first * entry.row_bytes
            result[part] = replace(entry, shape=shape, offset=offset)
        if not parts:
            result[name] = entry
    return result
