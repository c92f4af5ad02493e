"""Accumulate weight gradients directly in Megatron-Core's buffers (``main_grad``).

Code that accumulates there marks the parameter (``grad_added_to_main_grad``) and returns a placeholder to autograd that
is never read. Parameters with ``gradients_ready(parameters)`` need not be autograd inputs (trainer/compat/megatron.py).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def is_fused(weight: Tensor) -> bool:
    return hasattr(weight, "grad_added_to_main_grad") and getattr(weight, "main_grad", None) is not None


def no_gradients(weights: Sequence[Tensor]) -> list[Tensor]:
    """Gradients to return to autograd for weights of one shape that are already accumulated, or are zero.

    Megatron-Core's hook requires them when reductions overlap with backward, and discards them: all share uninitialized
    memory. It is not expanded from a scalar, because autograd would then keep a full copy per weight.
    """
    if not is_fused(weights[0]):
        return [torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device) for weight in weights]
    for weight in weights:
        weight.grad_added_to_main_grad = True
    like = weights[0]  # may be an FP8 tensor; gradients are plain tensors
    unused = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    return [unused.detach() for _ in weights]


def add_gradient(
    weight: Tensor, add: Callable[[Tensor], None], block_rows: Tensor | None = None, *, is_shared: bool = False
) -> Tensor:
    """Let ``add`` accumulate dW [N, K] in contiguous FP32, in ``main_grad`` if it is; returns autograd's gradient.

    ``block_rows`` int64 [N]: row i of dW from ``add`` belongs to row ``block_rows[i]`` of the weight. ``is_shared``:
    autograd adds another gradient of the weight to this one, so that neither may be a placeholder.
    """
    fused = is_fused(weight) and not is_shared
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
