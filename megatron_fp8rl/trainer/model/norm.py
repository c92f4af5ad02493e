"""RMSNorm on a GPU as in the engine: computed in FP32, rounded once after the weight.

Forward uses Transformer Engine's kernel, or a kernel with a batch-invariant engine's summation order; backward always
uses Transformer Engine's.
"""

from __future__ import annotations

from typing import Any

import torch
import transformer_engine.pytorch  # noqa: F401  (loads the libraries that the bindings need)
import transformer_engine_torch as tex
from torch import Tensor
from transformer_engine.pytorch.constants import TE_DType

from megatron_fp8rl.upstream import patches


@patches(
    "transformer-engine",
    ">=2.16,<2.17",
    why="calls the bindings tex.rmsnorm_fwd and tex.rmsnorm_bwd, whose signatures are not stable",
    remove_when="transformer_engine.pytorch has a functional RMSNorm",
)
class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, match_engine: bool) -> Tensor:
        x_TH = x.reshape(-1, x.shape[-1]).contiguous()
        if match_engine:
            from megatron_fp8rl.kernels.triton import batch_invariant

            y, rsigma_T = batch_invariant.rms_norm(x_TH, weight, eps)
        else:
            y, _, rsigma_T = tex.rmsnorm_fwd(x_TH, weight, eps, None, None, TE_DType[x.dtype], 0, False)
        ctx.save_for_backward(x_TH, weight, rsigma_T)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        x_TH, weight, rsigma_T = ctx.saved_tensors
        dx, dweight = tex.rmsnorm_bwd(grad.reshape(x_TH.shape).contiguous(), x_TH, rsigma_T, weight, 0, False)
        return dx.view(grad.shape), dweight, None, None


def te_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H] over the root mean square of its last axis, times weight [H], in the dtype of x."""
    return _RmsNorm.apply(x, weight, eps, False)


def batch_invariant_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm bitwise equal to an engine under ``rollout.batch_invariant``; BF16 only."""
    return _RmsNorm.apply(x, weight, eps, True)
