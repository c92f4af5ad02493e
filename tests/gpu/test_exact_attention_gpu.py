"""Attention over an FP8 cache on a GPU: decoding and prompts against float64, alone and in one batch, in graphs too."""

from types import SimpleNamespace

import pytest
import torch

from tests.helpers.decode_cases import Case, expected
from tests.tolerances import DECODE_ATTENTION, PROMPT_ATTENTION

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


@pytest.mark.parametrize("counts", [(1, 5, 1, 130, 1), (64, 3), (1, 1)], ids=str)
def test_a_batch_of_prompts_and_decoding_is_each_alone(counts, monkeypatch):
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
    impl.__dict__.update(scale=case.softmax_scale, head_size=heads[2], vllm_flash_attn_version=3)
    metadata = SimpleNamespace(
        num_actual_tokens=len(query),
        max_query_len=max(counts),
        block_table=case.pages,
        seq_lens=case.lengths,
        parts=patches_attention.parts_of(counts, lengths, case.lengths.device),
    )
    assert [len(part.rows) for part in metadata.parts if part.max_query > 1] == [1] * sum(n > 1 for n in counts)
    layer = SimpleNamespace(_k_scale=case.key_scale, _v_scale=case.value_scale)
    padded, out = (torch.zeros(len(query) + 3, *query.shape[1:], device="cuda").bfloat16() for _ in range(2))
    padded[: len(query)] = query
    impl.forward(layer, padded, None, None, case.cache.transpose(1, 2), metadata, out)
    torch.testing.assert_close(out[: len(query)].double(), expected(alone), **PROMPT_ATTENTION)
    decoded = torch.tensor(counts).repeat_interleave(torch.tensor(counts)) == 1
    torch.testing.assert_close(out[: len(query)][decoded].double(), expected(alone)[decoded], **DECODE_ATTENTION)
    assert not out[len(query) :].any()
