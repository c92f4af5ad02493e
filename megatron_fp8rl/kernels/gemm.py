"""Dense and grouped GEMMs in blockwise FP8 and BF16: DeepGEMM and our CUDA, torch on CPU.

    GEMM                 kernel                                operands                     result
    dense
    y  = x W^T           fp8_gemm_nt, 1x128 by 128x128         x rowwise, W rowwise         BF16 [P, N]
    dx = g W             fp8_gemm_nt, 1x128 by 128x128         g rowwise, W transposed      BF16 [P, K]
    dW += g^T x          fp8_gemm_nt, 1x128 by 1x128           g, x columnwise              FP32 [N, K]
    grouped
    y  = x W^T           m_grouped_*_gemm_nt_contiguous        x rowwise, W rowwise         BF16 [P, N]
    dx = g W             m_grouped_*_gemm_nt_contiguous        g rowwise, W transposed      BF16 [P, K]
    to tokens (FP8)      cuda/grouped_gemm_to_tokens.cu        as y or dx                   BF16 [T, N] or [T, K]
    dW += g^T x (FP8)    cuda/grouped_wgrad.cu                 g, x columnwise              FP32 [E, N, K]
    dW += g^T x (BF16)   k_grouped_bf16_gemm_tn_contiguous     g, x rowwise                 FP32 [E, N, K]

vLLM's linears and experts use the same DeepGEMM forward kernels, and a row's result does not depend on other rows. So
the forward pass is bitwise equal to the engine's. FP8 partial sums are promoted to float32 every 128 terms. DeepGEMM
compiles a kernel on the first GEMM with a new weight shape, in seconds. Its cache is DG_JIT_CACHE_DIR, by default that
of vLLM's engines. Padded rows are zero.

Shapes: P = rows with padding (of all experts, or of one dense matrix), a multiple of 128; E = experts of this rank; N =
output features and K = input features, multiples of 128.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megatron_fp8rl.kernels import float64
from megatron_fp8rl.kernels.blockwise import dequantize_activation, dequantize_weight, quantize_weight
from megatron_fp8rl.kernels.cuda import launch
from megatron_fp8rl.kernels.deep_gemm import deep_gemm
from megatron_fp8rl.kernels.fused_moe import unpermute
from megatron_fp8rl.kernels.fused_moe_torch import swizzled
from megatron_fp8rl.kernels.types import BLOCK, ExpertPermutation, block_scales

if TYPE_CHECKING:
    from megatron_fp8rl.precision.formats import QuantFormat

_BOTH_BY_ROWS = (1, 1, 128)  # scale blocks: 1 row of the left operand, 1 of the right, 128 terms of the sum


class Fp8(NamedTuple):
    """E4M3 data and the float32 scales of its blocks.

    Rowwise tokens:    data [P, K], scale [P, K/128] with strides (1, P)      blocks of 1x128
    Columnwise tokens: data [P/128, K, 128], swizzled, scale [P/128, K]       blocks of 128x1 (fused_moe.py)
    Weights:           data [E, N, K], scale [E, N/128, K/128]                blocks of 128x128
    """

    data: Tensor
    scale: Tensor

    def transposed(self) -> Fp8:
        """Weights [E, N, K] -> [E, K, N]: a transposed copy of the bytes and a view of the scales."""
        if self.data.is_cuda:
            from megatron_fp8rl.kernels.triton import quantize  # imports Triton

            data_EKN = quantize.transposed(self.data)
        else:
            data_EKN = self.data.view(torch.uint8).transpose(1, 2).contiguous().view(self.data.dtype)
        return Fp8(data_EKN, self.scale.transpose(1, 2))


def quantized(weights_ENK: Tensor, fmt: QuantFormat) -> Fp8:
    """Quantize weights [E, N, K], N a multiple of 128, in one launch; no block spans two matrices."""
    scales, (num_experts, num_rows, num_columns) = block_scales(fmt), weights_ENK.shape
    if weights_ENK.is_cuda:
        from megatron_fp8rl.kernels.triton import quantize  # imports Triton

        if quantize.can_quantize(weights_ENK):
            return Fp8(*quantize.quantize_weights(weights_ENK, scales))
    data, scale = quantize_weight(weights_ENK.view(-1, num_columns), scales)
    return Fp8(data.view(weights_ENK.shape), scale.view(num_experts, num_rows // BLOCK, -1))


def multiply_fp8(x: Fp8, weights: Fp8, layout: ExpertPermutation, dtype: torch.dtype) -> Tensor:
    """y = x W^T per expert, for x [P, K] and W [N, K]: [P, N] in ``dtype``, which must be bfloat16 on a GPU."""
    num_rows, num_columns = x.data.shape[0], weights.data.shape[1]
    if not x.data.is_cuda:
        return _emulated_product(_restored_rows(x), _restored_weights(weights), layout).to(dtype)
    out = torch.empty(num_rows, num_columns, dtype=dtype, device=x.data.device)
    # Hopper kernels take float32 scales unchanged; the last argument requests the same on other GPUs.
    deep_gemm().m_grouped_fp8_gemm_nt_contiguous(tuple(x), tuple(weights), out, layout.experts, disable_ue8m0_cast=True)
    return out


def multiply_fp8_to_tokens(x: Fp8, weights: Fp8, layout: ExpertPermutation, probs: Tensor | None = None) -> Tensor:
    """BF16 [T, N]: bitwise equal to :func:`multiply_fp8` followed by ``fused_moe.unpermute``."""
    if not launch.is_hopper(x.data.device):
        return unpermute(multiply_fp8(x, weights, layout, torch.bfloat16), layout, probs)
    create = torch.empty if layout.has_all_tokens else torch.zeros
    out = create(layout.num_tokens, weights.data.shape[1], dtype=torch.bfloat16, device=x.data.device)
    if layout.num_rows:
        launch.multiply_rows(*x, *weights, layout.offsets, layout.experts, out, layout.rows, probs)
    return out


def multiply(x_PK: Tensor, weights_ENK: Tensor, layout: ExpertPermutation) -> Tensor:
    """y = x W^T per expert, for x [P, K] and W [N, K]: [P, N]. ``weights_ENK`` may be a view of [E, K, N]."""
    if not x_PK.is_cuda:
        return _emulated_product(x_PK, weights_ENK, layout)
    out = torch.empty(x_PK.shape[0], weights_ENK.shape[1], dtype=x_PK.dtype, device=x_PK.device)
    deep_gemm().m_grouped_bf16_gemm_nt_contiguous(x_PK, weights_ENK, out, layout.experts)
    return out


def add_weight_gradients_fp8(grad: Fp8, x: Fp8, layout: ExpertPermutation, out_ENK: Tensor) -> None:
    """Add g^T x of each expert to ``out_ENK`` float32 [E, N, K], contiguous; g and x are columnwise."""
    if not layout.num_rows:
        return
    if not out_ENK.is_cuda:
        _emulated_gradients(_restored_columns(grad, layout), _restored_columns(x, layout), out_ENK)
        return
    launch.add_weight_gradients(*grad, *x, layout.offsets, out_ENK)


def add_weight_gradients(grad_PN: Tensor, x_PK: Tensor, layout: ExpertPermutation, out_ENK: Tensor) -> None:
    """Add g^T x of each expert to ``out_ENK`` float32 [E, N, K], contiguous; g [P, N] and x [P, K]."""
    if not layout.num_rows:
        return
    if not out_ENK.is_cuda:
        columns = ([part.float().t() for part in _of_experts(rows, layout)] for rows in (grad_PN, x_PK))
        _emulated_gradients(*columns, out_ENK)
        return
    deep_gemm().k_grouped_bf16_gemm_tn_contiguous(
        grad_PN, x_PK, out_ENK, layout.host_counts, layout.padded_counts, out_ENK
    )


def multiply_dense(x: Fp8, weight: Fp8) -> Tensor:
    """y = x W^T in BF16 [P, N], for rowwise x [P, K] and W [N, K] with contiguous scales."""
    if not _is_on_gpu(x):
        return float64.matmul(_restored_rows(x), dequantize_weight(weight.data, weight.scale).t()).bfloat16()
    out = torch.empty(x.data.shape[0], weight.data.shape[0], dtype=torch.bfloat16, device=x.data.device)
    # Hopper kernels take float32 scales unchanged; the last argument requests the same on other GPUs.
    deep_gemm().fp8_gemm_nt(tuple(x), tuple(weight), out, disable_ue8m0_cast=True)
    return out


def add_dense_weight_gradient(grad: Fp8, x: Fp8, out_NK: Tensor) -> None:
    """Add g^T x to ``out_NK`` float32 [N, K], contiguous. g and x are columnwise: data [N, P] and [K, P], with scales
    [N, P/128] and [K, P/128] of strides (1, N) and (1, K)."""
    if not _is_on_gpu(x):
        out_NK.addmm_(dequantize_activation(*grad), dequantize_activation(*x).t())
        return
    # Tokens are the reduction dimension and must not trigger a compile per count: only m and n are compiled in.
    deep_gemm().fp8_gemm_nt(
        tuple(grad), tuple(x), out_NK, c=out_NK, recipe=_BOTH_BY_ROWS, compiled_dims="mn", disable_ue8m0_cast=True
    )


def _is_on_gpu(x: Fp8) -> bool:
    return x.data.is_cuda


def _restored_rows(x: Fp8) -> Tensor:
    """float64, in which products are exact or nearly so (``float64.py``)."""
    return dequantize_activation(x.data, x.scale).double()


def _restored_weights(weights: Fp8) -> Tensor:
    return torch.stack([dequantize_weight(data, scale) for data, scale in zip(weights.data, weights.scale)])


def _restored_columns(x: Fp8, layout: ExpertPermutation) -> list[Tensor]:
    """Dequantize to one float32 matrix [K, rows of the expert] per expert."""
    numbers = swizzled(x.data).float() * x.scale[..., None]
    return [part.transpose(0, 1).flatten(1) for part in _of_experts(numbers, layout, BLOCK)]


def _emulated_product(x_PK: Tensor, weights_ENK: Tensor, layout: ExpertPermutation) -> Tensor:
    """Each expert's rows times its matrix; rows after the last expert's rows are zero."""
    parts = zip(_of_experts(x_PK, layout), weights_ENK)
    products = torch.cat([float64.matmul(rows, matrix.t()) for rows, matrix in parts])
    return torch.nn.functional.pad(products, (0, 0, 0, len(x_PK) - len(products)))


def _of_experts(x: Tensor, layout: ExpertPermutation, rows_of_one: int = 1) -> tuple[Tensor, ...]:
    """The part of each expert, of a tensor whose first dimension counts rows, or ``rows_of_one`` rows together."""
    sizes = [rows // rows_of_one for rows in layout.padded_counts.tolist()]
    return x[: sum(sizes)].split(sizes)


def _emulated_gradients(grads: list[Tensor], inputs: list[Tensor], out_ENK: Tensor) -> None:
    """Add g x^T per expert, for g [N, rows of the expert] and x [K, rows of the expert]."""
    for grad, x, out in zip(grads, inputs, out_ENK):
        out.addmm_(grad, x.t())
