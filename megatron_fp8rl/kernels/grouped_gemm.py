"""Products of all experts in one kernel: DeepGEMM's and ours on Hopper, the same products in torch on a CPU.

    product             kernel                                operands                        result
    y  = x W^T          m_grouped_*_gemm_nt_contiguous        x in rows, W in rows            BF16 [P, N]
    dx = g W            m_grouped_*_gemm_nt_contiguous        g in rows, W transposed         BF16 [P, K]
    to tokens (FP8)     cuda/products.cu                      either of these                 BF16 [T, N] or [T, K]
    dW += g^T x (FP8)   cuda/weight_gradients.cu              g, x in columns                 FP32 [E, N, K]
    dW += g^T x (BF16)  k_grouped_bf16_gemm_tn_contiguous     g, x in rows                    FP32 [E, N, K]

DeepGEMM's are the kernels that vLLM's experts run on, so the forward pass computes the engine's numbers: a row has the
same bits whatever rows are computed beside it. FP8 products accumulate in float32 after every 128 terms.

An expert's rows begin at multiples of 128 (``expert_kernels.Layout``); rows that fill an expert up hold zeros, which
add nothing to a product. DeepGEMM compiles a kernel the first time that a shape of weights is multiplied, for seconds,
and keeps it in DG_JIT_CACHE_DIR, by default where vLLM's engines keep theirs.

Shapes: P = rows of all experts with those that fill them up, E = experts of this rank, N = output features, K = input
features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fp8rl.kernels.blockwise import (
    BLOCK,
    Scales,
    dequantize_activation,
    dequantize_weight,
    operand_dtype,
    quantize_weight,
)
from megatron_fp8rl.kernels.cuda import hopper
from megatron_fp8rl.kernels.deep_gemm import deep_gemm
from megatron_fp8rl.kernels.fused_moe import Layout, unpermute
from megatron_fp8rl.kernels.fused_moe_torch import swizzled


class Fp8(NamedTuple):
    """E4M3 numbers and the float32 scales of their blocks.

    Tokens in rows:    data [P, K], scale [P, K/128] with strides (1, P)      blocks of 1x128
    Tokens in columns: data [P/128, K, 128], swizzled, scale [P/128, K]       blocks of 128x1 (expert_kernels.py)
    Weights:           data [E, N, K], scale [E, N/128, K/128]                blocks of 128x128
    """

    data: Tensor
    scale: Tensor

    def transposed(self) -> Fp8:
        """Weights [E, N, K] -> [E, K, N]: the same bytes, moved, and a view of the same scales."""
        if self.data.is_cuda:
            from megatron_fp8rl.kernels.triton import quantize  # imports Triton

            data_EKN = quantize.transposed(self.data)
        else:
            data_EKN = self.data.view(torch.uint8).transpose(1, 2).contiguous().view(self.data.dtype)
        return Fp8(data_EKN, self.scale.transpose(1, 2))


def quantized(weights_ENK: Tensor, scales: Scales) -> Fp8:
    """Weights [E, N, K], N a multiple of 128, in one launch: no block lies in two matrices."""
    num_experts, num_rows, num_columns = weights_ENK.shape
    if weights_ENK.is_cuda:
        from megatron_fp8rl.kernels.triton import quantize_weights  # imports Triton

        if quantize_weights.can_quantize(weights_ENK):
            return Fp8(*quantize_weights.quantize_weights(weights_ENK, scales))
    data, scale = quantize_weight(weights_ENK.view(-1, num_columns), scales)
    return Fp8(data.view(weights_ENK.shape), scale.view(num_experts, num_rows // BLOCK, -1))


def multiply_fp8(x: Fp8, weights: Fp8, layout: Layout, dtype: torch.dtype) -> Tensor:
    """x [P, K] times each expert's W [N, K]: [P, N] in ``dtype``, which on a GPU is bfloat16."""
    num_rows, num_columns = x.data.shape[0], weights.data.shape[1]
    if not x.data.is_cuda:
        operands = exact_dtype(x, weights, dtype)
        return _emulated_product(_restored_rows(x, operands), _restored_weights(weights, operands), layout).to(dtype)
    out = torch.empty(num_rows, num_columns, dtype=dtype, device=x.data.device)
    # Hopper's kernels take float32 scales as they are; the last argument says so for other GPUs.
    deep_gemm().m_grouped_fp8_gemm_nt_contiguous(
        tuple(x), tuple(weights), out, layout.experts, disable_ue8m0_cast=True
    )
    return out


