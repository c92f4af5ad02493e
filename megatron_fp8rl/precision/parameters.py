"""Parameter counts of a model, of one trainer rank and of one engine worker.

In: a RunConfig. Out: exact counts and bytes, summed over the name tables of ``names/`` that the trainer, the exporter
and the checkpoint tools use. Experts are counted once and multiplied, so a model of 60,000 tensors takes a few
milliseconds. Pure; no torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_fp8rl.config import FP8_BLOCK, ModelConfig, ParallelConfig, RunConfig
from megatron_fp8rl.names import blocks, slicing
from megatron_fp8rl.names.layouts import VOCAB_PADDING, TrainerLayout
from megatron_fp8rl.names.registry import FAMILIES
from megatron_fp8rl.names.table import Row, Weight, fill
from megatron_fp8rl.precision.layer_table import LayerTable

_BF16_BYTES, _FP32_BYTES = 2, 4


@dataclass(frozen=True, slots=True)
class Entry:
    """One Megatron weight of one layer; an expert's entry stands for all experts of the layer."""

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
    """Every weight of ``model``; the experts of a layer share one entry."""
    family = FAMILIES[model.family]
    rows = family.rows(model)
    found = [Entry(fill(row, model, layer=-1, expert=-1), -1) for row in rows if "{layer}" not in row.mcore]
    for layer in range(model.num_layers + model.num_mtp_layers):
        is_mtp = layer >= model.num_layers
        kind = "moe" if (model.is_moe if is_mtp else model.is_moe_layer(layer)) else "dense"
        found += _of_layer([row for row in rows if row.layers in ("all", kind)], model, layer)
        if is_mtp:
            found += [Entry(fill(row, model, layer=layer, expert=-1), layer) for row in family.mtp]
    return tuple(found)


