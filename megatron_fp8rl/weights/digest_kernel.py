"""The sums of :mod:`megatron_fp8rl.weights.digest` on a GPU: every byte is read once, all tensors in one launch.

In:  contiguous tensors of one device. Out: for each the sum of its mixed words, modulo 2^64, as digest.py defines it.
Which process: trainer ranks and engine workers. Import this module only for CUDA tensors, or under TRITON_INTERPRET=1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORD_BYTES = 8
_TILE_WORDS: tl.constexpr = tl.constexpr(512)
_CHUNK_WORDS: tl.constexpr = tl.constexpr(8192)  # of one program: 64 KiB

# Of digest.py, where they are explained; a kernel reads no variables of another module.
_GOLDEN: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLIER_0: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLIER_1: tl.constexpr = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mix(x):
    """SplitMix64's finaliser of uint64 words."""
    x = (x ^ (x >> 30)) * _MULTIPLIER_0
    x = (x ^ (x >> 27)) * _MULTIPLIER_1
    return x ^ (x >> 31)


@triton.jit
def _add_chunks(
    table,  # int64 [num_tensors, 3]: address, bytes, first chunk
    tensor_of_chunk,  # int32 [num_chunks]
    totals,  # int64 [num_tensors]
):
    chunk = tl.program_id(0).to(tl.int64)
    tensor = tl.load(tensor_of_chunk + chunk).to(tl.int64)
    address = tl.load(table + tensor * 3)
    num_bytes = tl.load(table + tensor * 3 + 1)
    first = (chunk - tl.load(table + tensor * 3 + 2)) * _CHUNK_WORDS
    words = tl.multiple_of(address.to(tl.pointer_type(tl.uint64)), 8)
    num_words = num_bytes // 8
    mixed = tl.zeros([_TILE_WORDS], tl.uint64)
    for start in range(0, _CHUNK_WORDS, _TILE_WORDS):
        index = first + start + tl.arange(0, _TILE_WORDS)
        inside = index < num_words
        word = tl.load(words + index, mask=inside, other=0)
        mixed += tl.where(inside, _mix(word + (index + 1).to(tl.uint64) * _GOLDEN), 0)
    total = tl.sum(mixed, axis=0)
    if (num_bytes % 8 != 0) & (first <= num_words) & (num_words < first + _CHUNK_WORDS):
        # The last word is not whole; its missing bytes are zero.
        place = tl.arange(0, 8)
        tail = address.to(tl.pointer_type(tl.uint8)) + num_words * 8 + place
        byte = tl.load(tail, mask=place < num_bytes % 8, other=0).to(tl.uint64)
        word = tl.sum(byte << (place * 8).to(tl.uint64), axis=0)
        total += _mix(word + (num_words + 1).to(tl.uint64) * _GOLDEN)
    tl.atomic_add(totals + tensor, total.to(tl.int64, bitcast=True))


def sums(tensors: Sequence[Tensor]) -> list[int]:
    """Sum of mixed words of each tensor, signed 64-bit. Tensors are contiguous, of one device, of any dtype."""
    # A view may begin anywhere; words are read at their own boundaries.
    tensors = [t if t.data_ptr() % _WORD_BYTES == 0 else t.clone() for t in tensors]
    rows, num_chunks, first = [], [], 0
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        rows.append([tensor.data_ptr(), num_bytes, first])
        num_chunks.append(-(-num_bytes // (_WORD_BYTES * _CHUNK_WORDS.value)))
        first += num_chunks[-1]
    if first == 0:
        return [0] * len(tensors)
    device = tensors[0].device
    table = torch.tensor(rows, dtype=torch.int64).to(device)
    indices = torch.arange(len(tensors), dtype=torch.int32, device=device)
    tensor_of_chunk = torch.repeat_interleave(indices, torch.tensor(num_chunks, device=device), output_size=first)
    totals = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    with torch.cuda.device_of(tensors[0]):
        _add_chunks[(first,)](table, tensor_of_chunk, totals, num_warps=4)
    return totals.tolist()
