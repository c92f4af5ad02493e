"""Queries, keys and values rounded to E4M3 as an engine with an FP8 KV cache reads them.

Inputs are tensors after rotary embedding. vLLM divides keys and values by their scale and multiplies queries by the
reciprocal of theirs. Both are exact for the powers of two of ``trainer/kv_scales.py``. So the only rounding is that to
E4M3 (to nearest, saturating at 448).
"""

import torch
from torch import Tensor

from megatron_fp8rl.kernels.types import E4M3_MAX


def to_cache(x: Tensor, scale: Tensor | float) -> Tensor:
    """E4M3, in the shape of x: x / scale."""
    return (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def as_cached(x: Tensor, scale: Tensor) -> Tensor:
    """x rounded to E4M3 times ``scale``, a power of two, in the dtype of x; the gradient is straight-through."""
    return _AsCached.apply(x, scale)


class _AsCached(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, scale: Tensor) -> Tensor:
        return (to_cache(x, scale).float() * scale).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
