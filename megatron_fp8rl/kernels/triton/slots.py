"""The tokens of a rank's experts and the sums of their outputs in Triton: :mod:`megatron_fp8rl.kernels.expert_slots`.

Functions are those of its class ``_Torch``. A sum adds the rows of a token in the order of their experts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp8rl.kernels.triton.bits import HARDWARE, rounded_to_bf16
from megatron_fp8rl.kernels.triton.tiles import SIDE
from megatron_fp8rl.kernels.types import ExpertPermutation

_TOKENS = 32  # of a program that places
_ROWS, _COLUMNS = 4, 512  # of one that sums


@triton.jit
def tokens_and_experts(num_tokens, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, TOKENS: tl.constexpr):
    """Indices of a program with some tokens and all experts: (token [TOKENS, 1], expert [1, EXPERTS], mask)."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None]
    expert = tl.arange(0, EXPERTS)[None, :]
    return token, expert, (token < num_tokens) & (expert < NUM_EXPERTS)


@triton.jit
def _tile(scores, ends, counts, num_tokens, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, TOKENS: tl.constexpr):
    """(token [TOKENS, 1], expert [1, EXPERTS], score, whether it is chosen, rank among an expert's tokens, counts)."""
    token, expert, inside = tokens_and_experts(num_tokens, NUM_EXPERTS, EXPERTS, TOKENS)
    score = tl.load(scores + token * NUM_EXPERTS + expert, mask=inside, other=-1.0)
    chosen = inside & (score >= 0)
    taken = chosen.to(tl.int32)
    one = tl.arange(0, EXPERTS)
    count = tl.load(counts + one, mask=one < NUM_EXPERTS, other=0)
    end = tl.load(ends + one * tl.num_programs(0) + tl.program_id(0), mask=one < NUM_EXPERTS, other=0)
    rank = (end - tl.sum(taken, axis=0))[None, :] + tl.cumsum(taken, 0) - 1
    return token, expert, score, chosen, rank, count


