"""The engine's attention on a CPU over a window, compared with the formula."""

from types import SimpleNamespace

import pytest
import torch

cpu_attention = pytest.importorskip("megatron_fp8rl.rollout.vllm_plugin.cpu.cpu_attention")


@pytest.mark.parametrize(
    ("impl_window", "expected"), [(-1, None), ((-1, -1), None), (3, 3), ((2, 0), 3), (1, 1), (100, 100)]
)
def test_a_token_attends_to_the_last_tokens_of_its_window(impl_window, expected):
    window = cpu_attention._window(SimpleNamespace(sliding_window=impl_window))
    assert window == expected
    generator = torch.Generator().manual_seed(0)
    lengths, counts, block, heads, width = (9, 5), (1, 5), 4, 2, 8
    cache = torch.randn(6, heads, block, 2 * width, generator=generator)
    table = torch.tensor([[0, 1, 2], [3, 4, 5]])
    query = torch.randn(sum(counts), heads, width, generator=generator)
    starts = torch.tensor([0, 1, 6])
    metadata = SimpleNamespace(query_start_loc=starts, seq_lens=torch.tensor(lengths), block_table=table)
    output = torch.empty_like(query)
    cpu_attention._attend_requests(query, cache, None, metadata, 0.5, window, output)
    for request, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        rows = cache[table[request]].transpose(1, 2).flatten(0, 1)[:length].double()  # [tokens, heads, 2 * width]
        for i in range(count):
            position = length - count + i
            first = 0 if window is None else max(0, position - window + 1)
            key, value = rows[first : position + 1].chunk(2, dim=-1)
            row = int(starts[request]) + i
            scores = (torch.einsum("hd,thd->ht", query[row].double(), key) * 0.5).softmax(-1)
            torch.testing.assert_close(output[row], torch.einsum("ht,thd->hd", scores, value).float())
