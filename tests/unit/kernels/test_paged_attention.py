"""Attention over a paged cache on a CPU: the bits of ``float64.attend`` for prompts, decoding and windows."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from megatron_fp8rl.kernels import c_code, float64, paged_attention
from megatron_fp8rl.kernels.kv_rounding import to_cache

SCALES = (0.013, 0.021)  # of keys and values


@pytest.fixture(autouse=True)
def compiled():
    if c_code.library("paged_attention") is None:
        pytest.skip("no C compiler, or a CPU without AVX-512")


def case(heads, groups, width, counts, lengths, block_size, is_fp8, window):
    """Arguments of ``attend`` with blocks in random order, and the expected output."""
    generator = torch.Generator().manual_seed(0)
    per_request = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(per_request) + 3, generator=generator).int()
    table = torch.zeros(len(lengths), max(per_request) + 2, dtype=torch.int32)
    cache = torch.randn(len(order), groups, block_size, 2 * width, generator=generator).bfloat16()
    query = 2 * torch.randn(sum(counts) + 2, heads, width, generator=generator).bfloat16()
    starts = [0, *itertools.accumulate(counts)]
    if is_fp8:
        key, value = (to_cache(x, scale) for x, scale in zip(cache.chunk(2, -1), SCALES, strict=True))
        cache = torch.cat([key.view(torch.uint8), value.view(torch.uint8)], dim=-1)
    expected = torch.zeros_like(query)
    for i, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        blocks = order[sum(per_request[:i]) :][: per_request[i]]
        table[i, : len(blocks)] = blocks
        rows = cache[blocks.long()].transpose(1, 2).flatten(0, 1)[None, :length]  # [1, length, G, 2 D]
        key, value = rows.chunk(2, dim=-1)
        if is_fp8:
            key, value = (
                x.contiguous().view(torch.float8_e4m3fn).float() * s for x, s in zip((key, value), SCALES, strict=True)
            )
        distance = torch.arange(length - count, length)[:, None] - torch.arange(length)
        mask = (distance >= 0) & (distance < (window or length))
        own = slice(starts[i], starts[i + 1])
        expected[own] = float64.attend(query[None, own], key, value, mask[None], width**-0.5)[0]
    integers = [torch.tensor(x, dtype=torch.int32) for x in (starts, lengths)]
    return (query, cache, SCALES if is_fp8 else None, *integers, table, width**-0.5, window), expected


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("is_fp8", [False, True], ids=["BF16", "E4M3"])
@pytest.mark.parametrize(
    "shape", [(9, 3, 64, 16), (12, 4, 128, 128), (5, 5, 96, 16), (16, 1, 256, 16)], ids=lambda shape: f"heads {shape}"
)
@pytest.mark.parametrize(
    ("counts", "lengths"),
    [([1] * 6, [1, 2, 16, 17, 300, 301]), ([5, 1, 40, 1, 9], [5, 9, 47, 300, 9])],
    ids=["decoding", "prompts, chunks and decoding"],
)
def test_same_bits_as_float64(shape, counts, lengths, is_fp8, window):
    arguments, expected = case(*shape[:3], counts, lengths, shape[3], is_fp8, window)
    out = torch.zeros_like(expected)
    assert paged_attention.attend(*arguments, out)
    assert torch.equal(out, expected)


def test_threads_share_the_requests(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(paged_attention, "_WORK_PER_THREAD", 64)
    c_code._pool.cache_clear()
    arguments, expected = case(8, 2, 64, [3, 1, 1, 20, 1], [30, 40, 1, 20, 90], 16, False, None)
    out = torch.zeros_like(expected)
    assert paged_attention.attend(*arguments, out) and torch.equal(out, expected)
    c_code._pool.cache_clear()


def test_values_that_are_not_finite_stay():
    arguments, _ = case(2, 2, 64, [1], [8], 16, True, None)
    arguments[1][:] = 0x7F  # NaN in E4M3
    out = torch.zeros_like(arguments[0])
    assert paged_attention.attend(*arguments, out) and out[0].isnan().all()


def test_other_operands_are_left_to_pytorch(monkeypatch):
    arguments, expected = case(2, 2, 64, [1], [8], 16, False, None)
    query, *others = arguments
    assert not paged_attention.attend(query.float(), *others, expected.float())
    narrow, out = case(2, 2, 24, [1], [8], 16, False, None)
    assert not paged_attention.attend(*narrow, out)  # 24 is no multiple of 16
    monkeypatch.setattr(c_code, "library", lambda name: None)
    assert not paged_attention.attend(*arguments, expected)


def test_the_engine_computes_the_same_without_a_compiler(monkeypatch):
    from megatron_fp8rl.rollout.vllm_plugin.cpu import cpu_attention

    (query, cache, scales, starts, lengths, table, scale, window), expected = case(
        6, 2, 64, [5, 1, 1], [9, 30, 4], 16, True, 7
    )
    monkeypatch.setattr(c_code, "library", lambda name: None)
    metadata = SimpleNamespace(query_start_loc=starts, seq_lens=lengths, block_table=table)
    out = torch.zeros_like(query)
    cpu_attention._attend_requests(query, cache, scales, metadata, scale, window, out)
    assert torch.equal(out, expected)