@triton.jit(do_not_specialize=["num_tokens"])
def _count(scores, counts, num_tokens, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, TOKENS: tl.constexpr):
    token, expert, inside = tokens_and_experts(num_tokens, NUM_EXPERTS, EXPERTS, TOKENS)
    taken = inside & (tl.load(scores + token * NUM_EXPERTS + expert, mask=inside, other=-1.0) >= 0)
    one = tl.arange(0, EXPERTS)
    place = counts + one * tl.num_programs(0) + tl.program_id(0)
    tl.store(place, tl.sum(taken.to(tl.int32), axis=0), mask=one < NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_tokens"])
def _place(
    scores, ends, counts, sources, slots, probs, num_tokens,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, MOST: tl.constexpr, SLOTS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    token, _, score, chosen, rank, count = _tile(scores, ends, counts, num_tokens, NUM_EXPERTS, EXPERTS, TOKENS)
    padded = (count + SIDE - 1) // SIDE * SIDE
    row = (tl.cumsum(count, 0) - count)[None, :] + rank
    tl.store(sources + (tl.cumsum(padded, 0) - padded)[None, :] + rank, token + tl.zeros_like(rank), mask=chosen)
    tl.store(probs + row, score, mask=chosen)
    taken = chosen.to(tl.int32)
    tl.store(slots + token * MOST + tl.cumsum(taken, 1) - 1, row, mask=chosen)
    slot = tl.arange(0, SLOTS)[None, :]
    is_free = (slot >= tl.sum(taken, axis=1)[:, None]) & (slot < MOST) & (token < num_tokens)
    tl.store(slots + token * MOST + slot, tl.zeros_like(slot + token) - 1, mask=is_free)


@triton.jit(do_not_specialize=["num_tokens"])
def _scores_gradient(
    grad, scores, ends, counts, out, num_tokens,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    token, expert, _, chosen, rank, count = _tile(scores, ends, counts, num_tokens, NUM_EXPERTS, EXPERTS, TOKENS)
    row = (tl.cumsum(count, 0) - count)[None, :] + rank
    number = tl.load(grad + row, mask=chosen, other=0.0)
    tl.store(out + token * NUM_EXPERTS + expert, number, mask=(token < num_tokens) & (expert < NUM_EXPERTS))


@triton.jit(do_not_specialize=["num_tokens"])
def _sum_rows(
    y, probs, slots, out, num_tokens, width,
    MOST: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    # A single grid axis, because there may be more programs than the 65,535 of the other axes.
    blocks = tl.cdiv(width, COLUMNS)
    token = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in tl.static_range(MOST):
        row = tl.load(slots + token * MOST + k, mask=token < num_tokens, other=-1).to(tl.int64)
        taken = (row >= 0)[:, None] & (column < width)
        term = tl.load(y + row[:, None] * width + column, mask=taken, other=0.0).to(tl.float32)
        if WEIGHTED:
            term *= tl.load(probs + row, mask=row >= 0, other=0.0)[:, None]
        total += term
    place = out + token[:, None] * width + column
    tl.store(place, rounded_to_bf16(total, HARDWARE), mask=(token < num_tokens)[:, None] & (column < width))


def sizes(scores_TE: Tensor, tokens: int = _TOKENS) -> dict[str, int]:
    num_experts = scores_TE.shape[1]
    return {"NUM_EXPERTS": num_experts, "EXPERTS": triton.next_power_of_2(num_experts), "TOKENS": tokens}


def count(scores_TE: Tensor) -> tuple[Tensor, Tensor]:
    """(int32 [E, tiles], tokens up to the end of a tile that go to an expert; its last column)."""
    num_tokens, num_experts = scores_TE.shape
    tiles = triton.cdiv(num_tokens, _TOKENS)
    counts = torch.empty(num_experts, tiles, dtype=torch.int32, device=scores_TE.device)
    with torch.cuda.device_of(scores_TE):
        _count[(tiles,)](scores_TE.contiguous(), counts, num_tokens, **sizes(scores_TE), num_warps=4)
    ends = counts.cumsum(1, dtype=torch.int32)  # along adjacent numbers: down a column a GPU takes ten times as long
    return ends, ends[:, -1].contiguous()


def place(
    scores_TE: Tensor, ends: Tensor, counts_E: Tensor, layout: ExpertPermutation, most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(the token of each of P rows or -1, the rows of each token [T, most], router weights [R])."""
    num_tokens = len(scores_TE)
    sources = torch.full_like(layout.rows, -1)
    slots = torch.empty(num_tokens, most, dtype=torch.int32, device=scores_TE.device)
    probs = torch.empty(layout.num_tokens, dtype=torch.float32, device=scores_TE.device)
    with torch.cuda.device_of(scores_TE):
        _place[(triton.cdiv(num_tokens, _TOKENS),)](
            scores_TE.contiguous(), ends, counts_E, sources, slots, probs, num_tokens,
            MOST=most, SLOTS=triton.next_power_of_2(most), **sizes(scores_TE), num_warps=4,
        )  # fmt: skip
    return sources, slots, probs


def scores_gradient(grad_R: Tensor, scores_TE: Tensor, ends: Tensor, counts_E: Tensor) -> Tensor:
    """float32 [T, E]: gradients of the scores of all rows, 0 where a token does not go."""
    out = torch.empty(scores_TE.shape, dtype=torch.float32, device=scores_TE.device)
    with torch.cuda.device_of(grad_R):
        _scores_gradient[(triton.cdiv(len(scores_TE), _TOKENS),)](
            grad_R, scores_TE.contiguous(), ends, counts_E, out, len(scores_TE), **sizes(scores_TE), num_warps=4
        )
    return out


def sum_rows(y_RH: Tensor, rows_TK: Tensor, probs_R: Tensor | None) -> Tensor:
    num_tokens, most = rows_TK.shape
    width = y_RH.shape[1]
    out = torch.empty(num_tokens, width, dtype=y_RH.dtype, device=y_RH.device)
    with torch.cuda.device_of(y_RH):
        _sum_rows[(triton.cdiv(num_tokens, _ROWS) * triton.cdiv(width, _COLUMNS),)](
            y_RH, y_RH if probs_R is None else probs_R.contiguous(), rows_TK, out, num_tokens, width,
            MOST=most, WEIGHTED=probs_R is not None, ROWS=_ROWS, COLUMNS=_COLUMNS, HARDWARE=HARDWARE, num_warps=4,
        )  # fmt: skip
    return out
