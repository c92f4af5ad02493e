"""The rows or columns of each Hugging Face tensor on a tensor-parallel rank, and the tensors themselves. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.names.table import Weight

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows or columns [start, stop) of one part of a weight, along the weight's axis."""

    part: int  # index into ``Weight.parts``
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def problem(weight: Weight, model: ModelConfig, tp_size: int) -> str | None:
    """Why a weight cannot be sharded over ``tp_size`` ranks; None if it can."""
    if weight.cut == "none" or weight.padded or tp_size == 1:
        return None
    if weight.join == "qkv":
        groups, heads, rows = model.num_key_value_heads, model.num_attention_heads, weight.shape[0]
        whole_groups = groups % tp_size == 0
        # With more ranks than groups, Megatron gives each rank an equal share of a group's rows and gathers their
        # outputs.
        shared_groups = tp_size % groups == 0 and heads % tp_size == 0 and rows % tp_size == 0
        count, what, fits = groups, "query groups", whole_groups or shared_groups
    elif weight.unit[0]:
        what, count = weight.unit
        fits = count % tp_size == 0
    else:
        count, what = weight.parts[0][1][weight.axis], ("rows", "columns")[weight.axis]
        fits = count % tp_size == 0
    return None if fits else f"{count} {what} cannot be divided over {tp_size} tensor-parallel ranks"


def require_divisible(weight: Weight, model: ModelConfig, tp_size: int) -> None:
    """Raise ValueError, with the weight's name, if it cannot be sharded over ``tp_size`` ranks."""
    if reason := problem(weight, model, tp_size):
        raise ValueError(f"{weight.name}: {reason}")


def slices(weight: Weight, model: ModelConfig, tp_size: int = 1, tp_rank: int = 0) -> list[Slice]:
    """The slices of one rank's tensor, in order along :attr:`Weight.axis`, without padding. Raises ValueError as
    :func:`require_divisible`."""
    require_divisible(weight, model, tp_size)
    lengths = [shape[weight.axis] for _, shape in weight.parts]
    if weight.join == "qkv":
        groups = model.num_key_value_heads
        whole = [
            Slice(part, group * length // groups, (group + 1) * length // groups)
            for group in range(groups)
            for part, length in enumerate(lengths)
        ]
        rows = sum(lengths) // tp_size
        return _clip(whole, tp_rank * rows, (tp_rank + 1) * rows)
    if weight.cut == "none":
        tp_size, tp_rank = 1, 0
    pieces = []
    for part, length in enumerate(lengths):
        step = -(-length // tp_size)
        pieces.append(Slice(part, min(tp_rank * step, length), min((tp_rank + 1) * step, length)))
    return pieces


def _clip(whole: list[Slice], first: int, end: int) -> list[Slice]:
    pieces, position = [], 0
    for piece in whole:
        low, high = max(first, position), min(end, position + piece.size)
        if low < high:
            pieces.append(Slice(piece.part, piece.start + low - position, piece.start + high - position))
        position += piece.size
    return pieces


def part_range(weight: Weight, model: ModelConfig, part: int, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """[start, stop) of a rank's slices of one part along the axis, which are adjacent. May be empty."""
    pieces = [piece for piece in slices(weight, model, tp_size, tp_rank) if piece.part == part]
    return (pieces[0].start, pieces[-1].stop) if pieces else (0, 0)


def shard_shape(weight: Weight, model: ModelConfig, tp_size: int) -> tuple[int, ...]:
    """Shape of one rank's tensor, including padding."""
    shape = list(weight.shape)
    if weight.cut != "none":
        shape[weight.axis] = -(-shape[weight.axis] // tp_size)
    return tuple(shape)


def join(weight: Weight, model: ModelConfig, parts: Sequence[Tensor]) -> Tensor:
    """The full Megatron tensor from its Hugging Face parts."""
    import torch

    if len(parts) == 1:
        return parts[0]
    return torch.cat([parts[s.part].narrow(weight.axis, s.start, s.size) for s in slices(weight, model)])


def split(
    weight: Weight, model: ModelConfig, tensor: Tensor, tp_size: int, tp_rank: int, block: int = 1
) -> list[Tensor]:
    """Inverse of :func:`join` for a rank's tensor: its piece of every part, a view if its slices are adjacent.
    ``tensor`` may have a value per ``block`` rows and columns; raises ValueError if a slice begins within a block."""
    import torch

    axis = weight.axis
    pieces: list[list[Tensor]] = [[] for _ in weight.parts]
    position = 0
    for piece in slices(weight, model, tp_size, tp_rank):
        if position % block:
            raise ValueError(f"{weight.name}: {weight.parts[piece.part][0]} begins within a block of {block}")
        pieces[piece.part].append(tensor.narrow(axis, position // block, -(-piece.size // block)))
        position += piece.size
    nothing = tensor.narrow(axis, 0, 0)
    return [torch.cat(part, axis) if len(part) > 1 else part[0] if part else nothing for part in pieces]


def cut(weight: Weight, model: ModelConfig, full: Tensor, tp_size: int, tp_rank: int) -> Tensor:
    """The contiguous shard of a full Megatron tensor on one rank."""
    import torch

    axis, pieces = weight.axis, slices(weight, model, tp_size, tp_rank)
    if weight.join == "gate_up":
        parts = full.split([shape[0] for _, shape in weight.parts])
        return torch.cat([parts[s.part].narrow(0, s.start, s.size) for s in pieces])
    if weight.join == "qkv":
        rows = weight.shape[0] // tp_size
        return full.narrow(0, tp_rank * rows, rows).contiguous()
    piece = full.narrow(axis, pieces[0].start, pieces[0].size).contiguous()
    missing = shard_shape(weight, model, tp_size)[axis] - pieces[0].size
    if missing:
        piece = torch.cat([piece, piece.new_zeros((missing, *piece.shape[1:]))])
    return piece
