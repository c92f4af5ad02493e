"""Digests of tensors whose parts lie on several trainer ranks.

A digest (see ``digest.py``) is a sum over words of a tensor that depends on each word and its place, so that the sums
of the parts, each with the places that its words have in the whole, add up to the sum of the whole. What is sent is
digested where it is sent from; only sums travel to rank 0.

A float32 number counts as one word, widened to 64 bits: rows of block scales may hold an odd number of them, and a part
has to begin with a word. ``digest.widened`` does the same to a tensor that lies in one place.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_fp8rl.weight_sync.digest import sum_words, widened

_CHUNK_WORDS = 1 << 12  # of one program on a GPU


def _words(part: Tensor) -> Tensor:
    """int64 words of a contiguous part, the last one padded with zeros."""
    if part.dtype == torch.float32:
        return widened(part).reshape(-1)
    data = part.reshape(-1).view(torch.uint8)
    if data.numel() % 8 or data.storage_offset() % 8:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 8))
    return data.view(torch.int64)


class PartialSums:
    """Sums of the words of fixed places in memory, computed again and again as their content changes.

    ``places``: (contiguous tensor, (first word, words in a row of the part, words in a row of the whole)).
    """

    def __init__(self, places: Sequence[tuple[Tensor, tuple[int, int, int]]]):
        self._places = list(places)
        on_gpu = bool(places) and places[0][0].is_cuda
        self._launches = _prepare(self._places) if on_gpu else []
        self._sums = torch.zeros(len(places), dtype=torch.int64, device=places[0][0].device if places else "cpu")

    def __call__(self) -> Tensor:
        """int64 [len(places)], modulo 2^64, on the device of the places; overwritten by the next call."""
        self._sums.zero_()
        for launch in self._launches:
            launch(self._sums)
        if not self._launches:
            for index, (tensor, layout) in enumerate(self._places):
                self._sums[index] = _sum(tensor, layout)
        return self._sums


def _sum(part: Tensor, layout: tuple[int, int, int]) -> Tensor:
    first, columns, pitch = layout
    words = _words(part)
    places = torch.arange(words.numel(), device=words.device)
    if pitch != columns:
        places = places // columns * pitch + places % columns
    return sum_words(words, places + first)


def _prepare(places: list[tuple[Tensor, tuple[int, int, int]]]) -> list[Any]:
    """One launch for parts of 64-bit words and one for float32 parts: functions that add to a tensor of sums."""
    launches = []
    for narrow in (False, True):
        members = [(i, t, layout) for i, (t, layout) in enumerate(places) if (t.dtype == torch.float32) == narrow]
        if not members:
            continue
        device = members[0][1].device
        rows, chunks, num_chunks = [], [], 0
        for number, (index, tensor, layout) in enumerate(members):
            num_bytes = tensor.numel() * tensor.element_size()
            rows.append([tensor.data_ptr(), num_bytes, *layout, index, num_chunks])
            count = -(-num_bytes // ((4 if narrow else 8) * _CHUNK_WORDS))
            chunks.append(count)
            num_chunks += count
        table = torch.tensor(rows, dtype=torch.int64, device=device)
        of_chunk = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(chunks)).to(torch.int32).to(device)
        launches.append(functools.partial(_launch, num_chunks, table, of_chunk, narrow))
    return launches


def _launch(num_chunks: int, table: Tensor, of_chunk: Tensor, narrow: bool, sums: Tensor) -> None:
    from megatron_fp8rl.kernels.triton import digest_parts  # imports Triton

    digest_parts.add_sums(num_chunks, table, of_chunk, sums, narrow=narrow, chunk_words=_CHUNK_WORDS)
