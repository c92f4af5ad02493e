"""Data movement of grouped FP8 experts: permute, quantize, SwiGLU and unpermute around the grouped GEMMs.

In:  BF16 rows sorted by expert, token counts per expert on the device, outputs of grouped GEMMs.
Out: FP8 data and scales in the layouts of DeepGEMM's Hopper kernels; each tensor is read once and written once.
Runs on trainer ranks: Triton on a GPU and under TRITON_INTERPRET=1 (triton/permute.py), torch elsewhere
(fused_moe_torch.py, the definition that the kernels match byte for byte).

Padding. The m-grouped GEMMs need each expert to start at a multiple of 128 rows, and weight gradients take 128 tokens
per scale. ``ExpertPermutation`` therefore places T rows among P. All outputs of this file are zero in padded rows. Row
blocks after the last expert exist when P is an upper bound; they are neither read nor written, and GEMMs skip them.

Quantization is ``blockwise.quantize_activation`` along rows for the rowwise copy, and along the tokens of an expert for
the columnwise copy:

    rows     float8_e4m3fn [P, K]                    row_scales     float32 [P, K / 128], strides (1, P)
    columns  float8_e4m3fn [P / 128, K, 128]         column_scales  float32 [P / 128, K]

The columnwise layout is that of cuda/grouped_wgrad.cu: within a block of 128 rows, which belong to one expert, each
feature is a line of its 128 values, and its eight 16-byte chunks are swizzled to chunk ^ (feature % 8), as tensor cores
read them. A tile is thus contiguous in memory. DeepGEMM computes the weight gradients of dense layers from one matrix
[K, P] with scales [K, P / 128] of strides (1, K); a layout with ``in_matrix`` asks for that form.

Shapes: T incoming tokens (a token counts once for each of its experts), P rows with padding, E experts, K features of
the moved rows (a multiple of 128), F features of one half of the gated pair ``h_P2F``: gate | up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fp8rl.kernels.backend import runs_triton
from megatron_fp8rl.kernels.blockwise import BLOCK, Scales


@dataclass(frozen=True, slots=True)
class ExpertPermutation:
    """Where T rows, sorted by expert, lie among P rows in which each expert begins at a multiple of 128."""

    num_tokens: int  # T
    num_rows: int  # P, a multiple of 128: exact with counts from the host, else an upper bound
    offsets: Tensor  # int32 [E + 1], rows at which experts begin, and the end of the last
    padded_counts: Tensor  # int32 [E], rows of each expert: DeepGEMM's ``ks_tensor``
    experts: Tensor  # int32 [P], the expert of each row, -1 for padding: DeepGEMM's ``m_indices``
    rows: Tensor  # int32 [P], the token of each row, -1 for padding
    positions: Tensor  # int32 [T], the row of each token, -1 for a token behind the last expert's
    host_counts: tuple[int, ...] | None  # padded_counts, where the host knows them: DeepGEMM's ``ks``
    in_matrix: bool = False  # columns of the only expert are one matrix
    has_all_tokens: bool = False  # whether the host knows that each token has a row

    @classmethod
    def of(
        cls, tokens_per_expert: Tensor, num_tokens: int, counts: Sequence[int] | None = None, in_matrix: bool = False
    ) -> ExpertPermutation:
        """The layout of ``tokens_per_expert`` (int32 or int64 [E], on the device of the tokens).

        Never waits for the device. ``counts`` are the same numbers on the host, if the dispatcher has brought them
        there; without them P is an upper bound, and BF16 weight gradients, which want numbers, cannot be multiplied.
        Tokens beyond the sum of the counts belong to no expert.
        """
        if tokens_per_expert.dim() != 1 or tokens_per_expert.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"tokens_per_expert has to be integers [E], not {_described(tokens_per_expert)}")
        padded = None if counts is None else tuple(-(-int(count) // BLOCK) * BLOCK for count in counts)
        if padded is not None and len(padded) != len(tokens_per_expert):
            raise ValueError(f"counts of {len(padded)} experts for tokens_per_expert of {len(tokens_per_expert)}")
        num_rows = max_rows(num_tokens, len(tokens_per_expert)) if padded is None else sum(padded)
        build = _implementation(tokens_per_expert).layout_tensors
        if in_matrix and len(tokens_per_expert) != 1:
            raise ValueError(f"columns of {len(tokens_per_expert)} experts are not one matrix")
        has_all = counts is not None and sum(counts) == num_tokens
        return cls(num_tokens, num_rows, *build(tokens_per_expert, num_tokens, num_rows), padded, in_matrix, has_all)


def max_rows(num_tokens: int, num_experts: int) -> int:
    """The most rows that ``num_tokens`` can take: each expert that has a token may leave 127 rows empty."""
    return (num_tokens + min(num_tokens, num_experts) * (BLOCK - 1)) // BLOCK * BLOCK


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix [P, K] in the orientations that were asked for; see the head of this file for layouts."""

    rows: Tensor | None = None
    row_scales: Tensor | None = None
    columns: Tensor | None = None
    column_scales: Tensor | None = None
    bf16: Tensor | None = None  # [P, K], from which the bytes were made


