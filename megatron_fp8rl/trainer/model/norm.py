"""RMSNorm on a GPU as in the engine: computed in FP32, rounded once after the weight.

Forward is Transformer Engine's kernel, or that of a batch-invariant engine (``kernels/triton/norm.py``). Backward is
always Transformer Engine's. A norm at the start of a layer's branch also returns its input, the residual stream.
Backward then adds the stream's gradient in FP32, which saves one pass over memory.
"""

from typing import Any

import torch
import transformer_engine.pytorch  # noqa: F401  (loads the libraries that the bindings need)
import transformer_engine_torch as tex
from torch import Tensor
from transformer_engine.pytorch.constants import TE_DType

from megatron_fp8rl.upstream import patches


@patches(
    "transformer-engine",
    why="calls the bindings tex.rmsnorm_fwd, tex.rmsnorm_bwd and tex.rmsnorm_bwd_add, whose signatures are not stable",
    remove_when="transformer_engine.pytorch has a functional RMSNorm",
)
class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, match_engine: bool, with_input: bool, zero_centred: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        x_TH = x.reshape(-1, x.shape[-1]).contiguous()
        if match_engine:
            from megatron_fp8rl.kernels.triton import norm

            y, rsigma_T = norm.rms_norm(x_TH, norm.one_plus(weight) if zero_centred else weight, eps)
        else:
            y, _, rsigma_T = tex.rmsnorm_fwd(x_TH, weight, eps, None, None, TE_DType[x.dtype], 0, zero_centred)
        ctx.save_for_backward(x_TH, weight, rsigma_T)
        ctx.zero_centred = zero_centred
        ctx.set_materialize_grads(False)
        return (y.view(x.shape), x) if with_input else y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, of_stream: Tensor | None = None) -> tuple:
        x_TH, weight, rsigma_T = ctx.saved_tensors
        if grad is None:
            return of_stream, None, None, None, None, None
        grad_TH = grad.reshape(x_TH.shape).contiguous()
        if of_stream is None:
            dx, dweight = tex.rmsnorm_bwd(grad_TH, x_TH, rsigma_T, weight, 0, ctx.zero_centred)
        else:
            add_TH = of_stream.reshape(x_TH.shape).contiguous()
            dx, dweight = tex.rmsnorm_bwd_add(grad_TH, x_TH, add_TH, rsigma_T, weight, 0, ctx.zero_centred)
        return dx.view(grad.shape), dweight, None, None, None, None


def te_rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, with_input: bool = False, zero_centred: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """x [..., H] over the root mean square of its last axis, times weight [H], in the dtype of x.

    ``with_input``: also return x, for the residual stream. ``zero_centred``: multiply by 1 + weight."""
    return _RmsNorm.apply(x, weight, eps, False, with_input, zero_centred)


def batch_invariant_rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, with_input: bool = False, zero_centred: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm bitwise equal to an engine under ``engine.batch_invariant``; BF16 only. Options as above."""
    return _RmsNorm.apply(x, weight, eps, True, with_input, zero_centred)
