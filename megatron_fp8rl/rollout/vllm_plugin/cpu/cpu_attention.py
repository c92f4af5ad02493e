"""The engine's attention and log-probabilities on a CPU, bitwise equal to the trainer's.

Patches vLLM's workers with ``kernels/float64.py`` and ``kernels/exact_logprobs.py``, over a paged KV cache in BF16 or
E4M3. An FP8 cache rounds keys and values as on a GPU (``patches_attention.py``), but not queries. vLLM allocates a
layer's cache, [blocks, G, tokens of a block, 2 D]; here the last axis is a token's key and value. A latent cache has
keys only, [blocks, 1, tokens of a block, D]: values are their first features (``latent_layers.py``).
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

from megatron_fp8rl.kernels import float64, paged_attention
from megatron_fp8rl.kernels.exact_logprobs import log_softmax
from megatron_fp8rl.kernels.kv_rounding import to_cache
from megatron_fp8rl.rollout.vllm_plugin.patches import kv_scales_of
from megatron_fp8rl.upstream import patches

_FEW_TOKENS = 17  # of a request in a step: the most drafts (engine.draft_tokens), and one more


@patches(
    "vllm",
    why="replaces CPUAttentionBackendImpl.forward and do_kv_cache_update, and log-softmax in the sampler: vLLM's CPU "
    "kernels add in orders that depend on the batch",
    remove_when="vLLM has batch-invariant kernels on a CPU",
)
def register() -> None:
    """Patch vLLM in this process, except attention with slopes or soft caps, and latent attention."""
    update, forward, sample = (
        CPUAttentionBackendImpl.do_kv_cache_update,
        CPUAttentionBackendImpl.forward,
        TopKTopPSampler.forward_cpu,
    )

    def do_kv_cache_update(
        self: Any, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        if not _is_plain(self):
            return update(self, layer, key, value, kv_cache, slot_mapping)
        num_tokens, size = len(slot_mapping), kv_cache.shape[2]
        key, value = key[:num_tokens], value[:num_tokens]
        if self.is_fp8_kv_cache:
            _, *scales = kv_scales_of(layer)
            key, value = map(to_cache, (key, value), scales)
            key, value, kv_cache = (x.view(torch.uint8) for x in (key, value, kv_cache))
        rows = torch.cat([key, value], dim=-1)[..., : kv_cache.shape[-1]]
        kv_cache[slot_mapping // size, :, slot_mapping % size] = rows

    def attend(
        self: Any,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *others: Any,
        **more: Any,
    ) -> Tensor:
        if attn_metadata is None or not _is_plain(self):
            return forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *others, **more)
        scales = None
        if self.is_fp8_kv_cache:
            _, *scales = kv_scales_of(layer)
        _attend_requests(query, kv_cache, scales, attn_metadata, self.scale, _window(self), output, self.sinks)
        return output

    def forward_cpu(
        self: Any, logits: Tensor, generators: Any, k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if self.logprobs_mode != "processed_logprobs":
            return sample(self, logits, generators, k, p)
        self.logprobs_mode = "processed_logits"
        try:
            sampled, processed = sample(self, logits, generators, k, p)
        finally:
            self.logprobs_mode = "processed_logprobs"
        return sampled, log_softmax(processed)

    CPUAttentionBackendImpl.do_kv_cache_update, CPUAttentionBackendImpl.forward = do_kv_cache_update, attend
    TopKTopPSampler.forward_cpu, Sampler.compute_logprobs = forward_cpu, staticmethod(log_softmax)


def _is_plain(impl: Any) -> bool:
    return impl.alibi_slopes is None and not impl.logits_soft_cap


def _window(impl: Any) -> int | None:
    """The number of last tokens, with its own, to which a token attends; None: all of them."""
    window = impl.sliding_window
    if isinstance(window, tuple):  # (tokens before, tokens after)
        return None if window[0] < 0 else window[0] + 1
    return None if window < 0 else window


def _attend_requests(
    query: Tensor,
    kv_cache: Tensor,
    cache_scales: Sequence[float] | None,
    metadata: Any,
    scale: float,
    window: int | None,
    output: Tensor,
    sinks: Tensor | None = None,
) -> None:
    """Fill ``output`` [T, Q, V]. PyTorch computes requests with equally few tokens together, such as those that decode
    or verify drafts, and each longer prompt separately."""
    ends = metadata.query_start_loc, metadata.seq_lens, metadata.block_table
    out, has_values = output.view(*query.shape[:2], -1), kv_cache.shape[-1] > query.shape[-1]
    if (
        has_values
        and sinks is None
        and paged_attention.attend(query, kv_cache, cache_scales, *ends, scale, window, out)
    ):
        return
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    counts = [end - start for start, end in itertools.pairwise(starts)]
    few = sorted({count for count in counts if 0 < count <= _FEW_TOKENS})
    groups = [[i for i, count in enumerate(counts) if count == same] for same in few]
    groups += [[i] for i, count in enumerate(counts) if count > _FEW_TOKENS]
    for requests in groups:
        num_queries, longest = counts[requests[0]], max(lengths[i] for i in requests)
        cached = _cached(kv_cache, metadata.block_table[requests], longest)
        key, value = _keys_and_values(cached, cache_scales, query.shape[-1], out.shape[-1])
        rows = torch.tensor([starts[i] for i in requests])[:, None] + torch.arange(num_queries)
        ends = torch.tensor([lengths[i] for i in requests])[:, None] - num_queries + torch.arange(1, num_queries + 1)
        positions = torch.arange(longest)
        mask = positions < ends[..., None]
        if window is not None:
            mask &= positions >= ends[..., None] - window
        out[rows] = float64.attend(query[rows], key, value, mask, scale, sinks)


def _cached(kv_cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """[requests, length, G, 2 D]: the cache of ``length`` tokens."""
    size = kv_cache.shape[2]
    rows = kv_cache[blocks[:, : -(-length // size)].long()]  # [requests, blocks, G, size, 2 D]
    return rows.transpose(2, 3).flatten(1, 2)[:, :length]


def _keys_and_values(
    rows: Tensor, scales: Sequence[float] | None, num_key: int, num_value: int
) -> tuple[Tensor, Tensor]:
    """(keys [..., ``num_key``], values [..., ``num_value``]) of cached rows; float32 from an FP8 cache."""
    if scales is not None:
        rows = rows.view(torch.float8_e4m3fn).float()
    key, value = rows[..., :num_key], rows[..., num_key:]
    if scales is not None:
        key, value = key * scales[0], value * scales[1]
    return key, value if value.shape[-1] else key[..., :num_value]
