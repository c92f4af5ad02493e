"""Which trainer rank sends which part of which tensor, in which precision, in which bucket. Pure and deterministic.

In:  the model, the table of FP8 layers, the trainer's layout, the engine's layout.
Out: a :class:`Plan`. Every rank computes the same one and acts on its own part of it; nothing is negotiated.

Every Hugging Face tensor is divided along one axis at most, at both ends along the same one:

    trainer ranks hold   [start, stop) of the axis; of replicas, the lowest rank sends
    the wire carries     the whole tensor: E4M3 bytes and one FP32 scale per 128x128 block, or BF16
    engine ranks keep    [start, stop) of the axis

Quantizing a part equals cutting the quantized whole exactly when the edges of the part are edges of blocks. Such
tensors are quantized by the ranks that hold them and travel at half the size; the others are put together in BF16
first. Either way the bytes are those of the whole tensor, for every layout.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal

from megatron_fp8rl.config import FP8_BLOCK, ModelConfig, ParallelConfig, RolloutConfig
from megatron_fp8rl.names import registry, slicing
from megatron_fp8rl.names.table import DType, Weight, split_indices
from megatron_fp8rl.precision.layer_table import LayerTable

ALIGNMENT_BYTES = 64  # of every tensor in a bucket: a cache line, and enough for any vector load
VOCAB_PADDING = 64  # vLLM pads the vocabulary to a multiple of this before it divides it over ranks


class PlanError(ValueError):
    """Tensors that cannot be divided as asked. ``problems`` lists all of them; the message shows one on each line."""

    def __init__(self, problems: list[str]):
        self.problems = problems
        super().__init__(f"{len(problems)} tensors cannot be published:\n" + "\n".join(f"  {p}" for p in problems))


def aligned(num_bytes: int) -> int:
    """Where the next tensor of a bucket or message begins, behind ``num_bytes``."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def layers_per_chunk(num_layers: int, num_chunks: int) -> list[int]:
    """How many layers each chunk of a pipeline holds, in order. The first chunks take what does not divide evenly: the
    last one has the output head as well."""
    least, rest = divmod(num_layers, num_chunks)
    return [least + (chunk < rest) for chunk in range(num_chunks)]


@dataclass(frozen=True, kw_only=True)
class TrainerLayout:
    """Degrees of parallelism of the trainer and Megatron's order of ranks (tensor fastest, pipeline slowest)."""

    world_size: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual_stages: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1

    @classmethod
    def from_config(cls, parallel: ParallelConfig) -> TrainerLayout:
        return cls(
            world_size=parallel.world_size,
            tensor=parallel.tensor,
            pipeline=parallel.pipeline,
            virtual_stages=parallel.virtual_stages,
            context=parallel.context,
            expert=parallel.expert,
            expert_tensor=parallel.expert_tensor,
        )

    @property
    def ranks_per_stage(self) -> int:
        return self.world_size // self.pipeline

    def stage(self, layer: int, num_layers: int) -> int:
        """Pipeline rank of a layer. With virtual stages, consecutive chunks of layers go around the ranks."""
        ends = itertools.accumulate(layers_per_chunk(num_layers, self.pipeline * self.virtual_stages))
        chunk = next(chunk for chunk, end in enumerate(ends) if layer < end)
        return chunk % self.pipeline

    def holders(self, weight: Weight, model: ModelConfig) -> list[list[int]]:
        """For each part of a parameter, in order, all ranks that hold it: its replicas, in ascending order."""
        pattern, layer, expert = split_indices(weight.name)
        if layer >= 0:
            stage = self.stage(layer, model.num_layers)
        else:
            stage = 0 if pattern.startswith("embedding.") else self.pipeline - 1
        ranks = range(stage * self.ranks_per_stage, (stage + 1) * self.ranks_per_stage)
        if expert < 0:
            if weight.cut == "none":
                return [list(ranks)]
            return [list(ranks[t :: self.tensor]) for t in range(self.tensor)]
        owner = expert // (model.num_experts // self.expert)
        step = self.expert * self.expert_tensor
        return [list(ranks[owner * self.expert_tensor + t :: step]) for t in range(self.expert_tensor)]

    def shards(self, weight: Weight, model: ModelConfig) -> list[int]:
        """The ranks that hold the parts of a parameter, in order; the lowest rank among replicas."""
        return [ranks[0] for ranks in self.holders(weight, model)]


@dataclass(frozen=True, kw_only=True)
class EngineLayout:
    """Degrees of parallelism of one engine replica. ``expert`` is 1, or ``tensor`` when experts are spread whole."""

    tensor: int = 1
    expert: int = 1

    @classmethod
    def from_config(cls, rollout: RolloutConfig) -> EngineLayout:
        return cls(tensor=rollout.tensor, expert=rollout.expert)


Range = tuple[int, int]  # [start, stop)


