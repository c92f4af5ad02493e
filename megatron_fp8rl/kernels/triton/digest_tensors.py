"""Digest sums of whole tensors on a GPU (``weight_sync/digest.py``): one launch for all, every byte read once.

Runs on trainer ranks and in engine workers. Import only for CUDA tensors, or under TRITON_INTERPRET=1.
"""

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORD_BYTES = 8
_TABLE_COLUMNS: tl.constexpr = tl.constexpr(4)
_TILE_WORDS: tl.constexpr = tl.constexpr(512)
_CHUNK_WORDS: tl.constexpr = tl.constexpr(8192)  # of one program: 64 KiB

# Constants of digest.py, explained there; a kernel cannot read variables of another module.
_GOLDEN: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLIER_0: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLIER_1: tl.constexpr = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mix(x):
    """SplitMix64's finalizer of uint64 words."""
    x = (x ^ (x >> 30)) * _MULTIPLIER_0
    x = (x ^ (x >> 27)) * _MULTIPLIER_1
    return x ^ (x >> 31)


@triton.jit
def _add_chunks(
    table,  # int64 [num_tensors, 4]: address, bytes, first chunk, place of the sum
    tensor_of_chunk,  # int32 [num_chunks]
    totals,  # int64
    NARROW: tl.constexpr,  # words are int32, widened to 64 bits
):
    chunk = tl.program_id(0).to(tl.int64)
    row = table + tl.load(tensor_of_chunk + chunk).to(tl.int64) * _TABLE_COLUMNS
    address = tl.load(row)
    num_bytes = tl.load(row + 1)
    first = (chunk - tl.load(row + 2)) * _CHUNK_WORDS
    place_of_sum = tl.load(row + 3)
    if NARROW:
        words = address.to(tl.pointer_type(tl.int32))
        num_words = num_bytes // 4
    else:
        words = tl.multiple_of(address.to(tl.pointer_type(tl.uint64)), 8)
        num_words = num_bytes // 8
    mixed = tl.zeros([_TILE_WORDS], tl.uint64)
    for start in range(0, _CHUNK_WORDS, _TILE_WORDS):
        index = first + start + tl.arange(0, _TILE_WORDS)
        inside = index < num_words
        word = tl.load(words + index, mask=inside, other=0)
        if NARROW:
            word = word.to(tl.int64).to(tl.uint64, bitcast=True)
        mixed += tl.where(inside, _mix(word + (index + 1).to(tl.uint64) * _GOLDEN), 0)
    total = tl.sum(mixed, axis=0)
    if not NARROW:
        if (num_bytes % 8 != 0) & (first <= num_words) & (num_words < first + _CHUNK_WORDS):
            # The last word is partial; its missing bytes are zero.
            place = tl.arange(0, 8)
            tail = address.to(tl.pointer_type(tl.uint8)) + num_words * 8 + place
            byte = tl.load(tail, mask=place < num_bytes % 8, other=0).to(tl.uint64)
            word = tl.sum(byte << (place * 8).to(tl.uint64), axis=0)
            total += _mix(word + (num_words + 1).to(tl.uint64) * _GOLDEN)
    tl.atomic_add(totals + place_of_sum, total.to(tl.int64, bitcast=True))


def sums(tensors: Sequence[Tensor], *, widen: bool = False) -> list[int]:
    """Sum of mixed words of each tensor modulo 2^64, signed, as digest.py defines it; tensors of any dtype and layout
    on one device. With ``widen``, a float32 value is a word by itself: the sum of ``digest.widened(tensor)``."""
    return prepare(tensors, widen=widen)().tolist() if tensors else []


def prepare(tensors: Sequence[Tensor], *, widen: bool = False) -> Callable[[], Tensor]:
    """:func:`sums` as a function for repeated calls as the memory changes: int64 [len(tensors)] on their device.

    The next call overwrites the result. Work that depends only on addresses and shapes is done once. For hundreds of
    tensors it takes the host longer than the GPU takes to read them.
    """
    # A view may begin anywhere and its rows may be strided; words are read in order and aligned.
    narrow = [widen and t.dtype == torch.float32 for t in tensors]
    boundaries = [4 if is_narrow else _WORD_BYTES for is_narrow in narrow]
    strayed = [not t.is_contiguous() or t.data_ptr() % n != 0 for t, n in zip(tensors, boundaries, strict=True)]
    copies = [(torch.empty(t.shape, dtype=t.dtype, device=t.device), t) for t, far in zip(tensors, strayed) if far]
    copied = (copy for copy, _ in copies)
    read = [next(copied) if far else t.detach() for t, far in zip(tensors, strayed)]
    totals = torch.zeros(len(read), dtype=torch.int64, device=read[0].device)
    launches = []
    for kind in (False, True):
        chosen = [i for i, t in enumerate(read) if narrow[i] == kind and t.numel()]
        if chosen:
            launches.append(_prepared([read[i] for i in chosen], chosen, totals, narrow=kind))

    def run() -> Tensor:
        for copy, source in copies:
            copy.copy_(source)
        totals.zero_()
        for launch in launches:
            launch()
        return totals

    return run


def _prepared(members: list[Tensor], places: list[int], totals: Tensor, *, narrow: bool) -> Callable[[], None]:
    num_bytes = torch.tensor([t.nbytes for t in members])
    num_chunks = -(-num_bytes // ((4 if narrow else _WORD_BYTES) * _CHUNK_WORDS.value))
    ends = num_chunks.cumsum(0)
    columns = (torch.tensor([t.data_ptr() for t in members]), num_bytes, ends - num_chunks, torch.tensor(places))
    table = torch.stack(columns, dim=1).to(totals.device)
    indices = torch.arange(len(members), dtype=torch.int32)
    tensor_of_chunk = torch.repeat_interleave(indices, num_chunks).to(totals.device)

    def launch() -> None:
        with torch.cuda.device_of(members[0]):  # keeps the memory alive whose addresses are in the table
            _add_chunks[(len(tensor_of_chunk),)](table, tensor_of_chunk, totals, NARROW=narrow, num_warps=4)

    return launch
