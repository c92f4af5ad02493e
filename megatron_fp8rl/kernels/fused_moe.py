"""Permute, quantize, SwiGLU and unpermute around the grouped GEMMs of FP8 experts.

Results are FP8 data and scales in the layouts of DeepGEMM's Hopper kernels. Triton runs on a GPU or under
TRITON_INTERPRET=1 (triton/permute.py); elsewhere torch (fused_moe_torch.py), which the kernels match byte for byte.

Padding. The m-grouped GEMMs require each expert to start at a multiple of 128 rows, and wgrad uses one scale per 128
tokens. ``ExpertPermutation`` maps T rows to P padded rows, which are zero in all outputs of this file. If P is an upper
bound, row blocks remain after the last expert; they are neither read nor written, and GEMMs skip them.

Quantization is ``blockwise.quantize_activation``, along rows, and columnwise along the tokens of an expert:

    rows     float8_e4m3fn [P, K]                    row_scales     float32 [P, K / 128], strides (1, P)
    columns  float8_e4m3fn [P / 128, K, 128]         column_scales  float32 [P / 128, K]

The columnwise layout is that of cuda/grouped_wgrad.cu. In a block of 128 rows of one expert, each feature is a line of
128 values, whose eight 16-byte chunks are swizzled to chunk ^ (feature % 8) for the tensor cores. For dense layers,
DeepGEMM's wgrad needs a matrix [K, P] with scales [K, P / 128] of strides (1, K): set ``in_matrix``.

Shapes: T = incoming tokens (a token counts once for each of its experts), P = rows with padding, E = experts, K =
features of the permuted rows (a multiple of 128), F = features of each half of the gated pair ``h_P2F``: gate | up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_fp8rl.kernels.backend import runs_triton
from megatron_fp8rl.kernels.types import (
    BLOCK,
    ExpertPermutation,
    Packed,
    Quantized,
    Scales,
    SwigluGradients,
    block_scales,
)

if TYPE_CHECKING:
    from megatron_fp8rl.precision.formats import QuantFormat


def expert_permutation(
    tokens_per_expert: Tensor, num_tokens: int, counts: Sequence[int] | None = None, in_matrix: bool = False
) -> ExpertPermutation:
    """Build the layout for ``tokens_per_expert`` (int32 or int64 [E], on the device of the tokens); never synchronizes.

    ``counts`` are the same numbers on the host; without them, P is an upper bound, and BF16 wgrad is unavailable.
    Tokens beyond the sum of the counts belong to no expert.
    """
    if tokens_per_expert.dim() != 1 or tokens_per_expert.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"tokens_per_expert must be an integer tensor [E], not {_described(tokens_per_expert)}")
    padded = None if counts is None else tuple(-(-int(count) // BLOCK) * BLOCK for count in counts)
    if padded is not None and len(padded) != len(tokens_per_expert):
        raise ValueError(f"counts has {len(padded)} experts, but tokens_per_expert has {len(tokens_per_expert)}")
    num_rows = max_rows(num_tokens, len(tokens_per_expert)) if padded is None else sum(padded)
    build = _implementation(tokens_per_expert).layout_tensors
    if in_matrix and len(tokens_per_expert) != 1:
        raise ValueError(f"in_matrix needs 1 expert, but tokens_per_expert has {len(tokens_per_expert)} experts")
    has_all = counts is not None and sum(counts) == num_tokens
    tensors = build(tokens_per_expert, num_tokens, num_rows)
    return ExpertPermutation(num_tokens, num_rows, *tensors, padded, in_matrix, has_all)


def max_rows(num_tokens: int, num_experts: int) -> int:
    """Upper bound on padded rows for ``num_tokens``: each expert with a token adds at most 127 rows of padding."""
    return (num_tokens + min(num_tokens, num_experts) * (BLOCK - 1)) // BLOCK * BLOCK


def pack(x_TH: Tensor) -> Packed:
    """Quantize BF16 [T, H] along rows, in blocks of 128 features with scales of powers of two."""
    _require_matrix("x_TH", x_TH, len(x_TH))
    num_features = x_TH.shape[1]
    return Packed(_implementation(x_TH).pack(x_TH, Packed.width(num_features)), num_features)


def permute_quantize(
    x_TK: Tensor | Packed,
    layout: ExpertPermutation,
    fmt: QuantFormat,
    *,
    rows: bool = True,
    columns: bool = False,
    bf16: bool = False,
    probs: Tensor | None = None,
) -> Quantized:
    """Pad and quantize BF16 tokens, after multiplying them by ``probs`` (float32 [T]) and rounding to BF16.

    With ``layout.sources`` several experts may read a row of ``x_TK``, and ``probs`` are not supported. Packed rows
    keep their values; a block whose largest value is 224 times its scale gets half the scale.
    """
    num_rows = layout.num_tokens if layout.sources is None else layout.num_sources
    if isinstance(x_TK, Packed):
        wanted = torch.Size((num_rows, Packed.width(x_TK.num_features)))
        if x_TK.data.shape != wanted or x_TK.data.dtype != torch.uint8 or probs is not None:
            raise ValueError(f"packed rows must be uint8 {list(wanted)} without probs, not {_described(x_TK.data)}")
    else:
        _require_matrix("x_TK", x_TK, num_rows)
    if probs is not None and layout.sources is not None:
        raise ValueError("probs are not supported for a layout with sources")
    _require_probs(probs, layout)
    implementation = _implementation(x_TK.data if isinstance(x_TK, Packed) else x_TK)
    return implementation.permute_quantize(
        x_TK, layout, _scales(fmt), rows=rows, columns=columns, bf16=bf16, probs=probs
    )


def swiglu_quantize(
    h_P2F: Tensor,
    layout: ExpertPermutation,
    fmt: QuantFormat,
    *,
    rows: bool = True,
    columns: bool = False,
    bf16: bool = False,
) -> Quantized:
    """silu(gate), rounded to BF16, times up, rounded to BF16, quantized: [P, F], byte-identical to vLLM's experts."""
    _require_matrix("h_P2F", h_P2F, layout.num_rows, halves=2)
    return _implementation(h_P2F).swiglu_quantize(h_P2F, layout, _scales(fmt), rows=rows, columns=columns, bf16=bf16)


