"""RMSNorm on Transformer Engine's kernel, rounded as ``linears.RMSNorm`` on a CPU."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformer_engine.pytorch  # noqa: F401  (loads the libraries that the bindings need)
import transformer_engine_torch as tex
from torch import Tensor
from transformer_engine.pytorch.constants import TE_DType


@functools.lru_cache(maxsize=64)
def _ones(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(size, dtype=dtype, device=device)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x_TH = x.reshape(-1, x.shape[-1]).contiguous()
        ones_H = _ones(weight.numel(), weight.dtype, weight.device)
        y, _, rsigma_T = tex.rmsnorm_fwd(x_TH, ones_H, eps, None, None, TE_DType[x.dtype], 0, False)
        ctx.save_for_backward(x_TH, weight, rsigma_T)
        return y.mul_(weight).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        x_TH, weight, rsigma_T = ctx.saved_tensors
        dx, dweight = tex.rmsnorm_bwd(grad.reshape(x_TH.shape).contiguous(), x_TH, rsigma_T, weight, 0, False)
        return dx.view(grad.shape), dweight, None


def te_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H] over the root mean square of its last axis, in the type of x, times weight [H].

    Gradients pass the rounding in between unchanged.
    """
    return _RmsNorm.apply(x, weight, eps)
