"""Digest sums of tensor parts on a GPU (``weight_sync/part_sums.py``): one launch reads every part once.

Imports Triton; under TRITON_INTERPRET=1 the same kernel runs on the CPU for tests.
"""

import triton
import triton.language as tl
from torch import Tensor

_COLUMNS: tl.constexpr = tl.constexpr(7)


@triton.jit
def _add_sums(table, of_chunk, sums, NARROW: tl.constexpr, CHUNK: tl.constexpr):
    """Table rows: address, bytes, first word, words per row of the part and of the whole, index of the sum, first
    chunk. Missing bytes of a part's last word are zeros."""
    chunk = tl.program_id(0).to(tl.int64)
    row = table + tl.load(of_chunk + chunk).to(tl.int64) * _COLUMNS
    address = tl.load(row)
    num_bytes = tl.load(row + 1)
    first = tl.load(row + 2)
    columns = tl.load(row + 3)
    pitch = tl.load(row + 4)
    index = tl.load(row + 5)
    place = (chunk - tl.load(row + 6)) * CHUNK + tl.arange(0, CHUNK)
    if NARROW:
        inside = place * 4 < num_bytes
        source = address.to(tl.pointer_type(tl.int32))
        words = tl.load(source + place, mask=inside, other=0).to(tl.int64).to(tl.uint64, bitcast=True)
    else:
        whole = place * 8 + 8 <= num_bytes
        inside = place * 8 < num_bytes
        words = tl.load(address.to(tl.pointer_type(tl.int64)) + place, mask=whole, other=0).to(tl.uint64, bitcast=True)
        if num_bytes % 8 != 0:
            for byte in tl.static_range(8):
                at = place * 8 + byte
                ragged = (at < num_bytes) & inside & (place * 8 + 8 > num_bytes)
                value = tl.load(address.to(tl.pointer_type(tl.uint8)) + at, mask=ragged, other=0).to(tl.uint64)
                words = words | (value << (8 * byte))
    position = place
    if pitch != columns:
        position = place // columns * pitch + place % columns
    x = words + (position + first + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    x = tl.where(inside, x, tl.zeros_like(x))
    tl.atomic_add(sums + index, tl.sum(x.to(tl.int64, bitcast=True), axis=0))


def add_sums(num_chunks: int, table: Tensor, of_chunk: Tensor, sums: Tensor, *, narrow: bool, chunk_words: int) -> None:
    """Add the sum of each part described by ``table`` to its entry in ``sums`` (int64)."""
    _add_sums[(num_chunks,)](table, of_chunk, sums, NARROW=narrow, CHUNK=chunk_words, num_warps=8)
