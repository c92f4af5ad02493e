"""Call vLLM's FlashAttention 3 and router softmax kernels, for bitwise equality of trainer and engine."""

import torch
from torch import Tensor

from megatron_fp8rl.kernels.compat import vllm_flash_attention, vllm_topk_softmax


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_queries: Tensor,
    max_queries: int,
    max_keys: int,
    scale: float,
    cu_keys: Tensor | None = None,
    num_keys: Tensor | None = None,
    page_table: Tensor | None = None,
    cache_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention over packed sequences: ([T, H, D] BF16, float32 [H, T] log-sum-exp).

    query [T, H, D]. Key and value are [S, G, D] with ``cu_keys``, or paged [P, tokens of a page, G, D] with
    ``num_keys`` int32 [n] and ``page_table`` int32 [n, pages]. ``cu_queries`` and ``cu_keys`` int32 [n + 1] are
    cumulative lengths. The mask is aligned to the bottom right of each sequence. E4M3 tensors are multiples of
    ``cache_scales``, float32 [3], for query, key and value. Raises RuntimeError if vLLM for CUDA is not installed.
    """
    try:
        attend = vllm_flash_attention()
    except ImportError as error:
        raise RuntimeError(
            "precision.kernels.attention = engine: vLLM's FlashAttention 3 cannot be imported. Install vLLM for CUDA, "
            "or choose --precision.kernels.attention auto"
        ) from error
    descales = {}
    if cache_scales is not None:
        rows = cache_scales.view(3, 1, 1).expand(3, len(cu_queries) - 1, key.shape[-2])
        descales = dict(zip(("q_descale", "k_descale", "v_descale"), rows, strict=True))
    return attend(
        query,
        key,
        value,
        max_seqlen_q=max_queries,
        cu_seqlens_q=cu_queries,
        max_seqlen_k=max_keys,
        cu_seqlens_k=cu_keys,
        seqused_k=num_keys,
        block_table=page_table,
        softmax_scale=scale,
        causal=True,
        num_splits=1,
        fa_version=3,
        return_softmax_lse=True,
        **descales,
    )


def topk_softmax(logits_TE: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """(weights float32 [T, K], experts int32 [T, K]) from BF16 logits on a GPU, computed by vLLM's kernel."""
    kernel = vllm_topk_softmax()
    assert kernel is not None  # the caller has checked
    weights_TK = torch.empty(len(logits_TE), top_k, dtype=torch.float32, device=logits_TE.device)
    experts_TK = torch.empty_like(weights_TK, dtype=torch.int32)
    kernel(weights_TK, experts_TK, torch.empty_like(experts_TK), logits_TE, normalize)
    return weights_TK, experts_TK
