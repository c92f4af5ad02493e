"""A parameter in strips of rows, so that memory holds a strip and not the parameter. Pure; no files.

In:  a parameter of the name table. Out: which rows of which Hugging Face tensor make up which rows of the Megatron one.

Both conversions go through the rows of the Megatron tensor in order, and meet the rows of each Hugging Face tensor in
order, too: a running digest of every tensor costs no second pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.names import slicing
from megatron_fp8rl.names.table import Weight

# A strip, what it is made of, its bytes on the way to a file, and FP8 blocks in float32 while they are scaled.
BYTES_PER_ELEMENT = 24
MIN_MEMORY_BYTES = 64 << 20
UNIT = 128  # rows: strips start at multiples of it, whole blocks of every format


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [start, stop) of one part, which are rows ``offset`` and following of the Megatron tensor."""

    part: int
    start: int
    stop: int
    offset: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def segments(weight: Weight, model: ModelConfig) -> list[Segment]:
    """All rows of the Megatron tensor, from top to bottom."""
    if weight.join == "copy":
        return [Segment(0, 0, weight.shape[0], 0)]
    found, offset = [], 0
    for piece in slicing.slices(weight, model):
        found.append(Segment(piece.part, piece.start, piece.stop, offset))
        offset += piece.size
    return found


def clip(whole: list[Segment], first: int, end: int) -> Iterator[Segment]:
    """The segments within rows [first, end) of the Megatron tensor, with offsets from row ``first``."""
    for piece in whole:
        low, high = max(first, piece.offset), min(end, piece.offset + piece.size)
        if low < high:
            start = piece.start + low - piece.offset
            yield Segment(piece.part, start, start + high - low, low - first)


def is_finite(rows: Tensor) -> bool:
    """Whether no number is NaN or infinite. A sum says so, and takes no memory: what is not finite stays in it."""
    return bool(rows.sum().isfinite()) or bool(rows.isfinite().all())


def strips(shape: tuple[int, ...], memory_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows [first, end) that cover ``shape``, each of so many that work on one stays within ``memory_bytes``.

    They start at multiples of :data:`UNIT`.
    """
    rows = max(1, memory_bytes // (BYTES_PER_ELEMENT * math.prod(shape[1:])))
    rows = max(UNIT, rows // UNIT * UNIT)
    for first in range(0, shape[0], rows):
        yield first, min(first + rows, shape[0])
