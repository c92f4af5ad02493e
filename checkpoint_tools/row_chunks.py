"""Split a parameter into chunks of rows, so that memory holds a chunk and not the parameter.

In:  a parameter of the name table.
Out: which rows of which Hugging Face tensor are which rows of the Megatron tensor.

Megatron rows in order have the rows of each Hugging Face tensor in order, so its digest needs no second pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.names import slicing
from megatron_fp8rl.names.table import Weight

# A chunk, its sources, its bytes for the file, and FP8 blocks in float32 while they are scaled.
BYTES_PER_ELEMENT = 24
MIN_MEMORY_BYTES = 64 << 20
ROW_MULTIPLE = 128  # chunks start at multiples of it: at whole blocks of every format


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [start, stop) of a part; they are rows ``offset`` and following of the Megatron tensor."""

    part: int
    start: int
    stop: int
    offset: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def segments(weight: Weight, model: ModelConfig) -> list[Segment]:
    if weight.join == "copy":
        return [Segment(0, 0, weight.shape[0], 0)]
    result, offset = [], 0
    for piece in slicing.slices(weight, model):
        result.append(Segment(piece.part, piece.start, piece.stop, offset))
        offset += piece.size
    return result


def clip(whole: list[Segment], first: int, end: int) -> Iterator[Segment]:
    """Segments within rows [first, end) of the Megatron tensor, with offsets relative to row ``first``."""
    for segment in whole:
        low, high = max(first, segment.offset), min(end, segment.offset + segment.size)
        if low < high:
            start = segment.start + low - segment.offset
            yield Segment(segment.part, start, start + high - low, low - first)


def row_chunks(shape: tuple[int, ...], memory_bytes: int) -> Iterator[tuple[int, int]]:
    """Row ranges [first, end) that cover ``shape``; work on a chunk stays within ``memory_bytes``."""
    rows = max(1, memory_bytes // (BYTES_PER_ELEMENT * math.prod(shape[1:])))
    rows = max(ROW_MULTIPLE, rows // ROW_MULTIPLE * ROW_MULTIPLE)
    for first in range(0, shape[0], rows):
        yield first, min(first + rows, shape[0])
