"""What kernels in Triton share: rounding to BF16, which Triton's interpreter does by cutting off."""

from __future__ import annotations

import os

import triton
import triton.language as tl

from megatron_fp8rl.kernels.triton.quantize import _INFINITY_BITS

HARDWARE = os.environ.get("TRITON_INTERPRET") != "1"  # a GPU runs the kernels, not the interpreter


@triton.jit
def rounded_to_bf16(x, HARDWARE: tl.constexpr):
    """The BF16 numbers nearest to float32 ``x``, ties to even."""
    if HARDWARE:
        return x.to(tl.bfloat16)
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return tl.where((bits & 0x7FFFFFFF) > _INFINITY_BITS, x, rounded).to(tl.bfloat16)
