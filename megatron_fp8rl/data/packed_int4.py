"""Kimi's published weights: experts of 4-bit whole numbers with a scale for each group, read as BF16.

In:  ``NAME.weight_packed`` int32 [N, K / 8], ``NAME.weight_scale`` [N, K / G] and ``NAME.weight_shape``, as the
     compressed-tensors library writes them (pack-quantized, symmetric).
Out: ``NAME.weight`` BF16 [N, K].

Shapes: N and K = rows and columns of a matrix, G = columns of a group.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fp8rl.data.safetensors_header import Entry

_PACKED, _SCALE, _SHAPE = "_packed", "_scale", "_shape"
_PER_WORD = 8
_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}


@dataclass(frozen=True, slots=True)
class PackedEntry(Entry):
    """A matrix that is read as BF16; ``dtype`` and ``shape`` are those of the result."""

    packed: Entry
    scale: Entry

    @property
    def num_bytes(self) -> int:
        return self.packed.num_bytes + self.scale.num_bytes


def is_packed_int4(config: Mapping[str, Any]) -> bool:
    """Whether the ``quantization_config`` of a config.json means these weights."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("format") != "pack-quantized":
        return False
    groups = [group.get("weights") or {} for group in (quantization.get("config_groups") or {}).values()]
    return bool(groups) and all(group.get(key) == value for group in groups for key, value in _WEIGHTS.items())


def unpacked_entries(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """The tensors of a folder, with one entry for the three of each packed matrix. A matrix without fitting scales
    keeps its stored names, which no model has."""
    result = dict(entries)
    for name, packed in entries.items():
        weight = name.removesuffix(_PACKED)
        scale = entries.get(weight + _SCALE)
        if weight == name or scale is None or packed.dtype != torch.int32 or len(packed.shape) != 2:
            continue
        shape = (packed.shape[0], packed.shape[1] * _PER_WORD)
        if len(scale.shape) != 2 or scale.shape[0] != shape[0] or shape[1] % scale.shape[1]:
            continue
        for suffix in (_PACKED, _SCALE, _SHAPE):
            result.pop(weight + suffix, None)
        result[weight] = PackedEntry(packed.file, torch.bfloat16, shape, packed.offset, packed, scale)
    return result


def unpack(packed: Tensor, scale: Tensor) -> Tensor:
    """BF16 rows of a matrix, from its packed rows and their scales."""
    values = (packed[..., None] >> torch.arange(0, 32, 4)) & 15  # the first column has the lowest bits
    groups = (values.flatten(-2) - 8).float().unflatten(-1, (scale.shape[1], -1))
    return (groups * scale.float()[..., None]).flatten(-2).bfloat16()
