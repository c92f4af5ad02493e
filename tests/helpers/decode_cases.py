"""Sequences in a paged FP8 cache that decode one token each, and what attention over them is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """The arguments of ``kernels/triton/attention.decode``; Q query heads, G groups, D features."""

    query: Tensor  # BF16 [S, Q, D]
    cache: Tensor  # uint8 [pages, tokens of a page, G, 2 D]
    pages: Tensor  # int32 [S, pages of a sequence], in an order of their own
    lengths: Tensor  # int32 [S]
    key_scale: Tensor
    value_scale: Tensor
    softmax_scale: float

    @classmethod
    def drawn(
        cls, heads: tuple[int, int, int], *, lengths: Sequence[int], page_tokens: int, device: str = "cpu"
    ) -> Case:
        num_heads, num_groups, head_dim = heads
        generator = torch.Generator().manual_seed(sum(heads))
        per_sequence = [-(-length // page_tokens) for length in lengths]
        order = 1 + torch.randperm(sum(per_sequence), generator=generator)  # page 0 is nobody's
        pages = torch.zeros(len(lengths), max(per_sequence), dtype=torch.int32)
        for row, own in zip(pages, order.split(per_sequence)):
            row[: len(own)] = own
        cache = torch.full(
            (1 + sum(per_sequence), page_tokens, num_groups, 2 * head_dim), 0x7F, dtype=torch.uint8
        )  # NaN
        for row, length in zip(pages, lengths):
            drawn = 16 * torch.randn(length, num_groups, 2 * head_dim, generator=generator)
            token = torch.arange(length)
            cache[row[token // page_tokens].long(), token % page_tokens] = drawn.to(torch.float8_e4m3fn).view(
                torch.uint8
            )
        return cls(
            query=torch.randn(len(lengths), num_heads, head_dim, generator=generator).bfloat16().to(device),
            cache=cache.to(device),
            pages=pages.to(device),
            lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
            key_scale=torch.tensor([2.0**-4], device=device),
            value_scale=torch.tensor([2.0**-6], device=device),
            softmax_scale=head_dim**-0.5,
        )


def expected(case: Case, window: int | None = None) -> Tensor:
    """float64 [S, Q, D]: softmax of all scores over the numbers that the cache holds, or of the last ``window``."""
    out = torch.zeros(case.query.shape, dtype=torch.float64, device=case.query.device)
    group = case.query.shape[1] // case.cache.shape[2]
    for result, query, row, length in zip(out, case.query.double(), case.pages, case.lengths.tolist()):
        first = max(0, length - window) if window else 0
        tokens = case.cache[row.long()].flatten(0, 1)[first:length].view(torch.float8_e4m3fn).double()
        key, value = (x.repeat_interleave(group, dim=1) for x in tokens.chunk(2, dim=-1))
        scores = torch.einsum("hd,thd->ht", query, key) * (case.key_scale.double() * case.softmax_scale)
        result.copy_(torch.einsum("ht,thd->hd", scores.softmax(-1), value) * case.value_scale.double())
    return out


def packed_case(
    heads: tuple[int, int, int], before: Sequence[int], counts: Sequence[int], device: str = "cpu"
) -> tuple[Case, dict]:
    """Sequences with ``before`` cached and ``counts`` new tokens: each new token decoded alone, and the arguments of
    ``kernels/triton/attention.packed`` for all of them."""
    from megatron_fp8rl.kernels.triton.attention import read_pages

    lengths = [b + n for b, n in zip(before, counts, strict=True)]
    case = Case.drawn(heads, lengths=lengths, page_tokens=16, device=device)
    rows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(device)
    ends = torch.cat([torch.arange(b + 1, n + 1) for b, n in zip(before, lengths)]).int().to(device)
    generator = torch.Generator().manual_seed(len(rows))
    query = torch.randn(len(rows), heads[0], heads[2], generator=generator).bfloat16().to(device)
    scales = dict(key_scale=case.key_scale, value_scale=case.value_scale, softmax_scale=case.softmax_scale)
    each = Case(query=query, cache=case.cache, pages=case.pages[rows].contiguous(), lengths=ends, **scales)
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0).int().to(device)
    keys, values = read_pages(case.cache, case.pages, starts, case.lengths, sum(lengths), max(lengths))
    return each, dict(
        query=query,
        keys=keys,
        values=values,
        **scales,
        cu_queries=torch.tensor([0, *counts]).cumsum(0).int().to(device),
        key_starts=starts,
        num_keys=case.lengths,
        max_queries=max(counts),
    )
