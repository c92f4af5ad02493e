"""Causal varlen attention on a Hopper or newer GPU, by Transformer Engine's cuDNN or the engine's kernel.

The engine's kernels have no backward pass. cuDNN's uses their outputs, because all of them save only the logsumexp of
every row. :func:`by_flash_attention` uses one split of the keys (``num_splits=1``), so that a query's sums do not
depend on the rest of the batch, as under ``engine.batch_invariant``. :func:`by_cache_attention` never depends on it.

Transformer Engine's functions are called directly. Its DotProductAttention could silently select a kernel that
materializes all scores, compares lengths on the device in every layer, and runs a ring over context-parallel ranks.

Shapes: T = packed tokens of this rank, K = keys of all segments, H = query heads, G = key and value heads, D = features
of a query or key head, V = features of a value head.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_fp8rl.kernels import engine_ops
from megatron_fp8rl.kernels.kv_rounding import to_cache
from megatron_fp8rl.trainer.model.packed_sequences import PAGE_TOKENS, Segments
from megatron_fp8rl.upstream import patches

_LAYOUT = "thd_thd_thd"

# query, key, value, segments, softmax scale, scales of an FP8 KV cache, window, sinks -> (output, statistics)
Forward = Callable[..., tuple[Tensor, Sequence[Tensor]]]


def supports(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> bool:
    """Whether cuDNN has forward and backward kernels for these shapes on this GPU under the current settings."""
    if query.device.type != "cuda" or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    heads = query.shape[1], key.shape[1], query.shape[2], value.shape[2]
    lengths = segments.max_queries, segments.max_keys
    softmax, deterministic = _softmax_type(sinks), torch.are_deterministic_algorithms_enabled()
    return _has_kernel(query.dtype, heads, lengths, segments.is_square, _before(window), softmax, deterministic)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scale: float,
    cache_scales: Tensor | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    *,
    forward: Forward | None = None,  # by_cudnn
) -> Tensor:
    """query [T, H, D], key [K, G, D], value [K, G, V], all BF16 or FP16 -> [T, H, V]; see :func:`supports`.

    ``forward``: :func:`by_flash_attention` or :func:`by_cache_attention`, which require V = D; otherwise cuDNN.
    ``cache_scales`` FP32 [3] of the FP8 KV cache to whose values keys and values are rounded. ``window``: a query
    attends to at most so many last keys, with its own. ``sinks`` [H]: a score of each head without a value. Neither is
    measured on GPUs yet. :func:`by_flash_attention` needs sequences shorter than the window, and only cuDNN has sinks.
    """
    tensors = query.contiguous(), key.contiguous(), value.contiguous()
    if forward is by_flash_attention:
        window = None  # padding can make a sequence longer than the window, tokens cannot
    return _Attention.apply(*tensors, sinks, segments, scale, cache_scales, window, forward or by_cudnn)


def _softmax_type(sinks: Tensor | None) -> str:
    return "vanilla" if sinks is None else "learnable"


def _before(window: int | None) -> int:
    """The tokens before its own to which a token attends; -1: all."""
    return -1 if window is None else window - 1


def _mask_type(is_square: bool) -> str:
    return "padding_causal" if is_square else "padding_causal_bottom_right"


@functools.lru_cache(maxsize=256)
@patches(
    "transformer-engine",
    why="calls tex.get_fused_attn_backend, which takes 19 positional arguments",
    remove_when="transformer_engine.pytorch has a keyword API for whether cuDNN supports an attention",
)
def _has_kernel(
    dtype: torch.dtype,
    heads: tuple[int, int, int, int],
    lengths: tuple[int, int],
    is_square: bool,
    num_before: int,
    softmax: str,
    deterministic: bool,
) -> bool:
    import transformer_engine.pytorch  # noqa: F401  loads the library that the next import binds
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.constants import TE_DType
    from transformer_engine.pytorch.cpp_extensions import fused_attn

    num_heads, num_groups, key_dim, value_dim = heads
    backend = tex.get_fused_attn_backend(
        True,  # training: a kernel with a backward pass
        TE_DType[dtype],
        TE_DType[dtype],
        fused_attn.QKVLayout[_LAYOUT],
        fused_attn.AttnBiasType["no_bias"],
        fused_attn.AttnMaskType[_mask_type(is_square)],
        fused_attn.SoftmaxType[softmax],
        0.0,  # dropout
        num_heads,
        num_groups,
        *lengths,
        key_dim,
        value_dim,
        num_before,  # window to the left of the diagonal
        0,  # window to the right: none
        False,  # do not return the max logit
        False,  # no CUDA graph
        deterministic,
    )
    return backend == fused_attn.FusedAttnBackend["F16_arbitrary_seqlen"]


@patches(
    "transformer-engine",
    why="calls fused_attn_fwd and fused_attn_bwd without the module that wraps them",
    remove_when="DotProductAttention exposes its kernel as a function",
)
class _Attention(torch.autograd.Function):
    """Always runs in training mode: with the same kernel, log-probabilities and training are bitwise identical."""

    @staticmethod
    def forward(
        ctx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        segments: Segments,
        scale: float,
        cache_scales: Tensor | None,
        window: int | None,
        by_kernel: Forward,
    ) -> Tensor:
        out, statistics = by_kernel(query, key, value, segments, scale, cache_scales, window, sinks)
        ctx.save_for_backward(query, key, value, out, *statistics)
        ctx.segments, ctx.scale, ctx.window, ctx.sinks = segments, scale, window, sinks
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        from transformer_engine.pytorch.cpp_extensions import fused_attn

        query, key, value, out, *statistics = ctx.saved_tensors
        segments = ctx.segments
        grad_query, grad_key, grad_value, *others = fused_attn.fused_attn_bwd(
            segments.max_queries,
            segments.max_keys,
            segments.cu_queries,
            segments.cu_keys,
            query,
            key,
            value,
            out,
            grad_out.contiguous(),
            query.dtype,
            statistics,
            fused_attn.FusedAttnBackend["F16_arbitrary_seqlen"],
            **_offsets(segments),
            **_settings(segments, ctx.scale, ctx.window, ctx.sinks),
            do_format="thd",
            dqkv_layout=_LAYOUT,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        grad_sinks = None if ctx.sinks is None else others[1].view(-1).to(ctx.sinks.dtype)  # others[0]: of a bias
        return grad_query, grad_key, grad_value, grad_sinks, None, None, None, None, None


def by_cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scale: float,
    cache_scales: Tensor | None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Sequence[Tensor]]:
    """As :func:`attend`, with the statistics that the backward pass needs."""
    from transformer_engine.pytorch.cpp_extensions import fused_attn

    return fused_attn.fused_attn_fwd(
        True,
        segments.max_queries,
        segments.max_keys,
        segments.cu_queries,
        segments.cu_keys,
        query,
        key,
        value,
        query.dtype,
        fused_attn.FusedAttnBackend["F16_arbitrary_seqlen"],
        **_offsets(segments),
        **_settings(segments, scale, window, sinks),
        **({} if sinks is None else {"softmax_offset": sinks.detach().float().view(1, -1, 1, 1)}),
    )


def by_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scale: float,
    cache_scales: Tensor | None,
    window: None = None,
    sinks: None = None,
) -> tuple[Tensor, Sequence[Tensor]]:
    """vLLM's FlashAttention 3; with ``cache_scales`` its products are E4M3. Raises RuntimeError without vLLM."""
    shape = {"cu_queries": segments.cu_queries, "max_queries": segments.max_queries, "max_keys": segments.max_keys}
    if cache_scales is None:
        keys = {"cu_keys": segments.cu_keys}
        out, sums_HT = engine_ops.flash_attention(query, key, value, **shape, **keys, scale=scale)
    else:
        # Paged as in the engine, whose prefill then has the same bits.
        pages = segments.pages
        paged = (to_cache(x, s).index_select(0, pages.rows) for x, s in zip((key, value), cache_scales[1:]))
        key, value = (x.unflatten(0, (-1, PAGE_TOKENS)) for x in paged)
        keys = {"num_keys": pages.num_keys, "page_table": pages.table, "cache_scales": cache_scales}
        query_in_e4m3 = to_cache(query, cache_scales[0])
        out, sums_HT = engine_ops.flash_attention(query_in_e4m3, key, value, **shape, **keys, scale=scale)
    return out, _statistics(sums_HT)


