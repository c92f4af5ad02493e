"""Batch-invariant engines on a GPU: norms with the trainer's bits, fused with residual sums and quantization.

A batch-invariant engine has no compiler that fuses operations. Here a norm adds the residual stream and also quantizes
its result, and SwiGLU quantizes its result, in one launch. The FP8 linear that follows finds the bytes by the memory of
its input. Only results that such a linear has asked for once are quantized; the first calls run before graphs are
captured.
"""

from typing import Any

import torch
from torch import Tensor, nn

from megatron_fp8rl.kernels.types import BLOCK, block_scales
from megatron_fp8rl.precision.formats import QuantFormat
from megatron_fp8rl.upstream import patches


class _Latest:
    """The result of the latest norm or SwiGLU, with its bytes and scales if a linear reads them. The reference to the
    result keeps its memory from being reused: an equal address is the same tensor."""

    producer: nn.Module | None = None
    result: Tensor | None = None
    quantized: tuple[Tensor, Tensor] | None = None

    def keep(self, producer: nn.Module, result: Tensor, quantized: tuple[Tensor, Tensor] | None) -> None:
        self.producer, self.result, self.quantized = producer, result, quantized

    def is_result(self, x: Tensor) -> bool:
        result = self.result
        return result is not None and x.data_ptr() == result.data_ptr() and x.shape == result.shape


