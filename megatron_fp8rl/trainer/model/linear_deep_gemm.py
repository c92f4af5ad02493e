"""Dense linears and MLPs on DeepGEMM in blockwise FP8, with fused quantization.

Wgrad GEMMs accumulate directly in Megatron-Core's FP32 gradient buffer. A matrix is read once and quantized rowwise,
for fprop and dgrad, and columnwise, for wgrad. Only the columnwise FP8 data is kept for backward.

    linear    x, quantized -> y                           g, quantized -> dx;  dW += g^T x
    mlp       x, quantized -> fc1 -> h -> SwiGLU,         g, quantized -> fc2 -> da -> SwiGLU backward with h: dh and
              quantized -> fc2 -> y                       a, quantized -> fc1 -> dx;  dW2 += g^T a;  dW1 += dh^T x

``mlp`` equals two linears with SwiGLU between them, without writing fc2's input in BF16; only h is kept.
``fused_moe.py`` quantizes, with num_experts = 1; ``gemm.py`` multiplies. On a CPU both use torch and round equally.

Weights are quantized once per optimizer step; the first backward pass transposes them. NaN or infinity turns its whole
block into NaN, and every output that depends on the block.

Shapes: T = tokens, P = tokens padded with zeros to a multiple of 128, N = output features, K = input features, H =
hidden size, F = features between the two linears of an MLP on this rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fp8rl.kernels.fused_moe import (
    expert_permutation,
    permute_quantize,
    swiglu_backward_quantize,
    swiglu_quantize,
)
from megatron_fp8rl.kernels.gemm import Fp8, add_dense_weight_gradient, multiply_dense, quantized
from megatron_fp8rl.kernels.types import BLOCK, ExpertPermutation, Quantized
from megatron_fp8rl.precision.formats import QuantFormat
from megatron_fp8rl.trainer.model.weight_cache import WeightCache
from megatron_fp8rl.trainer.optimizer.grad_buffers import add_gradient, no_gradients


@dataclass(frozen=True)
class Matrix:
    """A parameter [N, K] and its quantization settings. Zeros fill the last block of rows, if it is partial."""

    weight: Tensor
    fmt: QuantFormat
    cache: WeightCache
    block_rows: Tensor | None = None  # int64 [N] row order in which blocks are formed; None for the order of the weight

    @property
    def num_zeros(self) -> int:
        return -self.weight.shape[0] % BLOCK

    def quantized(self) -> _Quantized:
        return self.cache.get([self.weight], lambda: _Quantized(self))


class _Quantized:
    def __init__(self, matrix: Matrix):
        weight_NK = matrix.weight.detach()
        weight_NK = weight_NK if matrix.block_rows is None else weight_NK[matrix.block_rows]
        weight_NK = F.pad(weight_NK, (0, 0, 0, matrix.num_zeros)) if matrix.num_zeros else weight_NK
        self.rows = Fp8(*(part[0] for part in quantized(weight_NK.unsqueeze(0), matrix.fmt)))
        self._transposed: Fp8 | None = None

    def transposed(self) -> Fp8:
        """[K, N], for dgrad; made by the first backward pass, when activations start to be freed."""
        if self._transposed is None:
            self._transposed = _first(Fp8(*(part.unsqueeze(0) for part in self.rows)).transposed())
        return self._transposed


def _first(transposed: Fp8) -> Fp8:
    return Fp8(transposed.data[0], transposed.scale[0].contiguous())


def linear(x_TK: Tensor, matrix: Matrix) -> Tensor:
    """y BF16 [T, N] = x W^T for BF16 x, differentiable in x and the weight."""
    return _Linear.apply(x_TK, matrix.weight, matrix, torch.is_grad_enabled())


def mlp(x_TH: Tensor, fc1: Matrix, fc2: Matrix) -> Tensor:
    """y BF16 [T, H] = (silu(x Wg^T) * (x Wu^T)) Wd^T for BF16 x, differentiable in x and both weights. ``fc1`` [2F, H]
    holds Wg before Wu, ``fc2`` [H, F] is Wd; neither may have ``block_rows``."""
    return _Mlp.apply(x_TH, fc1.weight, fc2.weight, fc1, fc2, torch.is_grad_enabled())


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight: Tensor, matrix: Matrix, record: bool) -> Tensor:
        num_tokens = x_TK.shape[0]
        ctx.matrix, ctx.num_tokens, ctx.x, ctx.w = matrix, num_tokens, None, None
        if not num_tokens:
            return x_TK.new_empty(0, weight.shape[0])
        needs_dw = record and ctx.needs_input_grad[1]
        x = _quantize(x_TK, matrix.fmt, rows=True, columns=needs_dw)
        w = matrix.quantized()
        y_TN = _multiply(x, w.rows, num_tokens)
        if record:
            ctx.w, ctx.x = w, _columns(x) if needs_dw else None
        if matrix.num_zeros:
            return y_TN[:, : -matrix.num_zeros].contiguous()
        return y_TN if matrix.block_rows is None else y_TN[:, matrix.block_rows.argsort()]

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple:
        matrix, (needs_dx, needs_dw) = ctx.matrix, ctx.needs_input_grad[:2]
        if not ctx.num_tokens:
            dx = grad_TN.new_empty(0, matrix.weight.shape[1]) if needs_dx else None
            return dx, no_gradients([matrix.weight])[0] if needs_dw else None, None, None
        w, x = ctx.w, ctx.x
        ctx.w = ctx.x = None  # frees the memory when this function returns, not when the graph is freed
        if matrix.block_rows is not None:
            grad_TN = grad_TN[:, matrix.block_rows]
        grad_TN = F.pad(grad_TN, (0, matrix.num_zeros)) if matrix.num_zeros else grad_TN
        grad = _quantize(grad_TN, matrix.fmt, rows=needs_dx, columns=needs_dw)
        dw = add_gradient(matrix.weight, _adder(_columns(grad), x), matrix.block_rows) if needs_dw else None
        del x
        dx = _multiply(grad, w.transposed(), ctx.num_tokens) if needs_dx else None
        return dx, dw, None, None


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, w1: Tensor, w2: Tensor, fc1: Matrix, fc2: Matrix, record: bool) -> Tensor:
        num_tokens = x_TH.shape[0]
        ctx.matrices, ctx.num_tokens = (fc1, fc2), num_tokens
        if not num_tokens:
            return torch.zeros_like(x_TH)
        needs_dw = record and any(ctx.needs_input_grad[1:3])
        layout = _layout(num_tokens, x_TH.device)
        made = tuple(matrix.quantized() for matrix in (fc1, fc2))
        x = _quantize(x_TH, fc1.fmt, rows=True, columns=needs_dw)
        h_P2F = multiply_dense(_rows(x), made[0].rows)
        x = _columns(x) if needs_dw else None
        if record:
            # Not save_for_backward, which keeps tensors until backward returns; these attributes are freed once read.
            ctx.made, ctx.x, ctx.h = made, x, h_P2F
        a = swiglu_quantize(h_P2F, layout, fc2.fmt)
        del x, h_P2F
        return _multiply(a, made[1].rows, num_tokens)

    @staticmethod
    def backward(ctx: Any, dy_TH: Tensor) -> tuple:
        (fc1, fc2), num_tokens = ctx.matrices, ctx.num_tokens
        needs_dx, needs_dw = ctx.needs_input_grad[0], any(ctx.needs_input_grad[1:3])
        dw1 = dw2 = None
        if not num_tokens:
            if needs_dw:
                dw1, dw2 = (no_gradients([matrix.weight])[0] for matrix in (fc1, fc2))
            return torch.zeros_like(dy_TH) if needs_dx else None, dw1, dw2, None, None, None
        (made1, made2), x, h_P2F = ctx.made, ctx.x, ctx.h
        ctx.made = ctx.x = ctx.h = None
        dy = _quantize(dy_TH, fc2.fmt, rows=True, columns=needs_dw)
        da_PF = multiply_dense(_rows(dy), made2.transposed())
        dy = _columns(dy) if needs_dw else None
        back = swiglu_backward_quantize(
            da_PF,
            h_P2F,
            _layout(num_tokens, dy_TH.device),
            fc1.fmt,
            rows=needs_dx,
            columns=needs_dw,
            activation_columns=needs_dw,
        )
        del da_PF, h_P2F
        dh, a = back.dh, back.activation
        del back
        if needs_dw:
            dw2 = add_gradient(fc2.weight, _adder(dy, _columns(a)))
            del dy, a
            dw1 = add_gradient(fc1.weight, _adder(_columns(dh), x))
            del x
        dx_TH = _multiply(dh, made1.transposed(), num_tokens) if needs_dx else None
        return dx_TH, dw1, dw2, None, None, None


@functools.lru_cache(maxsize=8)  # passes alternate between a few lengths
def _layout(num_tokens: int, device: torch.device) -> ExpertPermutation:
    """The permutation with all tokens on one expert. Never synchronizes the device."""
    count = torch.full((1,), num_tokens, dtype=torch.int64, device=device)
    return expert_permutation(count, num_tokens, (num_tokens,), in_matrix=True)


def _quantize(x_TK: Tensor, fmt: QuantFormat, *, rows: bool, columns: bool) -> Quantized:
    layout = _layout(x_TK.shape[0], x_TK.device)
    return permute_quantize(x_TK.contiguous(), layout, fmt, rows=rows, columns=columns)


def _rows(x: Quantized) -> Fp8:
    return Fp8(x.rows, x.row_scales)


def _columns(x: Quantized) -> Fp8:
    return Fp8(x.columns, x.column_scales)


def _multiply(x: Quantized, weight: Fp8, num_tokens: int) -> Tensor:
    """BF16 [T, N], without padding. Detached: autograd forbids in-place writes to a view that a function returns."""
    return multiply_dense(_rows(x), weight)[:num_tokens].detach()


def _adder(grad: Fp8, x: Fp8) -> Callable[[Tensor], None]:
    def add(out_NK: Tensor) -> None:
        if not (num_zeros := len(grad.data) - len(out_NK)):
            return add_dense_weight_gradient(grad, x, out_NK)
        padded = F.pad(out_NK, (0, 0, 0, num_zeros))
        add_dense_weight_gradient(grad, x, padded)
        out_NK.copy_(padded[:-num_zeros])

    return add