@dataclass(frozen=True, slots=True)
class Source:
    """The part of a Hugging Face tensor that one trainer rank sends."""

    rank: int
    start: int  # along the axis of the transfer
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One Hugging Face tensor on its way from trainer ranks to engine ranks."""

    name: str  # Hugging Face name
    mcore_name: str  # global name of the parameter that it is a part of
    shape: tuple[int, ...]
    axis: int  # along which the sources and the engine's slices are cut
    sources: tuple[Source, ...]  # cover the axis once, in order
    quantize: Literal["never", "at_source", "gathered"]  # "never" travels and stays in ``dtype``
    dtype: DType  # of a tensor that is not quantized
    slices: tuple[Range | None, ...]  # by engine rank: what it keeps; None: nothing

    @property
    def is_fp8(self) -> bool:
        return self.quantize != "never"

    @property
    def scale_name(self) -> str:
        return f"{self.name}_scale_inv"


@dataclass(frozen=True, slots=True)
class WireTensor:
    """One tensor in a bucket."""

    name: str
    dtype: Literal["bfloat16", "float8_e4m3fn", "float32"]
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the bucket

    @property
    def num_bytes(self) -> int:
        return {"bfloat16": 2, "float8_e4m3fn": 1, "float32": 4}[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel together. ``tensors`` says where each lies; an FP8 weight is followed by its scales."""

    transfers: tuple[Transfer, ...]
    tensors: tuple[WireTensor, ...]
    num_bytes: int


@dataclass(frozen=True)
class Plan:
    """All transfers of one publication, in the order of the checkpoint."""

    trainer: TrainerLayout
    engine: EngineLayout
    buckets: tuple[Bucket, ...]

    @property
    def transfers(self) -> list[Transfer]:
        return [t for bucket in self.buckets for t in bucket.transfers]

    @property
    def num_bytes(self) -> int:
        """Bytes that one replica receives."""
        return sum(t.num_bytes for bucket in self.buckets for t in bucket.tensors)


def block_edges_only(transfer_shape: tuple[int, ...], axis: int, parts: list[Range]) -> bool:
    """Whether every inner edge of ``parts`` is an edge between blocks, so that parts can be quantized alone."""
    end = transfer_shape[axis]
    return all(edge % FP8_BLOCK == 0 or edge == end for part in parts for edge in part)


def scale_range(part: Range) -> Range:
    """Blocks that a part of the axis covers."""
    return part[0] // FP8_BLOCK, -(-part[1] // FP8_BLOCK)


def _even(size: int, parts: int) -> list[Range]:
    step = size // parts
    return [(i * step, (i + 1) * step) for i in range(parts)]


