"""Plan which trainer rank sends which part of which tensor, in which precision. Deterministic, without side effects.

All ranks compute the same plan without communication. A tensor is sharded along at most one axis, equal at both ends:

    trainer ranks store   [start, stop) of the axis; among replicas of a shard, the lowest rank sends
    messages contain      the whole tensor in its format: values, and scales of their blocks
    engine ranks keep     [start, stop) of the axis

Quantizing a part equals slicing the quantized whole exactly if the part's edges are block edges. The ranks that store
such tensors quantize them and send half the bytes. Others are gathered in BF16 first. All layouts give equal bytes.
"""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.names import registry, slicing
from megatron_fp8rl.names.layouts import VOCAB_PADDING, EngineLayout, TrainerLayout
from megatron_fp8rl.names.table import DType, Weight, split_indices
from megatron_fp8rl.precision.formats import UNQUANTIZED, QuantFormat, Range, WireTensor
from megatron_fp8rl.precision.layer_table import LayerTable


class PlanError(ValueError):
    def __init__(self, problems: list[str]):
        self.problems = problems
        super().__init__(f"{len(problems)} tensors cannot be published:\n" + "\n".join(f"  {p}" for p in problems))


@dataclass(frozen=True, slots=True)
class Source:
    """The part of a Hugging Face tensor that one trainer rank sends."""

    rank: int
    start: int  # along the axis of the transfer
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One Hugging Face tensor to be sent from trainer ranks to engine ranks."""

    name: str  # Hugging Face name
    mcore_name: str  # global name of the parameter that contains it
    shape: tuple[int, ...]
    axis: int  # that trainer and engine shard
    sources: tuple[Source, ...]  # together they cover the axis exactly once, in order
    quantize: Literal["never", "at_source", "gathered"]
    dtype: DType  # before quantization
    format: QuantFormat  # in messages and in the engine
    slices: tuple[Range | None, ...]  # by engine rank: the range it keeps; None: nothing

    @property
    def is_fp8(self) -> bool:
        return self.format.is_quantized

    @property
    def scale_name(self) -> str:
        return self.format.scale_name(self.name)

    @property
    def block_size(self) -> int:
        """Rows or columns of a block along the axis of the transfer; 1 without blocks."""
        return self.format.block_size(self.axis)

    def blocks(self, part: Range) -> Range:
        return self.format.blocks(part, self.axis)

    def wire_tensors(self, engine_rank: int | None = None) -> Iterator[WireTensor]:
        """Yield the tensor as sent, or the part that ``engine_rank`` keeps: its values, then its scales if any."""
        shape = self.shape
        if engine_rank is not None:
            kept = self.slices[engine_rank]
            if kept is None:
                return
            shape = (*shape[: self.axis], kept[1] - kept[0], *shape[self.axis + 1 :])
        yield from self.format.wire_tensors(self.name, shape)


@dataclass(frozen=True)
class Plan:
    """All transfers of one publication, in checkpoint order."""

    trainer: TrainerLayout
    engine: EngineLayout
    transfers: tuple[Transfer, ...]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for transfer in self.transfers for tensor in transfer.wire_tensors())


def _even(size: int, parts: int) -> list[Range]:
    step = size // parts
    return [(i * step, (i + 1) * step) for i in range(parts)]


def engine_slices(name: str, weight: Weight, shape: tuple[int, ...], model: ModelConfig, engine: EngineLayout):
    """Return the range of a tensor that each engine rank keeps under vLLM's sharding."""
    size = shape[weight.axis]
    if weight.is_expert:
        if engine.expert > 1:
            return _on_owner(split_indices(weight.name)[2] // (model.num_experts // engine.expert), size, engine.size)
        return ((0, size),) * engine.size if weight.cut == "none" else tuple(_even(size, engine.size))
    return _on_tensor_ranks(name, weight, shape, model, engine) * engine.data


@functools.lru_cache(maxsize=4096)
def _on_owner(owner: int, size: int, num_ranks: int) -> tuple[Range | None, ...]:
    return tuple((0, size) if rank == owner else None for rank in range(num_ranks))


def _on_tensor_ranks(name: str, weight: Weight, shape: tuple[int, ...], model: ModelConfig, engine: EngineLayout):
    """Return the range of a non-expert tensor that each tensor-parallel rank keeps."""
    size = shape[weight.axis]
    if weight.cut == "none" or weight.whole_in_engine:
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
    name: str, weight: Weight, shape: tuple[int, ...], model: ModelConfig, fmt: QuantFormat, layouts
) -> tuple[Transfer, list[str]]:
    trainer, engine = layouts
    axis = weight.axis
    ranks = trainer.shards(weight, model)
    problems = []
    wrong = slicing.problem(weight, model, len(ranks))
    if wrong:
        problems.append(f"{name}: axis {axis} of {shape}: {wrong} of the trainer")
        ranks = ranks[:1]
    part = next((i for i, (part_name, _) in enumerate(weight.parts) if part_name == name), 0)  # a copy is of part 0
    spans = [slicing.part_range(weight, model, part, len(ranks), rank) for rank in range(len(ranks))]
    # With fewer query groups than ranks, a rank may have no row of a part.
    sources = tuple(Source(rank, *span) for rank, span in zip(ranks, spans) if span[0] < span[1])
    slices = engine_slices(name, weight, shape, model, engine)
    quantize: Literal["never", "at_source", "gathered"] = "never"
    if fmt.is_quantized:
        problems += _untiled(name, weight, shape, fmt, [span for span in slices if span is not None])
        is_whole = fmt.cuts_no_block([(s.start, s.stop) for s in sources], axis, shape[axis])
        quantize = "at_source" if is_whole else "gathered"
    transfer = Transfer(
        name=name,
        mcore_name=weight.name,
        shape=shape,
        axis=axis,
        sources=sources,
        quantize=quantize,
        dtype=weight.dtype,
        format=fmt,
        slices=slices,
    )
    return transfer, problems


