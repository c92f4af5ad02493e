"""Queries, keys and values rounded to E4M3 as an engine with an FP8 KV cache reads them.

In: tensors after rotary embedding and a scale per tensor. Out: what the cache holds, or the same values in the dtype of
the input, with the gradient passed straight through. Runs on trainer ranks, and in engines on a CPU.

vLLM divides keys and values by their scale and multiplies queries by the reciprocal of theirs; for the powers of two of
``trainer/kv_scales.py`` both are exact, so the only rounding is that to E4M3 (to nearest, saturating at 448).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fp8rl.kernels.types import E4M3_MAX


def to_cache(x: Tensor, scale: Tensor | float) -> Tensor:
    """E4M3, in the shape of x: x / scale."""
    return (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def as_cached(x: Tensor, scale: Tensor) -> Tensor:
    """x in its own dtype, rounded to multiples that E4M3 times ``scale``, a power of two, can hold.

    The gradient of x is that of the result, also where it saturates.
    """
    return _AsCached.apply(x, scale)


class _AsCached(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, scale: Tensor) -> Tensor:
        return (to_cache(x, scale).float() * scale).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
