"""Data movement of grouped experts in pure torch: reference for triton/permute.py, CPU path of fused_moe.py.

Synchronizes with the device to read counts. Row blocks after the last expert are zeros here, with scales of 1.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fp8rl.kernels.blockwise import dequantize_activation, quantize_activation
from megatron_fp8rl.kernels.types import BLOCK, ExpertPermutation, Packed, Quantized, Scales, SwigluGradients


def layout_tensors(tokens_per_expert: Tensor, num_tokens: int, num_rows: int) -> tuple[Tensor, ...]:
    """(offsets, padded_counts, experts, rows, positions) of an ``ExpertPermutation``."""
    device = tokens_per_expert.device
    counts = tokens_per_expert.long()
    padded_counts = (counts + BLOCK - 1) // BLOCK * BLOCK
    offsets = F.pad(padded_counts.cumsum(0), (1, 0))
    starts = F.pad(counts.cumsum(0), (1, 0))
    experts = torch.full((num_rows,), -1, device=device)
    rows, positions = experts.clone(), torch.full((num_tokens,), -1, device=device)
    for expert, count in enumerate(counts.tolist()):
        mine = slice(int(offsets[expert]), int(offsets[expert]) + count)
        tokens = slice(int(starts[expert]), int(starts[expert]) + count)
        experts[mine] = expert
        rows[mine] = torch.arange(tokens.start, tokens.stop, device=device)
        positions[tokens] = torch.arange(mine.start, mine.stop, device=device)
    return tuple(x.int() for x in (offsets, padded_counts, experts, rows, positions))


def quantized(
    x_PK: Tensor,
    layout: ExpertPermutation,
    scales: Scales,
    *,
    rows: bool = False,
    columns: bool = False,
    bf16: bool = False,
) -> Quantized:
    """Quantize BF16 ``x_PK`` in the requested orientations; padded rows are treated as zeros."""
    x = _without_padding(x_PK, layout)
    data = scale = lines = line_scale = None
    if rows:
        data, scale = quantize_activation(x, scales)
        scale = _column_major(scale)
    if columns:
        lines, line_scale = quantize_activation(x.view(-1, BLOCK, x.shape[1]).transpose(1, 2), scales)
        if layout.in_matrix:
            lines, line_scale = lines.transpose(0, 1).flatten(1), _column_major(line_scale[..., 0].t())
        else:
            lines, line_scale = swizzled(lines), line_scale[..., 0].contiguous()
    return Quantized(data, scale, lines, line_scale, x if bf16 else None)


def swizzled(lines: Tensor) -> Tensor:
    """Swizzle bytes [..., K, 128]: each 16-byte chunk moves to chunk ^ (feature % 8). This function is its inverse."""
    pieces = lines.contiguous().view(torch.uint8).unflatten(-1, (8, 16))
    features = torch.arange(lines.shape[-2], device=lines.device)
    piece = torch.arange(8, device=lines.device) ^ (features[:, None] % 8)
    return pieces.gather(-2, piece[..., None].expand(pieces.shape)).flatten(-2).view(lines.dtype)


def pack(x_TH: Tensor, width: int) -> Tensor:
    data, scale = quantize_activation(x_TH, "pow2")
    out = torch.zeros(len(x_TH), width, dtype=torch.uint8, device=x_TH.device)
    out[:, : x_TH.shape[1]] = data.view(torch.uint8)
    out[:, x_TH.shape[1] : x_TH.shape[1] + scale.shape[1]] = (scale.contiguous().view(torch.int32) >> 23 & 0xFF).to(
        torch.uint8
    )
    return out


def unpacked(x: Packed) -> Tensor:
    """BF16 [T, H], exactly the values."""
    num_blocks = x.num_features // BLOCK
    data, exponents = x.data[:, : x.num_features], x.data[:, x.num_features : x.num_features + num_blocks]
    scale = (exponents.int() << 23).view(torch.float32)
    return dequantize_activation(data.contiguous().view(torch.float8_e4m3fn), scale).bfloat16()


def permute_quantize(
    x_TK: Tensor | Packed,
    layout: ExpertPermutation,
    scales: Scales,
    *,
    rows: bool,
    columns: bool,
    bf16: bool,
    probs: Tensor | None,
) -> Quantized:
    x_TK = unpacked(x_TK) if isinstance(x_TK, Packed) else x_TK
    x = x_TK if probs is None else (x_TK.float() * probs[:, None]).bfloat16()
    x_PK = x.new_zeros(layout.num_rows, x.shape[1])
    sources = layout.rows if layout.sources is None else layout.sources
    taken = sources >= 0
    x_PK[taken] = x[sources[taken].long()]
    return quantized(x_PK, layout, scales, rows=rows, columns=columns, bf16=bf16)


def swiglu_quantize(
    h_P2F: Tensor, layout: ExpertPermutation, scales: Scales, *, rows: bool, columns: bool, bf16: bool
) -> Quantized:
    return quantized(swiglu(_without_padding(h_P2F, layout)), layout, scales, rows=rows, columns=columns, bf16=bf16)


def swiglu(h_P2F: Tensor) -> Tensor:
    """silu(gate) * up of BF16 [P, 2F], each rounded to BF16: [P, F]."""
    gate, up = h_P2F.float().chunk(2, dim=1)
    silu = (gate / (1.0 + torch.exp(-gate))).bfloat16()
    return (silu.float() * up).bfloat16()


def swiglu_backward(dy_PF: Tensor, h_P2F: Tensor) -> Tensor:
    """Gradient of :func:`swiglu`, float32 [P, 2F], from float32 ``dy_PF``; rounding has gradient 1."""
    gate, up = h_P2F.float().chunk(2, dim=1)
    sigmoid = 1.0 / (1.0 + torch.exp(-gate))
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return torch.cat([dy_PF * up * slope, dy_PF * (gate * sigmoid)], dim=1)


def swiglu_backward_quantize(
    dy_PF: Tensor,
    h_P2F: Tensor,
    layout: ExpertPermutation,
    scales: Scales,
    *,
    rows: bool,
    columns: bool,
    bf16: bool,
    activation_columns: bool,
    activation_bf16: bool,
    probs: Tensor | None,
) -> SwigluGradients:
    h, dy = _without_padding(h_P2F, layout), _without_padding(dy_PF, layout).float()
    activation, dprobs = swiglu(h), None
    if probs is not None:
        has_row = layout.positions >= 0
        positions = layout.positions.clamp(min=0).long()
        dprobs = torch.where(has_row, (activation.float() * dy).sum(1)[positions], 0.0) if len(dy) else probs * 0
        probs_P1 = probs.new_zeros(layout.num_rows, 1)
        probs_P1[positions[has_row], 0] = probs[has_row]
        activation = (activation.float() * probs_P1).bfloat16()
        dy = dy * probs_P1
    dh = swiglu_backward(dy, h).bfloat16()
    return SwigluGradients(
        dh=quantized(dh, layout, scales, rows=rows, columns=columns, bf16=bf16),
        activation=quantized(activation, layout, scales, columns=activation_columns, bf16=activation_bf16),
        dprobs=dprobs,
    )


def unpermute(y_PN: Tensor, layout: ExpertPermutation, probs: Tensor | None) -> Tensor:
    if not layout.num_rows:
        return y_PN.new_zeros(layout.num_tokens, y_PN.shape[1])
    y = y_PN[layout.positions.clamp(min=0).long()]
    if probs is not None:
        y = (y.float() * probs[:, None]).bfloat16()
    return torch.where(layout.positions[:, None] >= 0, y, 0.0)


def _column_major(x: Tensor) -> Tensor:
    """A copy with strides (1, rows), even with a single column."""
    return torch.empty_like(x.t(), memory_format=torch.contiguous_format).copy_(x.t()).t()


def _without_padding(x: Tensor, layout: ExpertPermutation) -> Tensor:
    return torch.where(layout.experts[:, None] >= 0, x, 0.0)
