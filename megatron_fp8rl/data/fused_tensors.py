"""Tensors of checkpoint files that contain several tensors of the name table, by family.

In: the name of a family. Out: how its files combine tensors, as functions over names, shapes, entries and tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fp8rl.data import fused_experts, fused_rows
from megatron_fp8rl.data.safetensors_header import Entry, Shapes
from megatron_fp8rl.names import registry


@dataclass(frozen=True)
class Fusion:
    """How files combine tensors. All functions return tensors that are not combined as they are."""

    name: Callable[[str], str]  # the stored tensor that contains a tensor
    fuse: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]  # stored tensors from all of their parts
    split: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]  # the parts of BF16 or wider stored tensors
    shapes: Callable[[Shapes], dict[str, tuple[torch.dtype, tuple[int, ...]]]]  # of stored tensors, from their parts
    split_entries: Callable[[Mapping[str, Entry]], dict[str, Entry]]  # of the parts, from those of stored tensors


SEPARATE = Fusion(name=str, fuse=dict, split=dict, shapes=dict, split_entries=dict)
_EXPERTS = Fusion(
    name=fused_experts.fused_name,
    fuse=fused_experts.fuse,
    split=fused_experts.split_all,
    shapes=fused_experts.fused_shapes,
    split_entries=fused_experts.split_entries,
)
_ROWS = Fusion(
    name=fused_rows.fused_name,
    fuse=fused_rows.fuse,
    split=fused_rows.split,
    shapes=fused_rows.fused_shapes,
    split_entries=fused_rows.split_entries,
)


def fusion_of(model_type: object) -> Fusion:
    """How files of a family combine tensors; :data:`SEPARATE` also for an unknown family."""
    family = registry.FAMILIES.get(str(model_type))
    if family is None:
        return SEPARATE
    return _EXPERTS if family.fused_experts else _ROWS if family.fused_rows else SEPARATE
