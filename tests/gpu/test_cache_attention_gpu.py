"""Attention over an FP8 cache on a GPU: decoding and prompts against float64, alone and in one batch, in graphs too."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.decode_cases import Case, expected, packed_case
from tests.tolerances import DECODE_ATTENTION, TE_DECIBELS

HEAD_DIMS = (64, 96, 128, 256)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("heads", [(32, 8, 128), (32, 4, 128), (16, 1, 64), (12, 2, 64)], ids=str)
@pytest.mark.parametrize("num_sequences", [4, 40, 300])
def test_decoding(heads, num_sequences):
    """Sequences of no token, of one, and up to five parts."""
    from megatron_fp8rl.kernels.triton.attention import decode

    lengths = torch.randint(1, 1400, (num_sequences,), generator=torch.Generator().manual_seed(0)).tolist()
    lengths[:3] = [5000, 0, 1]
    case = Case.drawn(heads, lengths=lengths, page_tokens=16, device="cuda")
    out = torch.full_like(case.query, 7.0)
    decode(case.query, case.cache, case.pages, case.lengths, case.key_scale, case.value_scale, case.softmax_scale, out)
    torch.testing.assert_close(out.double(), expected(case), **DECODE_ATTENTION)


def test_a_captured_graph_reads_new_lengths_and_new_scales():
    from megatron_fp8rl.kernels.triton.attention import decode

    case = Case.drawn((32, 8, 128), lengths=(700, 900, 64, 1), page_tokens=16, device="cuda")
    out = torch.empty_like(case.query)

    def run():
        decode(
            case.query, case.cache, case.pages, case.lengths, case.key_scale, case.value_scale, case.softmax_scale, out
        )

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    case.lengths.sub_(torch.tensor([100, 30, 1, 1], device="cuda", dtype=torch.int32))
    case.key_scale.mul_(2)
    graph.replay()
    torch.testing.assert_close(out.double(), expected(case), **DECODE_ATTENTION)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("counts", [(1, 5, 1, 130, 1), (64, 3), (1, 1)], ids=str)
def test_a_batch_of_prompts_and_decoding_is_each_alone(counts, window, monkeypatch):
    """Every token of a prompt attends as if it were decoded; copies of two prompts do not fit together."""
    from megatron_fp8rl.rollout.vllm_plugin import patches_attention

    monkeypatch.setattr(patches_attention, "_COPIED_TOKENS", 512)
    heads, before = (32, 8, 128), (700, 0, 40, 300, 0)[: len(counts)]
    lengths = [b + n for b, n in zip(before, counts)]
    case = Case.drawn(heads, lengths=lengths, page_tokens=16, device="cuda")
    starts = torch.tensor([0, *counts]).cumsum(0)
    rows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).cuda()
    ends = torch.cat([torch.arange(b + 1, n + 1) for b, n in zip(before, lengths)]).int().cuda()
    query = torch.randn(int(starts[-1]), *case.query.shape[1:], device="cuda").bfloat16()
    alone = Case(query, case.cache, case.pages[rows], ends, case.key_scale, case.value_scale, case.softmax_scale)

    impl = object.__new__(patches_attention.FP8CacheAttention)
    impl.__dict__.update(scale=case.softmax_scale, head_size=heads[2], vllm_flash_attn_version=3, window=window)
    metadata = SimpleNamespace(
        num_actual_tokens=len(query),
        max_query_len=max(counts),
        block_table=case.pages,
        seq_lens=case.lengths,
        parts=patches_attention.parts_of(counts, lengths, case.lengths.device),
    )
    assert sum(part.num_copied for part in metadata.parts) == sum(lengths)
    assert all(part.num_copied <= 512 or len(part.rows) == 1 for part in metadata.parts if part.max_query > 1)
    layer = SimpleNamespace(_k_scale=case.key_scale, _v_scale=case.value_scale)
    padded, out = (torch.zeros(len(query) + 3, *query.shape[1:], device="cuda").bfloat16() for _ in range(2))
    padded[: len(query)] = query
    impl.forward(layer, padded, None, None, case.cache.transpose(1, 2), metadata, out)
    torch.testing.assert_close(out[: len(query)].double(), expected(alone, window), **DECODE_ATTENTION)
    assert not out[len(query) :].any()
    assert torch.equal(out[: len(query)], _decoded(alone, window=window))  # prompts have the bits of decoding


def _decoded(case: Case, parts_of_a_program: int | None = None, window: int | None = None) -> torch.Tensor:
    from megatron_fp8rl.kernels.triton.attention import decode

    out = torch.full_like(case.query, 7.0)
    scales = case.key_scale, case.value_scale, case.softmax_scale
    decode(case.query, case.cache, case.pages, case.lengths, *scales, out, parts_of_a_program, window)
    return out


HEADS = [(32, 8, 128), (32, 4, 128), (16, 1, 128), (9, 3, 128), (8, 8, 128), (16, 2, 64)]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("before, counts", [((700, 0, 40, 0, 1500), (5, 130, 1, 3, 600)), ((0,), (2100,))], ids=str)
def test_packed_queries_have_the_bits_of_decoding(heads, before, counts):
    """At every position in a chunk and a part, and however many parts a program decodes."""
    from megatron_fp8rl.kernels.triton.attention import packed

    each, arguments = packed_case(heads, before, counts, device="cuda")
    out, _ = packed(**arguments)
    for parts_of_a_program in (1, 2, 4):
        assert torch.equal(out, _decoded(each, parts_of_a_program))
    torch.testing.assert_close(out.double(), expected(each), **DECODE_ATTENTION)


# (query heads of a group, window)
WINDOWS = [
    (1, 1),
    (1, 512),
    (2, 127),
    (2, 4096),
    (4, 127),
    (4, 4096),
    (8, 1),
    (8, 128),
    (12, 129),
    (16, 129),
    (16, 512),
]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group, window", [*WINDOWS, (1, None), (16, None)])
def test_packed_queries_have_the_bits_of_decoding_in_windows(head_dim, group, window):
    """A sequence of 5,000 tokens, and one of 700 new tokens after 1,500."""
    from megatron_fp8rl.kernels.triton.attention import packed

    each, arguments = packed_case((2 * group, 2, head_dim), (0, 1500), (5000, 700), device="cuda")
    out, log_sums = packed(**arguments, window=window)
    for parts_of_a_program in (1, 4):
        decoded = _decoded(each, parts_of_a_program, window)
        rows = (out != decoded).any(-1).any(-1).nonzero().flatten().tolist()
        assert not rows, f"{len(rows)} of {len(out)} queries differ, the first ones at {rows[:5]}"
    some = slice(0, None, 97)
    few = replace(each, query=each.query[some], pages=each.pages[some], lengths=each.lengths[some])
    torch.testing.assert_close(out[some].double(), expected(few, window), **DECODE_ATTENTION)
    assert log_sums.isfinite().all()


def test_the_bits_depend_neither_on_the_batch_nor_on_the_length_of_others():
    """Sequences of 1 to 40,000 tokens, alone and among 512."""
    lengths = [1, 2, 127, 128, 129, 511, 512, 513, 4097, 40_000] + [300] * 502
    case = Case.drawn((16, 2, 128), lengths=lengths, page_tokens=16, device="cuda")
    together = _decoded(case)
    for i in range(10):
        row = slice(i, i + 1)
        alone = Case(
            case.query[row], case.cache, case.pages[row], case.lengths[row], case.key_scale, case.value_scale,
            case.softmax_scale,
        )  # fmt: skip
        assert torch.equal(_decoded(alone), together[row]), lengths[i]


@pytest.mark.parametrize("head_dim, window", [(128, None), *((head_dim, 129) for head_dim in HEAD_DIMS)])
def test_the_trainers_forward_pass_has_the_bits_of_decoding_and_cudnns_gradients(head_dim, window):
    from megatron_fp8rl.kernels.kv_rounding import as_cached, to_cache
    from megatron_fp8rl.trainer.model import attention_te
    from megatron_fp8rl.trainer.model.packed_sequences import plan_pack

    lengths, heads = (700, 1, 515), (32, 8, head_dim)
    scales = torch.tensor([1.0, 2.0**-6, 2.0**-5], device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value = (
        torch.randn(sum(lengths), n, heads[2], generator=generator, device="cuda").bfloat16() for n in (32, 8, 8)
    )
    key, value = as_cached(key, scales[1]), as_cached(value, scales[2])
    tensors = [x.requires_grad_() for x in (query, key, value)]
    segments = plan_pack(lengths, 1, 0, torch.device("cuda")).segments
    results = []
    for forward in (attention_te.by_cache_attention, attention_te.by_cudnn):
        assert attention_te.supports(*tensors, segments, window)
        out = attention_te.attend(*tensors, segments, heads[2] ** -0.5, scales, window, forward=forward)
        results.append((out.detach(), *torch.autograd.grad(out.float().square().sum(), tensors)))
    for actual, reference in zip(*results):
        error = (actual.double() - reference.double()).norm() / reference.double().norm()
        assert error < 10 ** (-TE_DECIBELS / 20), float(error)

    page = torch.cat([to_cache(key, scales[1]), to_cache(value, scales[2])], dim=-1).view(torch.uint8).detach()
    starts = torch.tensor([0, 700, 701])
    rows = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    num_keys = torch.arange(sum(lengths)) - starts[rows] + 1
    pages = (starts[rows][:, None] + torch.arange(700).clamp(max=699)).clamp(max=sum(lengths) - 1)
    tensors = query.detach(), page[:, None], pages.int().cuda(), num_keys.int().cuda()
    each = Case(*tensors, scales[1:2], scales[2:], head_dim**-0.5)
    assert torch.equal(results[0][0], _decoded(each, window=window))
