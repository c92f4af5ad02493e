"""SwiGLU and router weighting between and after the expert linears, each in one pass on a GPU, in BF16.

Forward is bitwise equal to torch's ``silu(gate) * up`` and ``(y * p).to(y.dtype)``: exp is the CUDA math library's, and
division is exact. Backward rounds once and needs only the inputs. The order of sums is fixed.

Shapes: T = tokens sorted by expert, F = features between the two linears, H = hidden size.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from megatron_fp8rl.kernels.triton.bits import HARDWARE, rounded_to_bf16

_TILE = {"ROWS": 8, "COLUMNS": 256, "num_warps": 4, "HARDWARE": HARDWARE}


@triton.jit
def _tile(width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(rows int64 [ROWS], columns [COLUMNS]) of a program; a single grid axis, which may exceed 65,535."""
    blocks = tl.cdiv(width, COLUMNS)
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return row, tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit
def _one_and_exp_of_negative(x, HARDWARE: tl.constexpr):
    return 1.0 + (libdevice.exp(-x) if HARDWARE else tl.exp(-x))


@triton.jit(do_not_specialize=["num_rows"])
def _swiglu(h, out, num_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HARDWARE: tl.constexpr):
    row, column = _tile(width, ROWS, COLUMNS)
    row, column = row[:, None], column[None, :]
    inside = (row < num_rows) & (column < width)
    place = h + row * (2 * width) + column
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + width, mask=inside, other=0.0).to(tl.float32)
    silu = rounded_to_bf16(tl.div_rn(gate, _one_and_exp_of_negative(gate, HARDWARE)), HARDWARE)
    tl.store(out + row * width + column, rounded_to_bf16(silu.to(tl.float32) * up, HARDWARE), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _swiglu_backward(dy, h, out, num_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HARDWARE: tl.constexpr):
    row, column = _tile(width, ROWS, COLUMNS)
    row, column = row[:, None], column[None, :]
    inside = (row < num_rows) & (column < width)
    place = row * (2 * width) + column
    gate = tl.load(h + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(h + place + width, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(dy + row * width + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / _one_and_exp_of_negative(gate, HARDWARE)
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(out + place, rounded_to_bf16(grad * up * slope, HARDWARE), mask=inside)
    tl.store(out + place + width, rounded_to_bf16(grad * (gate * sigmoid), HARDWARE), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _weigh(y, probs, out, num_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HARDWARE: tl.constexpr):
    row, column = _tile(width, ROWS, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    prob = tl.load(probs + row, mask=row < num_rows, other=0.0)[:, None]
    place = row[:, None] * width + column[None, :]
    number = tl.load(y + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, rounded_to_bf16(number * prob, HARDWARE), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _weigh_backward(
    dy, y, probs, out, dprobs, num_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HARDWARE: tl.constexpr
):
    """Program i computes rows [ROWS i, ROWS (i + 1)). ``out``: the gradient of y."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    prob = tl.load(probs + row, mask=row < num_rows, other=0.0)[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        inside = (row < num_rows)[:, None] & (column < width)
        place = row[:, None] * width + column
        grad = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        total += grad * tl.load(y + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + place, rounded_to_bf16(grad * prob, HARDWARE), mask=inside)
    tl.store(dprobs + row, tl.sum(total, axis=1), mask=row < num_rows)


def _run(kernel: Any, *tensors: Tensor, num_rows: int, width: int, whole_rows: bool = False) -> None:
    if not num_rows:
        return
    blocks = 1 if whole_rows else triton.cdiv(width, _TILE["COLUMNS"])
    with torch.cuda.device_of(tensors[0]):
        kernel[(triton.cdiv(num_rows, _TILE["ROWS"]) * blocks,)](*tensors, num_rows, width, **_TILE)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_T2F: Tensor) -> Tensor:
        num_rows, width = h_T2F.shape[0], h_T2F.shape[1] // 2
        ctx.save_for_backward(h_T2F)
        out = h_T2F.new_empty(num_rows, width)
        _run(_swiglu, h_T2F, out, num_rows=num_rows, width=width)
        return out

    @staticmethod
    def backward(ctx: Any, dy_TF: Tensor) -> Tensor:
        (h_T2F,) = ctx.saved_tensors
        dh_T2F = torch.empty_like(h_T2F)
        _run(_swiglu_backward, dy_TF.contiguous(), h_T2F, dh_T2F, num_rows=dy_TF.shape[0], width=dy_TF.shape[1])
        return dh_T2F


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_TH: Tensor, probs_T: Tensor) -> Tensor:
        ctx.save_for_backward(y_TH, probs_T)
        out = torch.empty_like(y_TH)
        _run(_weigh, y_TH, probs_T, out, num_rows=y_TH.shape[0], width=y_TH.shape[1])
        return out

    @staticmethod
    def backward(ctx: Any, dy_TH: Tensor) -> tuple[Tensor, Tensor]:
        y_TH, probs_T = ctx.saved_tensors
        out, dprobs_T = torch.empty_like(y_TH), torch.empty_like(probs_T)
        sizes = {"num_rows": y_TH.shape[0], "width": y_TH.shape[1]}
        _run(_weigh_backward, dy_TH.contiguous(), y_TH, probs_T, out, dprobs_T, **sizes, whole_rows=True)
        return out, dprobs_T


def swiglu(h_T2F: Tensor) -> Tensor:
    """silu(gate) * up of BF16 [T, 2F], each rounded: [T, F]. Differentiable."""
    return _Swiglu.apply(h_T2F.contiguous())


def weighted(y_TH: Tensor, probs_T: Tensor) -> Tensor:
    """BF16 [T, H] times float [T], rounded once. Differentiable in both."""
    return _Weighted.apply(y_TH.contiguous(), probs_T.float().contiguous())
