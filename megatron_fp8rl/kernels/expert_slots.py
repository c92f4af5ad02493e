"""Assign tokens to a rank's experts by index, without copies, and sum each token's expert outputs.

Rows are sorted by expert, and by token within an expert. On a rank with all experts the number of rows is known. On
other ranks it depends on the router: :meth:`Choice.of` starts its copy to the host and :meth:`Choice.slots` waits.
Kernels launched in between, such as an exchange of tokens, hide the copy. Triton runs on a GPU or under
TRITON_INTERPRET=1 (triton/slots.py), torch elsewhere.

Shapes: T = tokens, E = experts of this rank, R = rows (one per token and expert of this rank), P = rows with each
expert's padded to multiples of 128, K = most experts of a token here, H = features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_fp8rl.kernels.backend import runs_triton
from megatron_fp8rl.kernels.fused_moe import expert_permutation
from megatron_fp8rl.kernels.types import ExpertPermutation, Packed


@dataclass(frozen=True, slots=True)
class Slots:
    layout: ExpertPermutation  # of R rows; its ``sources`` are tokens
    rows_TK: Tensor  # int32, the rows of a token in the order of their experts, then -1
    probs_R: Tensor  # float32 router weights, with the gradient of ``scores_TE``


@dataclass(frozen=True, slots=True)
class Choice:
    scores_TE: Tensor  # float32, -1: not chosen
    ends: Tensor  # int32 [E, T], or [E, tiles of tokens] on a GPU: cumulative counts per expert
    counts_E: Tensor  # int32, the last of them
    host_counts: Tensor | None  # the same on the host after ``arrived``; None: not copied
    arrived: Any = None  # torch.cuda.Event, or None for tensors on the host
    num_rows: int = 0  # R, if the counts are not copied to the host
    exchange: Any = None  # between the ranks of these tokens (trainer/model/dispatcher.py); None: one rank
    all_tokens: Tensor | Packed | None = None  # their tokens [T, H]

    @classmethod
    def of(cls, scores_TE: Tensor, num_rows: int | None = None) -> Choice:
        """Count the chosen experts (score not -1) of at least one token, and start the copy of the counts to the host.
        With ``num_rows``, the total number of rows, nothing is copied and P is an upper bound."""
        ends, counts_E = _implementation(scores_TE).count(scores_TE.detach())
        if num_rows is not None:
            return cls(scores_TE, ends, counts_E, None, num_rows=num_rows)
        if not counts_E.is_cuda:
            return cls(scores_TE, ends, counts_E, counts_E)
        host = torch.empty(counts_E.shape, dtype=torch.int32, pin_memory=True)
        host.copy_(counts_E, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(scores_TE, ends, counts_E, host, arrived)

    def slots(self, most: int) -> Slots:
        """The rows of all tokens. ``most``: experts per token on all ranks. Waits for the counts."""
        if self.arrived is not None:
            self.arrived.synchronize()
        counts = None if self.host_counts is None else self.host_counts.tolist()
        num_rows = self.num_rows if counts is None else sum(counts)
        layout = expert_permutation(self.counts_E, num_rows, counts)
        num_tokens, num_experts = self.scores_TE.shape
        build = _implementation(self.scores_TE).place
        sources, rows_TK, probs_R = build(
            self.scores_TE.detach(), self.ends, self.counts_E, layout, min(most, num_experts)
        )
        layout = replace(layout, sources=sources, num_sources=num_tokens, has_all_tokens=True)
        return Slots(layout, rows_TK, _Weights.apply(self.scores_TE, probs_R, self.ends, self.counts_E))


class _Weights(torch.autograd.Function):
    """The scores of all rows, differentiable in ``scores_TE``."""

    @staticmethod
    def forward(ctx: Any, scores_TE: Tensor, probs_R: Tensor, ends: Tensor, counts_E: Tensor) -> Tensor:
        ctx.save_for_backward(scores_TE, ends, counts_E)
        return probs_R.view_as(probs_R)

    @staticmethod
    def backward(ctx: Any, grad_R: Tensor) -> tuple[Tensor | None, ...]:
        return _implementation(grad_R).scores_gradient(grad_R.contiguous(), *ctx.saved_tensors), None, None, None


def sum_rows(y_RH: Tensor, rows_TK: Tensor, probs_R: Tensor | None = None) -> Tensor:
    """BF16 [T, H]: the sum of each token's rows, times ``probs_R`` if not None, in float32 and rounded once."""
    if y_RH.dtype != torch.bfloat16 or not y_RH.is_contiguous():
        raise ValueError(f"y_RH must be contiguous bfloat16, not {y_RH.dtype} of strides {y_RH.stride()}")
    return _implementation(y_RH).sum_rows(y_RH, rows_TK, probs_R)


def _implementation(tensor: Tensor) -> Any:
    if runs_triton(tensor):
        from megatron_fp8rl.kernels.triton import slots  # imports Triton

        return slots
    return _Torch


class _Torch:
    """The reference of triton/slots.py. Synchronizes with the device."""

    @staticmethod
    def count(scores_TE: Tensor) -> tuple[Tensor, Tensor]:
        ends_ET = (scores_TE >= 0).t().contiguous().cumsum(1, dtype=torch.int32)
        return ends_ET, ends_ET[:, -1].contiguous()

    @staticmethod
    def _rows(scores_TE: Tensor, ends_ET: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor]:
        """(where scores are chosen, the rows there), both [T, E]."""
        starts = counts_E.cumsum(0) - counts_E
        return scores_TE >= 0, ends_ET.t() - 1 + starts

    @staticmethod
    def place(
        scores_TE: Tensor, ends_ET: Tensor, counts_E: Tensor, layout: ExpertPermutation, most: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        chosen, rows = _Torch._rows(scores_TE, ends_ET, counts_E)
        tokens = chosen.t().nonzero()[:, 1].int()  # by expert, then by token
        sources = torch.full_like(layout.rows, -1)
        sources[layout.rows >= 0] = tokens[layout.rows[layout.rows >= 0].long()]
        rows_TK = torch.full((len(scores_TE), most), -1, dtype=torch.int32, device=scores_TE.device)
        token, slot = chosen.nonzero()[:, 0], (chosen.cumsum(1) - 1)[chosen]
        rows_TK[token, slot] = rows[chosen].int()
        return sources, rows_TK, scores_TE.t()[chosen.t()]

    @staticmethod
    def scores_gradient(grad_R: Tensor, scores_TE: Tensor, ends_ET: Tensor, counts_E: Tensor) -> Tensor:
        chosen, rows = _Torch._rows(scores_TE, ends_ET, counts_E)
        out = torch.zeros_like(scores_TE)
        out[chosen] = grad_R[rows[chosen].long()]
        return out

    @staticmethod
    def sum_rows(y_RH: Tensor, rows_TK: Tensor, probs_R: Tensor | None) -> Tensor:
        total = torch.zeros(len(rows_TK), y_RH.shape[1], device=y_RH.device)
        for rows in rows_TK.long().unbind(1):
            taken = rows >= 0
            term = y_RH[rows[taken]].float()
            total[taken] += term if probs_R is None else term * probs_R[rows[taken]][:, None]
        return total.to(y_RH.dtype)