def _outputs(producer: nn.Module, result: Tensor) -> tuple[Tensor, Tensor] | None:
    """Memory for bytes and scales, laid out as vLLM's own kernel would, if a linear has asked for them."""
    is_aligned = getattr(producer, "fp8rl_aligns_scales", None)
    if is_aligned is None:
        return None
    rows, columns = result.shape
    step = -(-rows // 4) * 4 if is_aligned else rows
    scales = torch.empty_strided((rows, columns // BLOCK), (1, step), dtype=torch.float32, device=result.device)
    return torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=result.device), scales


@patches(
    "vllm",
    why="a batch-invariant engine adds, norms and quantizes in three launches, and its norms after residual sums "
    "depend on the batch: fused_add_rms_norm in csrc/libtorch_stable/layernorm_kernels.cu has another number of "
    "threads from 256 tokens on (RMSNorm, GemmaRMSNorm, SiluAndMul, GeluAndMul, QuantFP8.forward_cuda, "
    "MiniMaxText01RMSNormTP.forward_qkv)",
    remove_when="vLLM fuses them without its compiler, and its norms depend on one token only",
    optional=True,
)
def fuse_norms(fmt: QuantFormat) -> None:
    """Use ``kernels/triton/norm.py`` for norms, and quantize results of norms and SwiGLU in the same launch. Raises
    ImportError or AttributeError if this vLLM has other classes."""
    from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
    from vllm.model_executor.layers.minimax_rms_norm import MiniMaxText01RMSNormTP
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8

    from megatron_fp8rl.kernels.triton.norm import add_and_norm, norm_quantize, one_plus, rms_norm
    from megatron_fp8rl.kernels.triton.quantize_activations import swiglu_quantize
    from megatron_fp8rl.kernels.triton.swiglu import swiglu as swiglu_in_bf16

    latest, scales = _Latest(), block_scales(fmt)
    plain_quant = QuantFP8.forward_cuda
    plain_heads = MiniMaxText01RMSNormTP.forward_qkv

    def norm(self: Any, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if not self.has_weight or self.variance_size_override is not None or x.dtype != torch.bfloat16:
            raise ValueError(f"a batch-invariant norm needs a weight and BF16 rows of full width, not {self}")
        return multiplied(self, x, residual, self.weight.data)

    def zero_centred_norm(self: Any, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        return multiplied(self, x, residual, one_plus(self.weight.data))

    def multiplied(self: Any, x: Tensor, residual: Tensor | None, weight: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        eps = self.variance_epsilon
        quantized = _outputs(self, x)
        if quantized is not None:
            out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            norm_quantize(x, weight, eps, *quantized, scales, residual, out)
        elif residual is not None:
            out = add_and_norm(x, weight, eps, residual)
        else:
            out, _ = rms_norm(x, weight, eps)
        latest.keep(self, out, quantized)
        return out if residual is None else (out, residual)

    def all_heads(q_norm: Any, k_norm: Any, qkv: Tensor, q_size: int, kv_size: int) -> tuple[Tensor, Tensor, Tensor]:
        if q_norm.tp_world > 1:
            return plain_heads(q_norm, k_norm, qkv, q_size, kv_size)
        *heads, value = qkv.split([q_size, kv_size, kv_size], dim=-1)
        pairs = zip(heads, (q_norm, k_norm), strict=True)
        query, key = (rms_norm(x, one.weight.data, one.variance_epsilon)[0] for x, one in pairs)
        return query, key, value

    def swiglu(self: Any, x: Tensor) -> Tensor:
        out = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=x.device)
        quantized = _outputs(self, out)
        if quantized is None:
            out = swiglu_in_bf16(x.flatten(0, -2)).view(out.shape)
        else:
            swiglu_quantize(x, *quantized, scales, out)
        latest.keep(self, out, quantized)
        return out

    def quantize(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        is_fused = latest.is_result(x) and self.is_group_quant and self.group_size == BLOCK and self.column_major_scales
        if is_fused and latest.quantized is not None:
            return latest.quantized
        result = plain_quant(self, x, *args, **kwargs)
        if is_fused and result[1].dtype == torch.float32 and result[1].shape == (len(x), x.shape[1] // BLOCK):
            latest.producer.fp8rl_aligns_scales = self.tma_aligned_scales  # from the next call on
        return result

    RMSNorm.forward_cuda, SiluAndMul.forward_cuda, QuantFP8.forward_cuda = norm, swiglu, quantize
    GemmaRMSNorm.forward_cuda = zero_centred_norm
    GeluAndMul.forward_cuda = GeluAndMul.forward_native  # two operations of PyTorch, as in the trainer
    MiniMaxText01RMSNormTP.forward_qkv = staticmethod(all_heads)


@patches(
    "vllm",
    why="a batch-invariant engine copies and norms query and key heads and rotates them, in five launches "
    "(Qwen3Attention.forward, Qwen3MoeAttention.forward)",
    remove_when="vLLM fuses them without its compiler, and a head's norm depends on that head only",
    optional=True,
)
def fuse_heads() -> None:
    """Norm and rotate heads in one launch (``kernels/triton/rotate.py``), with the same bits. Raises ImportError if
    this vLLM has other classes."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.models.qwen3 import Qwen3Attention
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeAttention

    from megatron_fp8rl.kernels.triton.rotate import norm_and_rotate_

    plain = {kind: kind.forward for kind in (Qwen3Attention, Qwen3MoeAttention)}

    def attend(self: Any, positions: Tensor, hidden_states: Tensor) -> Tensor:
        rotary, norm, width = self.rotary_emb, self.q_norm, self.head_dim
        is_plain = type(rotary).forward_cuda is RotaryEmbedding.forward_cuda and not rotary.use_flashinfer
        is_whole = rotary.is_neox_style and rotary.rotary_dim == width and width.bit_count() == 1 and width >= 32
        if not is_plain or not is_whole or norm._forward_hooks or positions.dim() != 1:  # hooks: of a probe
            return plain[type(self)](self, positions, hidden_states)
        qkv, _ = self.qkv_proj(hidden_states)
        table = rotary._match_cos_sin_cache_dtype(qkv)
        weights = norm.weight.data, self.k_norm.weight.data
        norm_and_rotate_(qkv, self.num_heads, self.num_kv_heads, weights, norm.variance_epsilon, positions, table)
        output, _ = self.o_proj(self.attn(*qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)))
        return output

    for kind in plain:
        kind.forward = attend
