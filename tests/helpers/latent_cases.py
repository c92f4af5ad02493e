"""Inputs of absorbed latent attention over a paged cache, and its results in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LatentCase:
    query: Tensor  # BF16 [T, H, L + R]
    cache: Tensor  # BF16 [pages, tokens of a page, L + R]
    pages: Tensor  # int32 [S, pages of a sequence]
    cu_queries: Tensor
    num_keys: Tensor
    num_values: int  # L

    @property
    def max_queries(self) -> int:
        return int(self.cu_queries.diff().max())

    @classmethod
    def drawn(
        cls,
        queries_and_keys: Sequence[tuple[int, int]],
        num_heads: int,
        sizes: tuple[int, int],
        page_tokens: int,
        device: str = "cpu",
    ) -> LatentCase:
        """Sequences with so many last queries of so many keys. The same keys for every page size."""
        generator = torch.Generator().manual_seed(sum(keys for _, keys in queries_and_keys))
        queries, keys = zip(*queries_and_keys)
        query = torch.randn(sum(queries), num_heads, sum(sizes), generator=generator)
        tokens = [torch.randn(num, sum(sizes), generator=generator) for num in keys]
        longest = math.ceil(max(keys) / page_tokens)
        pages = torch.randperm(len(keys) * longest, generator=generator).int().view(len(keys), longest)
        cache = torch.zeros(len(keys) * longest, page_tokens, sum(sizes))
        for row, sequence in zip(pages.tolist(), tokens):
            for i, token in enumerate(sequence):
                cache[row[i // page_tokens], i % page_tokens] = token
        cu_queries = torch.nn.functional.pad(torch.tensor(queries).cumsum(0), (1, 0)).int()
        whole = query.bfloat16(), cache.bfloat16(), pages, cu_queries, torch.tensor(keys).int()
        return cls(*(x.to(device) for x in whole), sizes[0])

    def expected(self, scale: float) -> Tensor:
        """float64 [T, H, L]."""
        out = torch.zeros(*self.query.shape[:2], self.num_values, dtype=torch.float64, device=self.query.device)
        starts = self.cu_queries.tolist()
        for s, (start, stop) in enumerate(itertools.pairwise(starts)):
            length, num = int(self.num_keys[s]), stop - start
            key = self.cache[self.pages[s].long()].flatten(0, 1)[:length].double()
            scores = torch.einsum("thd,kd->thk", self.query[start:stop].double(), key) * scale
            hidden = torch.ones(num, length, dtype=torch.bool, device=key.device).triu(length - num + 1)
            weights = scores.masked_fill(hidden[:, None], -math.inf).softmax(-1)
            out[start:stop] = torch.einsum("thk,kl->thl", weights, key[:, : self.num_values])
        return out