def fills_blocks(name: str, weight: Weight, shape: tuple[int, ...], fmt: QuantFormat, kept: list[Range]) -> bool:
    """Whether an engine can use these parts of a quantized tensor with the scales of the whole tensor."""
    # vLLM stacks the scales of fused matrices, so each matrix must fill whole blocks on every rank. Only the second
    # projection into the latent space may end within a block, because nothing follows it.
    fused = weight.join != "copy" or name.endswith(".q_a_proj.weight")
    axis, block = weight.axis, fmt.block_size(weight.axis)
    if not fmt.has_partial_tiles and shape[1] % fmt.block_size(1):
        return False
    return fmt.cuts_no_block(kept, axis, shape[axis]) and not (fused and any(end % block for _, end in kept))


def _untiled(name: str, weight: Weight, shape: tuple[int, ...], fmt: QuantFormat, kept: list[Range]) -> list[str]:
    if fills_blocks(name, weight, shape, fmt, kept):
        return []
    axis, block = weight.axis, fmt.block_size(weight.axis)
    if not fmt.has_partial_tiles and axis == 0:
        axis, block, kept = 1, fmt.block_size(1), [(0, shape[1])]
    return [
        f"{name}: an engine rank keeps {kept[0][1] - kept[0][0]} of axis {axis} of {shape}, which is not a "
        f"multiple of {block}; lower engine.tensor or keep its layer BF16 (precision.bf16_first_layers, "
        "bf16_last_layers)"
    ]


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
    if engine.expert not in (1, engine.size):
        problems.append(f"an engine spreads experts over 1 or all {engine.size} ranks, not over {engine.expert}")
    return problems


def plan(model: ModelConfig, table: LayerTable, trainer: TrainerLayout, engine: EngineLayout) -> Plan:
    """Plan a publication. Raises PlanError with every tensor that the layouts cannot divide, and the remedy."""
    problems = _check_layouts(model, trainer, engine)
    if problems:
        raise PlanError(problems)
    transfers, problems = plan_weights(registry.weights(model).values(), model, table, trainer, engine)
    if problems:
        raise PlanError(problems)
    return Plan(trainer, engine, tuple(transfers))


def plan_weights(
    weights: Iterable[Weight], model: ModelConfig, table: LayerTable, trainer: TrainerLayout, engine: EngineLayout
) -> tuple[list[Transfer], list[str]]:
    """Return (transfers, problems). A memory estimate passes only one expert per layer."""
    problems: list[str] = []
    transfers: list[Transfer] = []
    alike: dict[tuple, Transfer] = {}  # experts share one plan: tens of thousands differ only in name
    for weight in weights:
        pattern, _, expert = split_indices(weight.name)
        for number, (name, shape) in enumerate((*weight.parts, *((copy, weight.shape) for copy in weight.copies))):
            fmt = table.rollout_format(name)
            fmt = fmt if fmt.is_quantized else UNQUANTIZED[weight.dtype]
            owner = expert // (model.num_experts // engine.expert) if expert >= 0 else -1
            key = (pattern, number, fmt.name, owner, *trainer.shards(weight, model))
            if key in alike:
                transfers.append(replace(alike[key], name=name, mcore_name=weight.name))
                continue
            transfer, wrong = _transfer(name, weight, shape, model, fmt, (trainer, engine))
            transfers.append(transfer)
            problems += wrong
            if not wrong and expert >= 0:
                alike[key] = transfer
    return transfers, problems