def swiglu_backward_quantize(
    dy_PF: Tensor,
    h_P2F: Tensor,
    layout: ExpertPermutation,
    fmt: QuantFormat,
    *,
    rows: bool = True,
    columns: bool = True,
    bf16: bool = False,
    activation_columns: bool = False,
    activation_bf16: bool = False,
    probs: Tensor | None = None,
) -> SwigluGradients:
    """Compute the gradient dh of h from the gradient ``dy_PF`` of silu(gate) * up: in float32, rounded once to BF16.

    The BF16 result may overwrite h. The activation is recomputed here, so forward need not save it. ``probs`` (float32
    [T]) are for outputs times router weights, y = p fc2(a). Let dy be the gradient of fc2(a) without p. Then dh uses p
    dy, the fc2 wgrad uses (p a) instead of a, and dp = sum_F(a dy), so forward need not save fc2(a).
    """
    _require_matrix("h_P2F", h_P2F, layout.num_rows, halves=2)
    _require_matrix("dy_PF", dy_PF, layout.num_rows)
    if 2 * dy_PF.shape[1] != h_P2F.shape[1]:
        raise ValueError(f"dy_PF has {dy_PF.shape[1]} features, but h_P2F has {h_P2F.shape[1]}")
    _require_probs(probs, layout)
    return _implementation(h_P2F).swiglu_backward_quantize(
        dy_PF,
        h_P2F,
        layout,
        _scales(fmt),
        rows=rows,
        columns=columns,
        bf16=bf16,
        activation_columns=activation_columns,
        activation_bf16=activation_bf16,
        probs=probs,
    )


def unpermute(y_PN: Tensor, layout: ExpertPermutation, probs: Tensor | None = None) -> Tensor:
    """Gather each token's row, times ``probs`` (float32 [T]) in float32: BF16 [T, N], zero for tokens without a row."""
    _require_matrix("y_PN", y_PN, layout.num_rows, multiple=8)
    _require_probs(probs, layout)
    return _implementation(y_PN).unpermute(y_PN, layout, probs)


def _scales(fmt: QuantFormat) -> Scales:
    return block_scales(fmt) if fmt.is_quantized else "pow2"


def _implementation(tensor: Tensor):
    if runs_triton(tensor):
        from megatron_fp8rl.kernels.triton import permute  # imports Triton

        return permute
    from megatron_fp8rl.kernels import fused_moe_torch

    return fused_moe_torch


def _require_matrix(name: str, x: Tensor, num_rows: int, *, halves: int = 1, multiple: int = BLOCK) -> None:
    fits = x.dim() == 2 and x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[0] == num_rows
    if not fits or x.shape[1] % (halves * multiple):
        wanted = f"contiguous bfloat16 [{num_rows}, a multiple of {halves * multiple}]"
        raise ValueError(f"{name} must be {wanted}, not {_described(x)}")


def _require_probs(probs: Tensor | None, layout: ExpertPermutation) -> None:
    if probs is not None and (probs.dtype != torch.float32 or probs.shape != (layout.num_tokens,)):
        raise ValueError(f"probs must be float32 [{layout.num_tokens}], not {_described(probs)}")


def _described(x: Tensor) -> str:
    return f"{'' if x.is_contiguous() else 'strided '}{x.dtype} {list(x.shape)}".replace("torch.", "")
