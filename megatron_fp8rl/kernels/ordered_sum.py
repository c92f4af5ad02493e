"""Sums of the partial products of several ranks in one fixed order, so that every layout gets the same bits.

Each part is rounded to the dtype of the result by its product. Parts are added in FP32 from the first to the last, and
the sum is rounded once. For two BF16 parts this is their BF16 sum.
"""

import torch
from torch import Tensor

from megatron_fp8rl.kernels.backend import runs_triton


def add_in_order(parts: Tensor) -> Tensor:
    """[...] in the dtype of parts [P, ...]: their sum in FP32 (FP64 parts: FP64) in the order of the first axis."""
    if runs_triton(parts) and parts.dtype == torch.bfloat16 and parts[0].numel():
        from megatron_fp8rl.kernels.triton import ordered_sum  # imports Triton

        return ordered_sum.add_in_order(parts.contiguous())
    total = parts[0].to(torch.promote_types(parts.dtype, torch.float32))
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)