def permute_quantize(
    x_TK: Tensor,
    layout: ExpertPermutation,
    scales: Scales,
    *,
    rows: bool = True,
    columns: bool = False,
    bf16: bool = False,
    probs: Tensor | None = None,
) -> Quantized:
    """Pad and quantize BF16 tokens; ``probs`` (float32 [T]) multiply them first, rounded to BF16."""
    _require_matrix("x_TK", x_TK, layout.num_tokens)
    if probs is not None and (probs.dtype != torch.float32 or probs.shape != (layout.num_tokens,)):
        raise ValueError(f"probs have to be float32 [{layout.num_tokens}], not {_described(probs)}")
    implementation = _implementation(x_TK)
    return implementation.permute_quantize(x_TK, layout, scales, rows=rows, columns=columns, bf16=bf16, probs=probs)


def quantize_rows_columns(
    x_PK: Tensor, layout: ExpertPermutation, scales: Scales, *, rows: bool = True, columns: bool = True
) -> Quantized:
    """Quantize a BF16 matrix that is padded already, in one read; what stands in its padding is taken for zeros."""
    _require_matrix("x_PK", x_PK, layout.num_rows)
    return _implementation(x_PK).quantize_rows_columns(x_PK, layout, scales, rows=rows, columns=columns)


def swiglu_quantize(
    h_P2F: Tensor,
    layout: ExpertPermutation,
    scales: Scales,
    *,
    rows: bool = True,
    columns: bool = False,
    bf16: bool = False,
) -> Quantized:
    """silu(gate), rounded to BF16, times up, rounded to BF16, quantized: [P, F].

    The bytes of vLLM's kernel between the two GEMMs of its DeepGEMM experts.
    """
    _require_matrix("h_P2F", h_P2F, layout.num_rows, halves=2)
    return _implementation(h_P2F).swiglu_quantize(h_P2F, layout, scales, rows=rows, columns=columns, bf16=bf16)


@dataclass(frozen=True, slots=True)
class SwigluGradients:
    """What one pass over h and dy yields."""

    dh: Quantized  # [P, 2F], of gate | up
    activation: Quantized  # [P, F], silu(gate) * up, times probs if there were any: for the gradient of fc2's weight
    dprobs: Tensor | None  # float32 [T]


def swiglu_backward_quantize(
    dy_PF: Tensor,
    h_P2F: Tensor,
    layout: ExpertPermutation,
    scales: Scales,
    *,
    rows: bool = True,
    columns: bool = True,
    bf16: bool = False,
    activation_columns: bool = False,
    activation_bf16: bool = False,
    probs: Tensor | None = None,
) -> SwigluGradients:
    """The gradient dh of h where ``dy_PF`` is that of silu(gate) * up; float32 inside, rounded once to BF16, which may
    take the place of h in memory.

    The activation is made again here, where its inputs are read anyway, so that forward need not keep it.
    ``probs`` (float32 [T]) are for experts whose outputs the router's weight multiplies: y = p fc2(a). Let dy be the
    gradient without p, of fc2(a) as though it were the output. Then dh takes p dy, the weight of fc2 takes (p a) in
    place of a, and dp = sum_F(a dy), which needs no fc2(a) kept from forward.
    """
    _require_matrix("h_P2F", h_P2F, layout.num_rows, halves=2)
    _require_matrix("dy_PF", dy_PF, layout.num_rows)
    if 2 * dy_PF.shape[1] != h_P2F.shape[1]:
        raise ValueError(f"dy_PF of {dy_PF.shape[1]} features for h_P2F of {h_P2F.shape[1]}")
    if probs is not None and (probs.dtype != torch.float32 or probs.shape != (layout.num_tokens,)):
        raise ValueError(f"probs have to be float32 [{layout.num_tokens}], not {_described(probs)}")
    return _implementation(h_P2F).swiglu_backward_quantize(
        dy_PF, h_P2F, layout, scales, rows=rows, columns=columns, bf16=bf16,
        activation_columns=activation_columns, activation_bf16=activation_bf16, probs=probs,
    )  # fmt: skip


def unpermute(y_PN: Tensor, layout: ExpertPermutation, probs: Tensor | None = None) -> Tensor:
    """BF16 [T, N]: the row of each token, times ``probs`` (float32 [T]) in float32; zeros for a token without a row."""
    _require_matrix("y_PN", y_PN, layout.num_rows, multiple=8)
    if probs is not None and (probs.dtype != torch.float32 or probs.shape != (layout.num_tokens,)):
        raise ValueError(f"probs have to be float32 [{layout.num_tokens}], not {_described(probs)}")
    return _implementation(y_PN).unpermute(y_PN, layout, probs)


def _implementation(tensor: Tensor):
    """The module whose functions work on this tensor."""
    if runs_triton(tensor):
        from megatron_fp8rl.kernels.triton import permute  # imports Triton

        return permute
    from megatron_fp8rl.kernels import fused_moe_torch

    return fused_moe_torch


def _require_matrix(name: str, x: Tensor, num_rows: int, *, halves: int = 1, multiple: int = BLOCK) -> None:
    fits = x.dim() == 2 and x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[0] == num_rows
    if not fits or x.shape[1] % (halves * multiple):
        wanted = f"contiguous bfloat16 [{num_rows}, a multiple of {halves * multiple}]"
        raise ValueError(f"{name} has to be {wanted}, not {_described(x)}")


def _described(x: Tensor) -> str:
    return f"{'' if x.is_contiguous() else 'strided '}{x.dtype} {list(x.shape)}".replace("torch.", "")
