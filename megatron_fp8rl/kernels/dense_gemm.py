"""Products of dense linears in blockwise FP8: DeepGEMM's kernels on Hopper, the same products in torch on a CPU.

    product            DeepGEMM                             operands                    result
    y  = x W^T         fp8_gemm_nt, blocks 1x128, 128x128   x in rows, W in rows        BF16 [P, N]
    dx = g W           fp8_gemm_nt, blocks 1x128, 128x128   g in rows, W transposed     BF16 [P, K]
    dW += g^T x        fp8_gemm_nt, blocks 1x128, 1x128     g, x in columns             FP32 [N, K]

The first is the kernel that vLLM's DeepGEMM linears run on, so the forward pass computes the engine's numbers: a row
has the same bits whatever rows are computed beside it. Products accumulate in float32 after every 128 terms. DeepGEMM
compiles a kernel the first time that a weight's shape is multiplied, for seconds; the number of tokens is not compiled
into any of the three, and only chooses among a few sizes of blocks.

Shapes: P = tokens, filled up to a multiple of 128; N = output features and K = input features, multiples of 128.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fp8rl.kernels.blockwise import dequantize_activation, dequantize_weight
from megatron_fp8rl.kernels.deep_gemm import deep_gemm
from megatron_fp8rl.kernels.grouped_gemm import Fp8, exact_dtype

_BOTH_BY_ROWS = (1, 1, 128)  # a block is 1 row and 128 terms of the sum, of the left operand and of the right one


def multiply(x: Fp8, weight: Fp8) -> Tensor:
    """BF16 [P, N]: x [P, K] in rows times W [N, K], whose scales are contiguous."""
    if not _is_on_gpu(x):
        dtype = exact_dtype(x, weight, torch.bfloat16)
        left, right = dequantize_activation(x.data, x.scale), dequantize_weight(weight.data, weight.scale)
        return torch.mm(left.to(dtype), right.to(dtype).t()).bfloat16()
    out = torch.empty(x.data.shape[0], weight.data.shape[0], dtype=torch.bfloat16, device=x.data.device)
    # Hopper's kernels take float32 scales as they are; the last argument says so for other GPUs.
    deep_gemm().fp8_gemm_nt(tuple(x), tuple(weight), out, disable_ue8m0_cast=True)
    return out


def add_weight_gradient(grad: Fp8, x: Fp8, out_NK: Tensor) -> None:
    """Add g^T x to ``out_NK`` float32 [N, K], contiguous.

    g and x are in columns: data [N, P] and [K, P], scales [N, P/128] and [K, P/128] with strides (1, N) and (1, K).
    """
    if not _is_on_gpu(x):
        out_NK.addmm_(dequantize_activation(*grad), dequantize_activation(*x).t())
        return
    # The number of tokens is what is summed over, and shall not have a kernel of its own: m and n are compiled alone.
    deep_gemm().fp8_gemm_nt(
        tuple(grad), tuple(x), out_NK, c=out_NK, recipe=_BOTH_BY_ROWS, compiled_dims="mn", disable_ue8m0_cast=True
    )


def _is_on_gpu(x: Fp8) -> bool:
    return x.data.is_cuda
