"""Exact parameter counts of a model, summed over the name tables of ``names/``. Pure; no torch.

Experts are counted once and multiplied, so a model of 60,000 tensors takes a few milliseconds.
"""

import functools
import math
from dataclasses import dataclass

from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.names import blocks
from megatron_fp8rl.names.registry import FAMILIES
from megatron_fp8rl.names.table import Weight, fill, mtp_rows, rows_of


@dataclass(frozen=True, slots=True)
class Entry:
    """One Megatron weight of one layer; an expert's entry represents all experts of the layer."""

    weight: Weight
    layer: int  # -1 outside layers; from num_layers on for multi-token prediction
    num_experts: int = 1

    @property
    def numel(self) -> int:
        return math.prod(self.weight.shape) * self.num_experts

    @property
    def is_buffer(self) -> bool:
        """Held and saved, but without gradient: a router's FP32 correction bias."""
        return self.weight.dtype == "float32"


@functools.lru_cache(maxsize=4)
def entries(model: ModelConfig) -> tuple[Entry, ...]:
    family = FAMILIES[model.family]
    rows = family.rows(model)
    result = [Entry(fill(row, model, layer=-1, expert=-1), -1) for row in rows if "{layer}" not in row.mcore]
    for layer, kind in enumerate(model.layers):
        of_layer = rows_of(rows, kind)
        if layer >= model.num_layers:
            of_layer = mtp_rows(of_layer, family.mtp, layer - model.num_layers)
        for row in of_layer:
            num_experts = model.num_experts if "{expert}" in row.mcore else 1
            result.append(Entry(fill(row, model, layer=layer, expert=0), layer, num_experts))
    return tuple(result)


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    total: int
    active: int  # used by one token: everything but the experts it is not routed to, including embedding and head
    embedding: int  # embedding and output head
    expert: int  # routed experts


def count(model: ModelConfig) -> ParameterCount:
    """Exact counts; multi-token prediction layers count in the total if the model keeps them, never as active."""
    total = active = embedding = expert = 0
    for entry in entries(model):
        total += entry.numel
        if entry.weight.is_expert:
            expert += entry.numel
        if entry.weight.name in (blocks.EMBEDDING, blocks.OUTPUT_LAYER):
            embedding += entry.numel
        if entry.layer < model.num_layers:
            active += (
                entry.numel * model.experts_per_token // model.num_experts if entry.weight.is_expert else entry.numel
            )
    return ParameterCount(total=total, active=active, embedding=embedding, expert=expert)