def _of_layer(rows: Iterable[Row], model: ModelConfig, layer: int) -> Iterator[Entry]:
    for row in rows:
        if "{layer}" in row.mcore:
            num_experts = model.num_experts if "{expert}" in row.mcore else 1
            yield Entry(fill(row, model, layer=layer, expert=0), layer, num_experts)


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameter counts as in model cards."""

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


@dataclass(frozen=True, kw_only=True)
class RankWeights:
    """Elements on one trainer rank, including padding of the vocabulary."""

    dense: int  # outside routed experts, with gradients
    expert: int
    fp8: int  # of both, those that the trainer multiplies in FP8
    fp8_expert: int  # of these, experts
    fp8_whole: int  # and others, in matrices of whole blocks
    buffers: int  # FP32, without gradients

    @property
    def trained(self) -> int:
        return self.dense + self.expert

    def divided(self, parallel: ParallelConfig) -> float:
        """Of these, the elements whose optimizer states the rank keeps: its share of what all its copies train."""
        return self.dense / (parallel.data * parallel.context) + self.expert / expert_copies(parallel)


def expert_copies(parallel: ParallelConfig) -> int:
    """Trainer ranks that hold the same routed experts."""
    return max(1, parallel.world_size // (parallel.pipeline * parallel.expert * parallel.expert_tensor))


def on_trainer_rank(cfg: RunConfig, stage: int) -> RankWeights:
    """Weights of a rank of pipeline stage ``stage``. All ranks of a stage hold equal amounts."""
    model, parallel = cfg.model, cfg.parallel
    layout = TrainerLayout.from_config(parallel)
    table = LayerTable.build(model, cfg.precision)
    degrees = (parallel.tensor, parallel.expert, parallel.expert_tensor)
    held = [
        numbers
        for entry, numbers in _rank_elements(model, table, *degrees)
        if _is_on_stage(entry, model, layout, stage)
    ]
    dense, expert, fp8, buffers, *of_fp8 = map(sum, zip(*held, strict=True))
    return RankWeights(dense=dense, expert=expert, fp8=fp8, fp8_expert=of_fp8[0], fp8_whole=of_fp8[1], buffers=buffers)


@functools.lru_cache(maxsize=256)
def _rank_elements(
    model: ModelConfig, table: LayerTable, tensor: int, expert: int, expert_tensor: int
) -> list[tuple[Entry, tuple[int, ...]]]:
    """(entry, elements on a rank: dense, expert, fp8, buffers, FP8 experts, other FP8 matrices of whole blocks); a layer's
    weights together, under the first of them."""
    found: dict[int | Entry, tuple[Entry, list[int]]] = {}
    for entry in entries(model):
        weight = entry.weight
        ranks = expert_tensor if weight.is_expert else tensor
        shape = slicing.shard_shape(weight, model, ranks)
        numel = math.prod(shape) * entry.num_experts
        numel //= expert if weight.is_expert else 1
        _, sums = found.setdefault(entry.layer if entry.layer >= 0 else entry, (entry, [0] * 6))
        sums[1 if weight.is_expert else 3 if entry.is_buffer else 0] += numel
        if table.trainer_fp8(weight.parts[0][0]):
            sums[2] += numel
            sums[4] += numel if weight.is_expert else 0
            sums[5] += numel if not weight.is_expert and all(size % FP8_BLOCK == 0 for size in shape) else 0
    return [(entry, (*sums,)) for entry, sums in found.values()]


def _is_on_stage(entry: Entry, model: ModelConfig, layout: TrainerLayout, stage: int) -> bool:
    last = layout.pipeline - 1
    if 0 <= entry.layer < model.num_layers:
        return layout.stage(entry.layer, model.num_layers) == stage
    if entry.weight.name == blocks.EMBEDDING:
        # A tied head is the embedding's copy on the last stage, where multi-token prediction needs one as well.
        return stage == 0 or (stage == last and (model.tie_embeddings or model.num_mtp_layers > 0))
    return stage == last


@dataclass(frozen=True, kw_only=True)
class WorkerWeights:
    """Bytes of weights on one engine worker."""

    fp8: int
    scales: int  # FP32, one per 128x128 block
    bf16: int
    absorbed: int  # BF16 copies that vLLM makes of kv_b_proj for latent attention

    @property
    def total(self) -> int:
        return self.fp8 + self.scales + self.bf16 + self.absorbed


def engine_shape(name: str, shape: tuple[int, ...], weight: Weight, model: ModelConfig, ranks: int) -> tuple[int, ...]:
    """Shape of a Hugging Face tensor on one of ``ranks`` tensor-parallel engine workers, as vLLM shards it.

    Experts are sharded like dense matrices. Key and value heads are replicated if there are more ranks than heads, and
    the vocabulary is padded to a multiple of 64.
    """
    found = list(shape)
    if weight.padded:
        found[0] = -(-found[0] // VOCAB_PADDING) * VOCAB_PADDING // ranks
    elif name.endswith((".k_proj.weight", ".v_proj.weight")) and model.num_key_value_heads < ranks:
        found[0] = model.head_dim
    elif weight.cut != "none":
        found[weight.axis] = -(-found[weight.axis] // ranks)
    return tuple(found)


def on_engine_worker(cfg: RunConfig) -> WorkerWeights:
    """Weight bytes of one worker of a replica; all workers hold equal amounts."""
    rollout = cfg.rollout
    return _worker_weights(cfg.model, LayerTable.build(cfg.model, cfg.precision), rollout.tensor, rollout.ranks)


@functools.lru_cache(maxsize=256)
def _worker_weights(model: ModelConfig, table: LayerTable, ranks: int, of_experts: int) -> WorkerWeights:
    fp8 = scales = bf16 = absorbed = 0
    for entry in entries(model):
        for name, whole in entry.weight.parts:
            shape = engine_shape(name, whole, entry.weight, model, of_experts if entry.weight.is_expert else ranks)
            numel = math.prod(shape) * entry.num_experts
            if table.rollout_fp8(name):
                fp8 += numel
                scales += _FP32_BYTES * math.prod(-(-n // FP8_BLOCK) for n in shape) * entry.num_experts
            else:
                bf16 += numel * (_FP32_BYTES if entry.is_buffer else _BF16_BYTES)
            if name.endswith(".kv_b_proj.weight"):
                absorbed += numel * _BF16_BYTES
    return WorkerWeights(fp8=fp8, scales=scales, bf16=bf16, absorbed=absorbed)