def by_cache_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scale: float,
    cache_scales: Tensor | None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Sequence[Tensor]]:
    """Our attention over an FP8 KV cache (``kernels/triton/attention.py``); cuDNN's without ``cache_scales``."""
    if cache_scales is None:
        return by_cudnn(query, key, value, segments, scale, None, window, sinks)
    from megatron_fp8rl.kernels.triton import attention  # imports Triton

    scales = cache_scales[1], cache_scales[2]
    out, sums_HT = attention.packed(
        query,
        *attention.read_rows(key, value, *scales),
        *scales,
        scale,
        cu_queries=segments.cu_queries,
        key_starts=segments.cu_keys,
        num_keys=segments.cu_keys.diff(),
        max_queries=segments.max_queries,
        window=window,
    )
    return out, _statistics(sums_HT)


def _statistics(sums_HT: Tensor) -> Sequence[Tensor]:
    """What cuDNN's backward pass needs: the log-sum-exp of each row, and the state of a dropout that is not used."""
    return sums_HT.t().contiguous().unsqueeze(-1), torch.zeros(2, dtype=torch.int64, device=sums_HT.device)


def _offsets(segments: Segments) -> dict:
    """Segments are contiguous, so their offsets are the cumulative lengths."""
    return {"cu_seqlens_q_padded": segments.cu_queries, "cu_seqlens_kv_padded": segments.cu_keys}


def _settings(segments: Segments, scale: float, window: int | None, sinks: Tensor | None) -> dict:
    return {
        "attn_scale": scale,
        "qkv_layout": _LAYOUT,
        "o_format": "thd",
        "attn_mask_type": _mask_type(segments.is_square),
        "softmax_type": _softmax_type(sinks),
        "window_size": (_before(window), 0),
        "bottom_right_diagonal": not segments.is_square,
    }
