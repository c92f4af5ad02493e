"""Latent attention in the absorbed form, the one function of exact runs: decoding, prompts and the trainer's forward.

The latent vector c of a token, after its norm, and its rotated part r are key and value of all heads. With the rows U
(keys) and V (values) of ``kv_b_proj`` that belong to a head:

    absorbed    softmax(scale (rounded(q U) . c + q' . r)) c, rounded, times V, rounded       a cache of c and r
    expanded    softmax(scale (q . rounded(U c) + q' . r)) rounded(V c), rounded              a cache of keys and values

The two are equal without rounding. U and V are ``kv_b_proj`` as quantized, dequantized again; their inputs are BF16.
``docs/precision.md`` compares the costs.

Shapes: T = tokens, H = heads of this rank, K = key features without the rotated ones, V = value features, L = features
of the latent vector.
"""

import torch
from torch import Tensor

from megatron_fp8rl.kernels import float64

NORM_EPS = 1e-6  # of the latent norms: the published models' code does not pass the model's eps on


def absorb(query_THK: Tensor, weight: Tensor) -> Tensor:
    """[T, H, L]: queries times the keys' rows of ``weight`` [H * (K + V), L]."""
    num_heads, size = query_THK.shape[1:]
    return _by_head(query_THK, weight.unflatten(0, (num_heads, -1))[:, :size])


def project_up(out_THL: Tensor, weight: Tensor, size: int) -> Tensor:
    """[T, H, V]: mixed latent vectors times the values' rows of ``weight`` [H * (K + V), L]; ``size`` is V."""
    rows_HVL = weight.unflatten(0, (out_THL.shape[1], -1))[:, -size:]
    return _by_head(out_THL, rows_HVL.transpose(1, 2))


def _by_head(x_THK: Tensor, matrices_HKN: Tensor) -> Tensor:
    if x_THK.is_cuda:
        from megatron_fp8rl.kernels.triton.latent import by_head

        return by_head(x_THK, matrices_HKN)
    return torch.stack([float64.matmul(x, matrix) for x, matrix in zip(x_THK.unbind(1), matrices_HKN)], dim=1)
