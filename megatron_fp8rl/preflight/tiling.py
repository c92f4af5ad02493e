"""Every FP8 matrix as one rank holds it, at both ends, and the degrees that its scales tile. Pure.

``config_check`` refuses what does not tile; this shows all matrices, so that a degree can be chosen. A dimension that
is not divided may end in a partial block: both ends then round it in the same blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_fp8rl.config import FP8_BLOCK, ModelConfig, RunConfig
from megatron_fp8rl.names import slicing
from megatron_fp8rl.names.table import Weight
from megatron_fp8rl.precision.layer_table import LayerTable
from megatron_fp8rl.preflight.parameters import Entry, engine_shape, entries

TILES = {"bf16": 1, "delayed": 16, "tensorwise": 16, "blockwise": 128}
_MAX_DEGREE = 64


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """One kind of matrix: the same in many layers and experts."""

    name: str  # Hugging Face name with * for layer and expert
    count: int  # over layers and experts
    shape: tuple[int, ...]
    trainer_shape: tuple[int, ...]  # on one rank
    trainer_tile: int  # 1: BF16
    trainer_tiles: bool
    trainer_degrees: tuple[int, ...]  # of its option that tile
    trainer_option: str  # that divides it; empty when none does
    engine_shape: tuple[int, ...]
    engine_tile: int
    engine_tiles: bool
    engine_degrees: tuple[int, ...]  # of rollout.tensor that tile


def matrices(cfg: RunConfig) -> list[Matrix]:
    """All kinds of matrices that either end holds in FP8, in the order of a layer."""
    model, table = cfg.model, LayerTable.build(cfg.model, cfg.precision)
    kinds: dict[tuple[str, tuple[int, ...]], list[tuple[Entry, str]]] = {}
    for entry in entries(model):
        for name, shape in entry.weight.parts:
            if table.trainer_fp8(name) or table.rollout_fp8(name):
                kinds.setdefault((_pattern(name), shape), []).append((entry, name))
    return [_matrix(cfg, pattern, shape, members) for (pattern, shape), members in kinds.items()]


def _pattern(name: str) -> str:
    name = name.removeprefix("model.layers.").removesuffix(".weight").partition(".")[2]
    return re.sub(r"\.experts\.\d+\.", ".experts.*.", name)


def _matrix(cfg: RunConfig, pattern: str, shape: tuple[int, ...], members: list[tuple[Entry, str]]) -> Matrix:
    entry, name = members[0]
    weight, model, table = entry.weight, cfg.model, LayerTable.build(cfg.model, cfg.precision)
    in_trainer, in_engine = table.trainer_fp8(name), table.rollout_fp8(name)
    trainer_tile = TILES[cfg.precision.trainer] if in_trainer else 1
    engine_tile = TILES[cfg.precision.rollout] if in_engine else 1
    part = [n for n, _ in weight.parts].index(name)
    option, degree = ("parallel.tensor", cfg.parallel.tensor)
    if weight.is_expert:
        option, degree = "parallel.expert_tensor", cfg.parallel.expert_tensor
    on_trainer = trainer_part_shape(weight, part, model, degree)
    keeps_whole = weight.is_expert and cfg.rollout.expert > 1  # expert parallel workers
    ranks = 1 if keeps_whole else cfg.rollout.tensor
    on_engine = engine_shape(name, shape, weight, model, ranks)
    engine_degrees = tuple(_engine_degrees(name, shape, weight, model, engine_tile))
    if keeps_whole:
        engine_degrees = tuple(n for n in range(1, _MAX_DEGREE + 1) if model.num_experts % n == 0)
    return Matrix(
        name=pattern,
        count=sum(e.num_experts for e, _ in members),
        shape=shape,
        trainer_shape=on_trainer,
        trainer_tile=trainer_tile,
        trainer_tiles=_trainer_tiles(weight, part, model, degree, trainer_tile),
        trainer_degrees=tuple(_trainer_degrees(weight, part, model, trainer_tile)) if weight.cut != "none" else (),
        trainer_option=option if weight.cut != "none" else "",
        engine_shape=on_engine,
        engine_tile=engine_tile,
        engine_tiles=_tiles(weight, on_engine, shape, engine_tile)
        and _engine_divides(name, weight, shape, model, ranks),
        engine_degrees=engine_degrees,
    )


def trainer_part_shape(weight: Weight, part: int, model: ModelConfig, ranks: int) -> tuple[int, ...]:
    """Shape of one Hugging Face part of a Megatron weight on the tensor-parallel rank that has most of it."""
    shape = list(weight.parts[part][1])
    if weight.cut != "none" and slicing.problem(weight, model, ranks) is None:
        held = (slicing.part_range(weight, model, part, ranks, rank) for rank in range(ranks))
        shape[weight.axis] = max(stop - start for start, stop in held)
    elif weight.cut != "none":
        shape[weight.axis] = -(-shape[weight.axis] // ranks)
    return tuple(shape)


def _trainer_tiles(weight: Weight, part: int, model: ModelConfig, ranks: int, tile: int) -> bool:
    """Whether a rank's blocks are blocks of the whole matrix. More ranks than query groups share a group's rows."""
    if slicing.problem(weight, model, ranks) is not None:
        return False
    whole = weight.parts[part][1]
    if weight.cut == "none" or tile < FP8_BLOCK:
        return _tiles(weight, trainer_part_shape(weight, part, model, ranks), whole, tile)
    held = [
        piece for rank in range(ranks) for piece in slicing.slices(weight, model, ranks, rank) if piece.part == part
    ]
    edges = {edge for piece in held for edge in (piece.start, piece.stop)}
    return all(edge % tile == 0 or edge == whole[weight.axis] for edge in edges)


def _tiles(weight: Weight, shard: tuple[int, ...], whole: tuple[int, ...], tile: int) -> bool:
    """Whether the edges of shards are edges of tiles; per-tensor and MX scales need whole tiles throughout."""
    axes = range(len(shard)) if tile < FP8_BLOCK else [axis for axis, size in enumerate(shard) if size != whole[axis]]
    return all(shard[axis] % tile == 0 for axis in axes)


def _trainer_degrees(weight: Weight, part: int, model: ModelConfig, tile: int) -> Iterator[int]:
    for ranks in range(1, _MAX_DEGREE + 1):
        whole_heads = weight.is_expert or model.num_attention_heads % ranks == 0
        if whole_heads and _trainer_tiles(weight, part, model, ranks, tile):
            yield ranks


def _engine_divides(name: str, weight: Weight, shape: tuple[int, ...], model: ModelConfig, ranks: int) -> bool:
    if weight.cut == "none":
        return True
    if name.endswith((".k_proj.weight", ".v_proj.weight")):
        heads = model.num_key_value_heads
        return heads % ranks == 0 or ranks % heads == 0
    is_of_heads = weight.unit[0] == "heads" or weight.join == "qkv"
    whole_heads = not is_of_heads or model.num_attention_heads % ranks == 0
    return whole_heads and shape[weight.axis] % ranks == 0


def _engine_degrees(name: str, shape: tuple[int, ...], weight: Weight, model: ModelConfig, tile: int) -> Iterator[int]:
    for ranks in range(1, _MAX_DEGREE + 1):
        divides = model.num_attention_heads % ranks == 0 and _engine_divides(name, weight, shape, model, ranks)
        if divides and _tiles(weight, engine_shape(name, shape, weight, model, ranks), shape, tile):
            yield ranks


def common_degrees(kinds: Sequence[Matrix]) -> dict[str, list[int]]:
    """By option, the degrees that tile every matrix that the option divides."""
    found: dict[str, set[int]] = {}
    for kind in kinds:
        if kind.trainer_option:
            for option, degrees in (
                (kind.trainer_option, kind.trainer_degrees),
                ("rollout.tensor", kind.engine_degrees),
            ):
                found[option] = found.get(option, set(degrees)) & set(degrees)
    return {option: sorted(degrees) for option, degrees in found.items()}
