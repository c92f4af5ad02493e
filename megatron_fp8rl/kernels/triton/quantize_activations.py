"""RMSNorm or SwiGLU with blockwise quantization of the result, in one launch: for engines on a GPU.

Outputs equal ``blockwise.quantize_activation``. Results are first rounded to BF16, so that engine and trainer quantize
equal numbers. vLLM's fused kernels ignore power-of-two scales (vllm-project/vllm#51477), and keep float32 between norm
and quantization. Import only for CUDA tensors, or under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp8rl.kernels.triton.bits import HARDWARE, quantized_rows, rounded_to_bf16
from megatron_fp8rl.kernels.triton.tiles import SIDE, exp_of_negative
from megatron_fp8rl.kernels.types import BLOCK, Scales

_ROWS = 16  # of a program of SwiGLU
_THREAD_NUMBERS = 16  # of a row that a thread of a norm holds


@triton.jit
def _norm_quantize(
    x, residual, weight, data, scales, num_columns, row_stride, scale_row, scale_block, eps, BLOCKS: tl.constexpr,
    ADDS: tl.constexpr, POW2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Program t normalizes row t of ``x``, or of its sum with ``residual``, which is overwritten with the sum."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    column = block[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    inside = column < num_columns
    place = row * num_columns + column
    number = tl.load(x + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        total = number + tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        stored = rounded_to_bf16(total, HARDWARE)
        tl.store(residual + place, stored, mask=inside)
        number = stored.to(tl.float32)
    mean = tl.sum(tl.sum(number * number, axis=1), axis=0) / num_columns
    number = number * tl.rsqrt(mean + eps) * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    byte, scale_bits = quantized_rows(rounded_to_bf16(number, HARDWARE).to(tl.float32), POW2, HARDWARE)
    tl.store(data + place, byte, mask=inside)
    tl.store(scales + row * scale_row + block * scale_block, scale_bits, mask=block * SIDE < num_columns)


@triton.jit(do_not_specialize=["num_rows"])
def _swiglu_quantize_rows(
    h, data, scales, num_rows, width, scale_row, scale_block, ROWS: tl.constexpr, POW2: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """A program computes 128 features of some rows; ``h`` has gates and then ups, [num_rows, 2 width]."""
    blocks = width // SIDE
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(0) % blocks
    inside = row < num_rows
    feature = block * SIDE + tl.arange(0, SIDE)[None, :]
    place = h + row[:, None] * (2 * width) + feature
    gate = tl.load(place, mask=inside[:, None], other=0.0).to(tl.float32)
    up = tl.load(place + width, mask=inside[:, None], other=0.0).to(tl.float32)
    silu = rounded_to_bf16(gate / (1.0 + exp_of_negative(gate, HARDWARE)), HARDWARE).to(tl.float32)
    byte, scale_bits = quantized_rows(rounded_to_bf16(silu * up, HARDWARE).to(tl.float32), POW2, HARDWARE)
    tl.store(data + row[:, None] * width + feature, byte, mask=inside[:, None])
    tl.store(scales + row * scale_row + block * scale_block, scale_bits, mask=inside)


def norm_quantize(
    x_TH: Tensor, weight_H: Tensor, eps: float, data_TH: Tensor, scales_TB: Tensor, scales: Scales,
    residual_TH: Tensor | None = None,
) -> None:  # fmt: skip
    """Quantize the RMSNorm of BF16 x [T, H] into E4M3 ``data_TH`` and float32 ``scales_TB`` [T, ceil(H / 128)]. With
    ``residual_TH``, it becomes residual + x, which is normalized. ``scales_TB`` may have any strides and rows of x any
    distance; other tensors are contiguous."""
    num_rows, num_columns = x_TH.shape
    contiguous = [data_TH, weight_H] + ([] if residual_TH is None else [residual_TH])
    _require(x_TH, scales_TB, contiguous, num_columns)
    if not num_rows:
        return
    blocks = triton.next_power_of_2(triton.cdiv(num_columns, BLOCK))
    warps = min(16, max(1, blocks * BLOCK // (32 * _THREAD_NUMBERS)))
    with torch.cuda.device_of(x_TH):
        _norm_quantize[(num_rows,)](
            x_TH, x_TH if residual_TH is None else residual_TH, weight_H, data_TH.view(torch.uint8),
            scales_TB.view(torch.int32), num_columns, x_TH.stride(0), *scales_TB.stride(), eps, BLOCKS=blocks,
            ADDS=residual_TH is not None, POW2=scales == "pow2", HARDWARE=HARDWARE, num_warps=warps,
        )  # fmt: skip


def swiglu_quantize(h_T2F: Tensor, data_TF: Tensor, scales_TB: Tensor, scales: Scales) -> None:
    """Quantize silu(gate) * up, both rounded to BF16, of BF16 h [T, 2 F] into E4M3 ``data_TF``, contiguous like h.
    ``scales_TB``, float32 [T, F / 128], may have any strides; F is a multiple of 128."""
    num_rows, width = data_TF.shape
    _require(h_T2F, scales_TB, [h_T2F, data_TF], width)
    if width % BLOCK or h_T2F.shape != (num_rows, 2 * width):
        raise ValueError(
            f"[T, 2 F] and [T, F] with F a multiple of {BLOCK}, not {list(h_T2F.shape)} and {list(data_TF.shape)}"
        )
    if not num_rows:
        return
    with torch.cuda.device_of(h_T2F):
        _swiglu_quantize_rows[(triton.cdiv(num_rows, _ROWS) * (width // BLOCK),)](
            h_T2F, data_TF.view(torch.uint8), scales_TB.view(torch.int32), num_rows, width, *scales_TB.stride(),
            ROWS=_ROWS, POW2=scales == "pow2", HARDWARE=HARDWARE, num_warps=4,
        )  # fmt: skip


def _require(x: Tensor, scales_TB: Tensor, contiguous: list[Tensor], num_columns: int) -> None:
    expected = (x.shape[0], -(-num_columns // BLOCK))
    if x.dtype != torch.bfloat16 or x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(f"BF16 rows are needed, not {x.dtype} {list(x.shape)} of strides {x.stride()}")
    if scales_TB.dtype != torch.float32 or scales_TB.shape != expected:
        raise ValueError(f"scales: float32 {list(expected)} are needed, not {scales_TB.dtype} {list(scales_TB.shape)}")
    if not all(tensor.is_contiguous() for tensor in contiguous):
        raise ValueError(f"contiguous tensors are needed, not of strides {[tensor.stride() for tensor in contiguous]}")
