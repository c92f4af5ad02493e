"""Operations of a forward pass on a CPU: accumulated in float64 and rounded once, so that trainer and engine agree.

On a CPU the order of a sum depends on the shapes. In float32, decoding one token and a packed microbatch then differ in
the last bits, and a router may choose another expert. In float64 the difference is 2^-29 times as large. Results
rounded once are equal, unless a sum is that close to the midpoint of two BF16 values. Products of E4M3 blocks with
power-of-two scales are exact. ``rounded_products.py`` gets the same results of BF16 matrices sooner. On a GPU
``batch_invariant.py`` fixes the order; :func:`matmul` is torch's.

Shapes: M, K, N = dimensions of a product; T = tokens, H = hidden size, Q = query heads, G = key and value heads, D =
features of a query or key head, V = of a value head.
"""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_fp8rl.kernels import c_code, rounded_products


def matmul(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """[M, N] in the dtype of a; b may be float64 already."""
    if a_MK.is_cuda:
        return torch.mm(a_MK, b_KN)
    is_recorded = torch.is_grad_enabled() and (a_MK.requires_grad or b_KN.requires_grad)
    if not is_recorded and (product := rounded_products.multiply(a_MK, b_KN)) is not None:
        return product
    return torch.mm(a_MK.double(), b_KN.double()).to(a_MK.dtype)


def rms_norm(x: Tensor, weight_H: Tensor, eps: float, over_ranks: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """x [..., H] over the root mean square of its last axis, rounded to the dtype of x, times the weight.
    ``over_ranks``: the mean over ranks that have other features of the same axis."""
    if over_ranks is None and _is_compiled(x, weight_H) and (library := c_code.library("rows")) is not None:
        x_TH = x.flatten(0, -2)
        x_TH = x_TH if x_TH.stride(-1) == 1 else x_TH.contiguous()
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        sizes = map(ctypes.c_ssize_t, (len(x_TH), x_TH.stride(0), x.shape[-1]))
        library.rms_norm(*map(c_code.pointer, (x_TH, weight_H, out)), *sizes, ctypes.c_double(eps))
        return out
    wide = x.double()
    mean = wide.square().mean(dim=-1, keepdim=True)
    mean = mean if over_ranks is None else over_ranks(mean)
    return (wide * torch.rsqrt(mean + eps)).to(x.dtype) * weight_H


def _is_compiled(x: Tensor, weight_H: Tensor) -> bool:
    """Whether ``rows.c`` takes these tensors: it has no gradient."""
    is_recorded = torch.is_grad_enabled() and (x.requires_grad or weight_H.requires_grad)
    is_bf16 = x.dtype == weight_H.dtype == torch.bfloat16 and x.device.type == "cpu"
    return is_bf16 and not is_recorded and x.dim() > 1 and weight_H.shape == x.shape[-1:] and weight_H.is_contiguous()


def zero_centred_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x [..., H] over the root mean square of its last axis, times 1 + weight, rounded once to the dtype of x."""
    wide = x.double()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * (1 + weight_H.double())).to(x.dtype)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotary embedding of pairs (i, i + R / 2) of x [..., R] in float32, rounded once to the dtype of x."""
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)


def combine(outputs_TKH: Tensor, weights_TK: Tensor) -> Tensor:
    """[T, H]: the sum of each token's K expert outputs times float32 weights, rounded once to their dtype."""
    return torch.einsum("tkh,tk->th", outputs_TKH.double(), weights_TK.double()).to(outputs_TKH.dtype)


def attend(
    query_BTQD: Tensor,
    key_BSGD: Tensor,
    value_BSGV: Tensor,
    mask_BTS: Tensor,
    scale: float,
    sinks_Q: Tensor | None = None,
) -> Tensor:
    """[B, T, Q, V] in the dtype of the query: attention of T queries over S keys where the mask is true. ``sinks_Q``: a
    score of each head that takes its share of the softmax and has no value. Differentiable."""
    groups, wide = key_BSGD.shape[2], torch.float64 if query_BTQD.device.type == "cpu" else torch.float32
    query = query_BTQD.to(wide).unflatten(2, (groups, -1))
    scores = torch.einsum("btghd,bsgd->bghts", query, key_BSGD.to(wide)).mul_(scale)
    scores = scores.masked_fill_(~mask_BTS[:, None, None], -torch.inf)
    if sinks_Q is not None:
        sinks = sinks_Q.to(wide).view(1, groups, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    shares = scores.softmax(dim=-1)[..., : key_BSGD.shape[1]]
    return torch.einsum("bghts,bsgv->btghv", shares, value_BSGV.to(wide)).flatten(2, 3).to(query_BTQD.dtype)


def clamped_swiglu(gate_up: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """gpt-oss's activation of [T, 2 F], rounded once: (up + 1) gate sigmoid(alpha gate) of clamped gate and up."""
    wide = torch.float64 if gate_up.device.type == "cpu" else torch.float32
    gate, up = gate_up.to(wide).chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(alpha * gate)).to(gate_up.dtype)
