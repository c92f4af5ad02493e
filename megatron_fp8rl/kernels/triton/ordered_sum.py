"""The sum of BF16 parts in FP32, from the first to the last, rounded once: ``kernels/ordered_sum.py`` on a GPU.

Bitwise equal to torch. Not measured on GPUs yet.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp8rl.kernels.triton.bits import HARDWARE, rounded_to_bf16

_ELEMENTS = 2048  # of one program


@triton.jit(do_not_specialize=["size"])
def _add(parts, out, size, PARTS: tl.constexpr, ELEMENTS: tl.constexpr, HARDWARE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = place < size
    total = tl.load(parts + place, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * size.to(tl.int64) + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, rounded_to_bf16(total, HARDWARE), mask=inside)


def add_in_order(parts: Tensor) -> Tensor:
    """BF16 [...] from contiguous BF16 parts [P, ...]."""
    out = torch.empty_like(parts[0])
    _add[(triton.cdiv(out.numel(), _ELEMENTS),)](
        parts, out, out.numel(), PARTS=len(parts), ELEMENTS=_ELEMENTS, HARDWARE=HARDWARE
    )
    return out
