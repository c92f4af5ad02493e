"""Which rows or columns of which Hugging Face tensor a tensor-parallel rank holds, and the tensors themselves.

In:  a :class:`Weight` and plain tensors. Out: plain tensors. Pure; no ranks communicate.
"""

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
    """Why a weight cannot be divided over ``tp_size`` ranks; None when it can."""
    if weight.cut == "none" or weight.padded or tp_size == 1:
        return None
    if weight.join == "qkv":
        groups, heads, rows = model.num_key_value_heads, model.num_attention_heads, weight.shape[0]
        whole_groups = groups % tp_size == 0
        # More ranks than groups: Megatron gives each an equal share of a group's rows and gathers their products.
        shared_groups = tp_size % groups == 0 and heads % tp_size == 0 and rows % tp_size == 0
        count, what, fits = groups, "query groups", whole_groups or shared_groups
    elif weight.unit[0]:
        what, count = weight.unit
        fits = count % tp_size == 0
    else:
        count, what = weight.parts[0][1][weight.axis], ("rows", "columns")[weight.axis]
        fits = count % tp_size == 0
    return None if fits else f"{count} {what} cannot be divided over {tp_size} tensor-parallel ranks"


def slices(weight: Weight, model: ModelConfig, tp_size: int = 1, tp_rank: int = 0) -> list[Slice]:
    """What the tensor of one rank is made of, in order along :attr:`Weight.axis`, without padding.

    Raises ValueError that names the weight when it cannot be divided so.
    """
    wrong = problem(weight, model, tp_size)
    if wrong:
        raise ValueError(f"{weight.name}: {wrong}")
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
    found = []
    for part, length in enumerate(lengths):
        step = -(-length // tp_size)
        found.append(Slice(part, min(tp_rank * step, length), min((tp_rank + 1) * step, length)))
    return found


def _clip(whole: list[Slice], first: int, end: int) -> list[Slice]:
    """What lies between positions ``first`` and ``end`` of a sequence of slices."""
    found, position = [], 0
    for piece in whole:
        low, high = max(first, position), min(end, position + piece.size)
        if low < high:
            found.append(Slice(piece.part, piece.start + low - position, piece.start + high - position))
        position += piece.size
    return found


def part_range(weight: Weight, model: ModelConfig, part: int, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """[start, stop) of one part along the axis that a rank holds: its slices of it are neighbours. May be empty."""
    held = [piece for piece in slices(weight, model, tp_size, tp_rank) if piece.part == part]
    return (held[0].start, held[-1].stop) if held else (0, 0)


def shard_shape(weight: Weight, model: ModelConfig, tp_size: int) -> tuple[int, ...]:
    """Shape of the tensor of one rank, padding included."""
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
    """Inverse of :func:`join` for the tensor of one rank: its piece of every part, views where neighbours allow.

    ``tensor`` may have one number for each ``block`` rows and columns. Raises ValueError when a piece begins within one.
    """
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
    return [torch.cat(found, axis) if len(found) > 1 else found[0] if found else nothing for found in pieces]


def cut(weight: Weight, model: ModelConfig, full: Tensor, tp_size: int, tp_rank: int) -> Tensor:
    """The contiguous piece of a full Megatron tensor that one rank holds."""
    import torch

    axis, held = weight.axis, slices(weight, model, tp_size, tp_rank)
    if weight.join == "gate_up":
        parts = full.split([shape[0] for _, shape in weight.parts])
        return torch.cat([parts[s.part].narrow(0, s.start, s.size) for s in held])
    if weight.join == "qkv":
        rows = weight.shape[0] // tp_size
        return full.narrow(0, tp_rank * rows, rows).contiguous()
    piece = full.narrow(axis, held[0].start, held[0].size).contiguous()
    missing = shard_shape(weight, model, tp_size)[axis] - held[0].size
    if missing:
        piece = torch.cat([piece, piece.new_zeros((missing, *piece.shape[1:]))])
    return piece
