"""Attention of engines with an FP8 KV cache on a GPU: only keys and values are rounded to E4M3.

Runs in every engine worker, as vLLM's backend ``CUSTOM``. vLLM's FlashAttention multiplies in FP8 over such a cache: it
also rounds queries and probabilities to E4M3, and it transposes values in registers. On an H200 it decodes hardly
faster than over a BF16 cache. Here, sequences with one new token are decoded, and sequences with several new tokens are
packed (``kernels/triton/attention.py``). Both give a token the same bits, which do not depend on the batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from megatron_fp8rl.kernels.triton.attention import decode, packed, read_pages
from megatron_fp8rl.upstream import patches

_COPIED_TOKENS = 131072  # maximum tokens of one FP16 copy


@dataclass(frozen=True)
class Part:
    """Sequences of a batch that one call computes."""

    rows: Tensor  # int64 [n] on the device: indices of the sequences
    tokens: Tensor  # int64 on the device: their tokens in the batch
    starts: Tensor  # int32 [n + 1] on the device: where the tokens of each begin in ``tokens``
    copies: Tensor  # int32 [n] on the device: where a copy of each sequence begins
    num_copied: int  # tokens of all sequences
    max_query: int  # new tokens of a sequence
    max_length: int


def parts_of(counts: Sequence[int], lengths: Sequence[int], device: torch.device) -> list[Part]:
    """Return sequences with one new token as the first part, and the others in parts of bounded size. ``counts``: new
    tokens, without which a sequence is omitted; ``lengths``: all tokens."""
    first_tokens = [0]
    for count in counts:
        first_tokens.append(first_tokens[-1] + count)
    decoding = [i for i, count in enumerate(counts) if count == 1]
    several = [i for i, count in enumerate(counts) if count > 1]
    groups = ([decoding] if decoding else []) + list(_bounded(several, lengths))
    return [_part(group, counts, first_tokens, lengths, device) for group in groups]


def _bounded(sequences: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield groups of at most :data:`_COPIED_TOKENS` tokens, or of one sequence."""
    group: list[int] = []
    num_tokens = 0
    for i in sequences:
        if group and num_tokens + lengths[i] > _COPIED_TOKENS:
            yield group
            group, num_tokens = [], 0
        group.append(i)
        num_tokens += lengths[i]
    if group:
        yield group


def _part(
    group: Sequence[int],
    counts: Sequence[int],
    first_tokens: Sequence[int],
    lengths: Sequence[int],
    device: torch.device,
) -> Part:
    new = torch.tensor([counts[i] for i in group])
    whole = torch.tensor([lengths[i] for i in group])
    tokens = torch.cat([torch.arange(first_tokens[i], first_tokens[i + 1]) for i in group])
    starts = torch.nn.functional.pad(new.cumsum(0), (1, 0)).int()
    copies = (whole.cumsum(0) - whole).int()
    on_device = (x.to(device, non_blocking=True) for x in (torch.tensor(group), tokens, starts, copies))
    return Part(*on_device, int(whole.sum()), int(new.max()), int(whole.max()))


@patches(
    "vllm",
    why="declares which batches graphs may contain (_cudagraph_support), and extends the metadata (build)",
    remove_when="FP8CacheAttention is removed",
    optional=True,
)
class Metadata(FlashAttentionMetadataBuilder):
    """FlashAttention's metadata without scheduler metadata, plus the parts of a batch with prompts."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE  # only the host knows the parts

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.aot_schedule = False  # no scheduler metadata of FlashAttention

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        metadata = super().build(0, common_attn_metadata, fast_build)
        metadata.parts = []
        if metadata.max_query_len > 1:
            counts = common_attn_metadata.query_start_loc_cpu.diff().tolist()
            lengths = common_attn_metadata.seq_lens_cpu_upper_bound.tolist()
            metadata.parts = parts_of(counts, lengths, metadata.seq_lens.device)
        return metadata


@patches(
    "vllm",
    why="vLLM's FlashAttention decodes over an FP8 cache hardly faster than over BF16; this derives from its layer "
    "and reads its metadata and cache",
    remove_when="an attention of vLLM reads an FP8 cache at its bandwidth, with queries in BF16",
    optional=True,
)
class FP8CacheAttention(FlashAttentionImpl):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises ValueError for kinds of attention that these kernels do not support."""
        super().__init__(*args, **kwargs)
        self.supports_quant_query_input = False  # queries stay in BF16
        before, after = self.sliding_window  # tokens that a token sees besides its own; -1: all
        self.window = before + 1 or None
        plain = after == (-1 if before < 0 else 0) and self.alibi_slopes is None and self.sinks is None
        if not plain or self.logits_soft_cap or self.dcp_world_size > 1:
            problem = "FP8_CACHE has no sinks, soft caps, windows in both directions or context parallelism"
            raise ValueError(f"precision.kernels.engine_attention: {problem}; set FLASH_ATTN")

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlashAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Fill and return ``output`` [tokens, Q, D] for query [tokens, Q, D] and all keys and values in kv_cache, bytes
        [pages, G, tokens of a page, 2 D]."""
        if attn_metadata is None:  # while vLLM measures memory
            return output.fill_(0)
        cache, pages, lengths = kv_cache.transpose(1, 2), attn_metadata.block_table, attn_metadata.seq_lens
        scales = layer._k_scale, layer._v_scale
        if attn_metadata.max_query_len == 1:
            num_tokens = attn_metadata.num_actual_tokens
            out = output[:num_tokens]
            decode(query[:num_tokens], cache, pages, lengths, *scales, self.scale, out, window=self.window)
            return output
        for part in attn_metadata.parts:
            part_query, part_pages = query.index_select(0, part.tokens), pages.index_select(0, part.rows)
            part_lengths = lengths.index_select(0, part.rows)
            if part.max_query == 1:
                out = torch.empty_like(part_query)
                decode(part_query, cache, part_pages, part_lengths, *scales, self.scale, out, window=self.window)
            else:
                firsts = None
                if self.window is not None:  # vLLM reuses earlier pages
                    firsts = part_lengths - part.starts.diff() + 1 - self.window
                keys, values = read_pages(
                    cache, part_pages, part.copies, part_lengths, part.num_copied, part.max_length, firsts
                )
                out, _ = packed(
                    part_query,
                    keys,
                    values,
                    *scales,
                    self.scale,
                    cu_queries=part.starts,
                    key_starts=part.copies,
                    num_keys=part_lengths,
                    max_queries=part.max_query,
                    window=self.window,
                )
            output.index_copy_(0, part.tokens, out)
        return output


@patches(
    "vllm",
    why="vLLM asks a backend's class for FP8CacheAttention; its FlashAttention would round queries to E4M3",
    remove_when="FP8CacheAttention is removed",
    optional=True,
)
class FP8CacheBackend(FlashAttentionBackend):
    supported_kv_cache_dtypes: ClassVar = ["fp8", "fp8_e4m3"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[FP8CacheAttention]:
        return FP8CacheAttention

    @staticmethod
    def get_builder_cls() -> type[Metadata]:
        return Metadata

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return kv_cache_dtype in cls.supported_kv_cache_dtypes
