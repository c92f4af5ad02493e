"""Weight gradients in Megatron-Core's buffers: ``main_grad`` of a parameter, which products add to by themselves.

Whoever adds there marks the parameter (``grad_added_to_main_grad``), as Megatron-Core's own linears do, and gives
autograd something that nobody reads. Of many parameters autograd need not know at all, if the owner of their buffers
has given them a function to be told of them in one call, ``gradients_ready(parameters)``: see trainer/optimizer/optimizer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def is_fused(weight: Tensor) -> bool:
    """Whether the gradient of a parameter belongs into a buffer of Megatron-Core."""
    return hasattr(weight, "grad_added_to_main_grad") and getattr(weight, "main_grad", None) is not None


def no_gradients(weights: Sequence[Tensor]) -> list[Tensor]:
    """What autograd gets for weights of one shape whose gradients are where they belong, or are zero.

    Megatron-Core's hook wants to see gradients when reductions overlap with backward, and throws them away: all are the
    same uninitialized memory. It is not expanded from one number, of which autograd would keep a full copy per weight.
    """
    if not is_fused(weights[0]):
        return [torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device) for weight in weights]
    for weight in weights:
        weight.grad_added_to_main_grad = True
    like = weights[0]  # which may be FP8 itself; gradients are plain
    unused = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    return [unused.detach() for _ in weights]


def add_gradient(weight: Tensor, add: Callable[[Tensor], None], block_rows: Tensor | None = None) -> Tensor:
    """Let ``add`` add dW to float32 memory [N, K], contiguous: the weight's ``main_grad`` where it is that. Returns
    what autograd gets.

    ``block_rows`` int64 [N]: row i of what ``add`` adds belongs to row ``block_rows[i]`` of the weight.
    """
    fused = is_fused(weight)
    if fused and block_rows is None and weight.main_grad.dtype == torch.float32 and weight.main_grad.is_contiguous():
        add(weight.main_grad)
        return no_gradients([weight])[0]
    dw = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    add(dw)
    if not fused:
        return (dw if block_rows is None else dw[block_rows.argsort()]).to(weight.dtype)
    dw = dw.to(weight.main_grad.dtype)
    if block_rows is None:
        weight.main_grad.add_(dw)
    else:
        weight.main_grad.index_add_(0, block_rows, dw)
    return no_gradients([weight])[0]
