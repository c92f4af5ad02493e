"""Digests of tensors whose parts are on several trainer ranks.

A digest (``digest.py``) sums terms that depend on a word and its position in the whole tensor, so the sums of parts add
up. Each sender sends only sums to rank 0. A float32 value counts as one word, widened to 64 bits (``digest.widened``),
because rows of block scales may have an odd length. Rank 0 combines the bytes of cut words.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_fp8rl.weight_sync.digest import sum_words, widened
from megatron_fp8rl.weight_sync.schedule import Extent

_CHUNK_WORDS = 1 << 12  # of one program on a GPU


def _words(part: Tensor) -> Tensor:
    """int64 words of a contiguous part, the last one zero-padded."""
    if part.dtype == torch.float32:
        return widened(part).reshape(-1)
    data = part.reshape(-1).view(torch.uint8)
    if data.numel() % 8 or data.storage_offset() % 8:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 8))
    return data.view(torch.int64)


class PartSums:
    """Computes word sums of ``parts``, contiguous tensors at fixed addresses with their extent in the whole tensor."""

    def __init__(self, parts: Sequence[tuple[Tensor, Extent]]):
        places = [(i, t, extent.words(4 if t.dtype == torch.float32 else 8)) for i, (t, extent) in enumerate(parts)]
        self._places = [(index, tensor, words) for index, tensor, words in places if words is not None]
        self._cut = {index: _CutPart(*parts[index]) for index, _, words in places if words is None}
        on_gpu = bool(parts) and parts[0][0].is_cuda
        self._launches = _prepare(self._places) if on_gpu else []
        self._sums = torch.zeros(len(parts), dtype=torch.int64, device=parts[0][0].device if parts else "cpu")

    def __call__(self) -> Tensor:
        """Return the sum of each part, int64 modulo 2^64 on its device, followed by the cut words in order. Cut words
        (``Extent.cut_words``) have zeros for bytes of other parts."""
        self._sums.zero_()
        for launch in self._launches:
            launch(self._sums)
        if not self._launches:
            for index, tensor, words in self._places:
                self._sums[index] = _sum(tensor, words)
        pieces = []
        for index, part in self._cut.items():
            self._sums[index], piece = part()
            pieces.append(piece)
        return torch.cat([self._sums, *pieces])


class _CutPart:
    """A part that begins or ends within a word, which is rare."""

    def __init__(self, part: Tensor, extent: Extent):
        self._part = part
        rows = torch.arange(extent.num_rows, device=part.device) * extent.pitch + extent.first
        places = (rows[:, None] + torch.arange(extent.row, device=part.device)).reshape(-1)
        self._words, number = torch.unique(places // 8, return_inverse=True)  # in order
        self._bytes = number * 8 + places % 8
        self._is_cut = torch.isin(self._words, torch.tensor(extent.cut_words(), device=part.device))

    def __call__(self) -> tuple[Tensor, Tensor]:
        data = torch.zeros(8 * len(self._words), dtype=torch.uint8, device=self._part.device)
        data[self._bytes] = self._part.reshape(-1).view(torch.uint8)
        words = data.view(torch.int64)
        return sum_words(words[~self._is_cut], self._words[~self._is_cut]), words[self._is_cut]


def _sum(part: Tensor, layout: tuple[int, int, int]) -> Tensor:
    first, columns, pitch = layout
    words = _words(part)
    places = torch.arange(words.numel(), device=words.device)
    if pitch != columns:
        places = places // columns * pitch + places % columns
    return sum_words(words, places + first)


def _prepare(places: list[tuple[int, Tensor, tuple[int, int, int]]]) -> list[Any]:
    """Return functions that add to a tensor of sums: one kernel for 64-bit words and one for float32."""
    launches = []
    for narrow in (False, True):
        members = [place for place in places if (place[1].dtype == torch.float32) == narrow]
        if not members:
            continue
        device = members[0][1].device
        rows, chunks, num_chunks = [], [], 0
        for index, tensor, layout in members:
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