def _engine_slices(name: str, weight: Weight, shape: tuple[int, ...], model: ModelConfig, engine: EngineLayout):
    """What each engine rank keeps of a tensor: vLLM's own division of it."""
    size = shape[weight.axis]
    if weight.is_expert and engine.expert > 1:
        owner = split_indices(weight.name)[2] // (model.num_experts // engine.expert)
        return tuple((0, size) if rank == owner else None for rank in range(engine.tensor))
    if weight.cut == "none":
        return ((0, size),) * engine.tensor
    if shape[0] == model.vocab_size and "{layer}" not in split_indices(weight.name)[0]:
        padded = -(-size // VOCAB_PADDING) * VOCAB_PADDING
        return tuple((min(a, size), min(b, size)) for a, b in _even(padded, engine.tensor))
    is_key_or_value = weight.join == "qkv" and name != weight.parts[0][0]
    if is_key_or_value and model.num_key_value_heads < engine.tensor:
        heads = [rank * model.num_key_value_heads // engine.tensor for rank in range(engine.tensor)]
        return tuple((head * model.head_dim, (head + 1) * model.head_dim) for head in heads)
    return tuple(_even(size, engine.tensor))


def _transfer(
    name: str, weight: Weight, shape: tuple[int, ...], model: ModelConfig, is_fp8: bool, layouts
) -> tuple[Transfer, list[str]]:
    """The transfer of one tensor, and what is wrong with it."""
    trainer, engine = layouts
    axis = weight.axis
    ranks = trainer.shards(weight, model)
    problems = []
    wrong = slicing.problem(weight, model, len(ranks))
    if wrong:
        problems.append(f"{name}: axis {axis} of {shape}: {wrong} of the trainer")
        ranks = ranks[:1]
    part = next((i for i, (part_name, _) in enumerate(weight.parts) if part_name == name), 0)  # a copy is of part 0
    held = [slicing.part_range(weight, model, part, len(ranks), rank) for rank in range(len(ranks))]
    # Of fewer query groups than ranks, a rank may hold no row of a part.
    sources = tuple(Source(rank, *span) for rank, span in zip(ranks, held) if span[0] < span[1])
    slices = _engine_slices(name, weight, shape, model, engine)
    if is_fp8:
        problems += _untiled(name, weight, shape, [span for span in slices if span is not None])
    quantize: Literal["never", "at_source", "gathered"] = "never"
    if is_fp8:
        quantize = "at_source" if block_edges_only(shape, axis, [(s.start, s.stop) for s in sources]) else "gathered"
    transfer = Transfer(
        name=name,
        mcore_name=weight.name,
        shape=shape,
        axis=axis,
        sources=sources,
        quantize=quantize,
        dtype=weight.dtype,
        slices=slices,
    )
    return transfer, problems


def _untiled(name: str, weight: Weight, shape: tuple[int, ...], kept: list[Range]) -> list[str]:
    """What is wrong with an engine's parts of an FP8 tensor, as a list of no or one problem."""
    # vLLM stacks the scales of fused matrices, so each of them has to fill whole blocks on every rank. Of the two
    # projections into the latent space the second may end within a block.
    fused = weight.join != "copy" or name.endswith(".q_a_proj.weight")
    if block_edges_only(shape, weight.axis, kept) and not (fused and any(b % FP8_BLOCK for _, b in kept)):
        return []
    return [
        f"{name}: an engine rank keeps {kept[0][1] - kept[0][0]} of axis {weight.axis} of {shape}, which is not a "
        f"multiple of {FP8_BLOCK}; lower rollout.tensor or keep its layer BF16 (precision.bf16_first_layers, "
        "bf16_last_layers)"
    ]


def _wire_tensors(transfer: Transfer, offset: int) -> tuple[list[WireTensor], int]:
    """The tensors that a transfer puts into a bucket from ``offset`` on, and the first free byte after them."""
    if transfer.is_fp8:
        blocks = tuple(-(-n // FP8_BLOCK) for n in transfer.shape)
        kinds = [(transfer.name, "float8_e4m3fn", transfer.shape), (transfer.scale_name, "float32", blocks)]
    else:
        kinds = [(transfer.name, transfer.dtype, transfer.shape)]
    tensors = []
    for name, dtype, shape in kinds:
        tensor = WireTensor(name, dtype, shape, offset)
        tensors.append(tensor)
        offset += aligned(tensor.num_bytes)
    return tensors, offset


def _fill_buckets(transfers: list[Transfer], bucket_bytes: int) -> tuple[Bucket, ...]:
    buckets: list[Bucket] = []
    members: list[Transfer] = []
    tensors: list[WireTensor] = []
    end = 0
    for transfer in transfers:
        added, new_end = _wire_tensors(transfer, end)
        if members and new_end > bucket_bytes:
            buckets.append(Bucket(tuple(members), tuple(tensors), end))
            members, tensors = [], []
            added, new_end = _wire_tensors(transfer, 0)
        members.append(transfer)
        tensors += added
        end = new_end
    return (*buckets, Bucket(tuple(members), tuple(tensors), end))


def _check_layouts(model: ModelConfig, trainer: TrainerLayout, engine: EngineLayout) -> list[str]:
    problems = []
    stages = trainer.pipeline * trainer.virtual_stages
    if model.num_layers < stages:
        problems.append(f"{model.num_layers} layers cannot be divided over {stages} pipeline stages")
    if model.is_moe and model.num_experts % trainer.expert:
        problems.append(f"{model.num_experts} experts cannot be divided over {trainer.expert} expert-parallel ranks")
    qkv = registry.weights(model).get("decoder.layers.0.self_attention.linear_qkv.weight")
    wrong = slicing.problem(qkv, model, trainer.tensor) if qkv is not None else None
    if wrong:
        problems.append(wrong)
    if model.is_moe and model.num_experts % engine.expert:
        problems.append(f"{model.num_experts} experts cannot be divided over {engine.expert} engine ranks")
    if engine.expert not in (1, engine.tensor):
        problems.append(f"an engine spreads experts over 1 or all {engine.tensor} ranks, not over {engine.expert}")
    return problems


def plan(
    model: ModelConfig,
    table: LayerTable,
    trainer: TrainerLayout,
    engine: EngineLayout,
    *,
    bucket_bytes: int = RolloutConfig.bucket_bytes,
) -> Plan:
    """Plan a publication.

    A bucket holds at most ``bucket_bytes``, or one tensor that is larger by itself.

    Raises PlanError that names every tensor that a layout cannot hold, and what to do.
    """
    problems = _check_layouts(model, trainer, engine)
    if problems:
        raise PlanError(problems)
    transfers: list[Transfer] = []
    for weight in registry.weights(model).values():
        for name, shape in (*weight.parts, *((copy, weight.shape) for copy in weight.copies)):
            transfer, wrong = _transfer(name, weight, shape, model, table.rollout_fp8(name), (trainer, engine))
            transfers.append(transfer)
            problems += wrong
    if problems:
        raise PlanError(problems)
    return Plan(trainer, engine, _fill_buckets(transfers, bucket_bytes))
