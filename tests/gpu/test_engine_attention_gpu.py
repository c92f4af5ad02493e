"""The trainer's attention by the engine's kernel: the bits of paged decoding, and cuDNN's gradients; run with -s.

FlashAttention 3 sums keys in blocks of a size that follows from the heads, from whether the mask is causal, and from
pages. For heads of 97 to 128 features it is 128 in every case. For narrower ones a decoded token has other blocks than
a sequence: with 64 features the mask of one query is dropped, and blocks are 160 long instead of 128. In E4M3 it is the
other way round: over the same pages, 64 features have the bits of decoding, and 128 have not (seen on an H200).
"""

import math

import pytest
import torch

from tests.tolerances import ATTENTION_BLOCKS_DECIBELS, TE_DECIBELS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

LENGTHS = (1, 77, 128, 300, 515)
PAGE_TOKENS = 16  # of vLLM's KV cache
SCALES = (2.0**-6, 2.0**-7, 2.0**-5)  # of an FP8 cache


def _case(num_heads: int, num_groups: int, head_dim: int):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(sum(LENGTHS), heads, head_dim) for heads in (num_heads, num_groups, num_groups)]
    return [torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in shapes]


def _segments():
    from megatron_fp8rl.trainer.model.packed_sequences import plan_pack

    return plan_pack(LENGTHS, 1, 0, torch.device("cuda")).segments


def _decoded(query, key, value, scale: float, descales: dict | None = None) -> torch.Tensor:
    """Every query alone over the pages of the keys before it, all queries as one batch of an engine."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    num_pages = [-(-n // PAGE_TOKENS) for n in LENGTHS]
    caches = []
    for x in (key, value):
        pages = [
            torch.cat([part, part.new_empty(pages * PAGE_TOKENS - len(part), *part.shape[1:])])
            for part, pages in zip(x.split(LENGTHS), num_pages)
        ]
        caches.append(torch.cat(pages).view(-1, PAGE_TOKENS, *x.shape[1:]))
    table = torch.zeros(len(LENGTHS), max(num_pages), dtype=torch.int32)
    first = 0
    for row, pages in zip(table, num_pages):
        row[:pages] = torch.arange(first, first + pages)
        first += pages
    rows = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    used = torch.cat([torch.arange(1, n + 1) for n in LENGTHS]).int().cuda()
    return flash_attn_varlen_func(
        query,
        *caches,
        max_seqlen_q=1,
        cu_seqlens_q=torch.arange(len(query) + 1, dtype=torch.int32, device="cuda"),
        max_seqlen_k=max(LENGTHS),
        seqused_k=used,
        block_table=table[rows].cuda(),
        softmax_scale=scale,
        causal=True,
        num_splits=1,
        fa_version=3,
        **(descales or {}),
    )


@pytest.mark.parametrize("heads", [(32, 8, 128), (32, 4, 128), (8, 2, 64)], ids=str)
def test_sequences_of_an_fp8_cache_have_the_bits_of_decoding_for_narrow_heads_alone(heads):
    from megatron_fp8rl.kernels.kv_rounding import as_cached, to_cache
    from megatron_fp8rl.trainer.model import attention_te

    scales = torch.tensor(SCALES, device="cuda")
    tensors = [as_cached(x, s) for x, s in zip(_case(*heads), scales)]
    packed = attention_te.attend(
        *tensors, _segments(), heads[2] ** -0.5, scales, forward=attention_te.by_flash_attention
    )
    rows = scales.view(3, 1, 1).expand(3, sum(LENGTHS), heads[1])
    descales = dict(zip(("q_descale", "k_descale", "v_descale"), rows))
    decoded = _decoded(*map(to_cache, tensors, scales), heads[2] ** -0.5, descales)
    in_bf16 = attention_te.attend(*tensors, _segments(), heads[2] ** -0.5, forward=attention_te.by_flash_attention)
    apart = f"decoding {_decibels(packed, decoded):.1f} dB, probabilities in BF16 {_decibels(packed, in_bf16):.1f} dB"
    print(f"\n{heads}: {apart}")
    # precision.exact therefore uses our attention over an FP8 cache (test_cache_attention_gpu.py).
    assert torch.equal(packed, decoded) == (heads[2] == 64)


def _decibels(actual: torch.Tensor, reference: torch.Tensor) -> float:
    error = (actual.double() - reference.double()).norm()
    return math.inf if error == 0 else float(20 * torch.log10(reference.double().norm() / error))


@pytest.mark.parametrize("heads", [(32, 8, 128), (8, 8, 128), (8, 2, 64)], ids=str)
def test_packed_sequences_have_the_bits_of_decoding(heads):
    """Bits for heads of 128 features; narrower ones, which a configuration is refused, differ by rounding."""
    from megatron_fp8rl.trainer.model import attention_te

    query, key, value = _case(*heads)
    scale = heads[2] ** -0.5
    packed = attention_te.attend(query, key, value, _segments(), scale, forward=attention_te.by_flash_attention)
    decoded = _decoded(query, key, value, scale)
    print(f"\n{heads}: decoding {_decibels(packed, decoded):.1f} dB, equal {(packed == decoded).float().mean():.4%}")
    if heads[2] == 128:
        assert torch.equal(packed, decoded)
    else:
        assert _decibels(packed, decoded) > ATTENTION_BLOCKS_DECIBELS


@pytest.mark.parametrize("heads", [(32, 8, 128), (8, 2, 64)], ids=str)
def test_gradients_continue_from_the_engines_outputs(heads):
    from megatron_fp8rl.trainer.model import attention_te

    tensors = [x.requires_grad_() for x in _case(*heads)]
    grad = torch.randn(tensors[0].shape, device="cuda").bfloat16()
    outputs, gradients = [], []
    for forward in (attention_te.by_cudnn, attention_te.by_flash_attention):
        out = attention_te.attend(*tensors, _segments(), heads[2] ** -0.5, forward=forward)
        outputs.append(out.detach())
        gradients.append(torch.autograd.grad(out, tensors, grad))
    apart = [_decibels(b, a) for a, b in zip(*gradients)]
    print(f"\n{heads}: outputs {_decibels(*outputs):.1f} dB apart, dq dk dv {', '.join(f'{x:.1f}' for x in apart)}")
    assert min(apart) > TE_DECIBELS