def multiply_fp8_to_tokens(x: Fp8, weights: Fp8, layout: Layout, probs: Tensor | None = None) -> Tensor:
    """BF16 [T, N]: what :func:`multiply_fp8` and ``expert_kernels.unpermute`` make, bit for bit."""
    if not hopper.is_hopper(x.data.device):
        return unpermute(multiply_fp8(x, weights, layout, torch.bfloat16), layout, probs)
    create = torch.empty if layout.has_all_tokens else torch.zeros
    out = create(layout.num_tokens, weights.data.shape[1], dtype=torch.bfloat16, device=x.data.device)
    if layout.num_rows:
        hopper.multiply_rows(*x, *weights, layout.offsets, layout.experts, out, layout.rows, probs)
    return out


def multiply(x_PK: Tensor, weights_ENK: Tensor, layout: Layout) -> Tensor:
    """x [P, K] times each expert's W [N, K]: [P, N]. ``weights_ENK`` may be the transposed view of [E, K, N]."""
    if not x_PK.is_cuda:
        return _emulated_product(x_PK, weights_ENK, layout)
    out = torch.empty(x_PK.shape[0], weights_ENK.shape[1], dtype=x_PK.dtype, device=x_PK.device)
    deep_gemm().m_grouped_bf16_gemm_nt_contiguous(x_PK, weights_ENK, out, layout.experts)
    return out


def add_weight_gradients_fp8(grad: Fp8, x: Fp8, layout: Layout, out_ENK: Tensor) -> None:
    """Add g^T x of each expert to ``out_ENK`` float32 [E, N, K], contiguous; g and x are in columns."""
    if not layout.num_rows:
        return
    if not out_ENK.is_cuda:
        _emulated_gradients(_restored_columns(grad, layout), _restored_columns(x, layout), out_ENK)
        return
    hopper.add_weight_gradients(*grad, *x, layout.offsets, out_ENK)


def add_weight_gradients(grad_PN: Tensor, x_PK: Tensor, layout: Layout, out_ENK: Tensor) -> None:
    """Add g^T x of each expert to ``out_ENK`` float32 [E, N, K], contiguous; g [P, N] and x [P, K]."""
    if not layout.num_rows:
        return
    if not out_ENK.is_cuda:
        columns = ([part.float().t() for part in rows.split(layout.host_counts)] for rows in (grad_PN, x_PK))
        _emulated_gradients(*columns, out_ENK)
        return
    deep_gemm().k_grouped_bf16_gemm_tn_contiguous(
        grad_PN, x_PK, out_ENK, layout.host_counts, layout.padded_counts, out_ENK
    )


def exact_dtype(x: Fp8, weights: Fp8, dtype: torch.dtype) -> torch.dtype:
    """The type in which ``precision/recipes.py`` multiplies: an E4M3 number times a power of two is a BF16 number."""
    is_pow2 = all(not (operand.scale.contiguous().view(torch.int32) & 0x7FFFFF).any() for operand in (x, weights))
    return operand_dtype(dtype, "pow2" if is_pow2 else "fp32")


def _restored_rows(x: Fp8, dtype: torch.dtype) -> Tensor:
    return dequantize_activation(x.data, x.scale).to(dtype)


def _restored_weights(weights: Fp8, dtype: torch.dtype) -> Tensor:
    parts = [dequantize_weight(data, scale) for data, scale in zip(weights.data, weights.scale)]
    return torch.stack(parts).to(dtype)


def _restored_columns(x: Fp8, layout: Layout) -> list[Tensor]:
    """Each expert's matrix [K, its rows], float32."""
    numbers = swizzled(x.data).float() * x.scale[..., None]
    blocks = [rows // BLOCK for rows in layout.host_counts]
    return [part.transpose(0, 1).flatten(1) for part in numbers[: sum(blocks)].split(blocks)]


def _emulated_product(x_PK: Tensor, weights_ENK: Tensor, layout: Layout) -> Tensor:
    parts = zip(x_PK.split(layout.host_counts), weights_ENK)
    return torch.cat([torch.mm(rows, matrix.t()) for rows, matrix in parts])


def _emulated_gradients(grads: list[Tensor], inputs: list[Tensor], out_ENK: Tensor) -> None:
    """Add each expert's [N, its rows] times [K, its rows] transposed."""
    for grad, x, out in zip(grads, inputs, out_ENK):
        out.addmm_(grad, x.t())
