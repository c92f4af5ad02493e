"""Pages of keys: reading a segment's pages in the order of its table gives its keys."""

import pytest
import torch

from megatron_fp8rl.trainer.model.packed_sequences import CPU, PAGE_TOKENS, plan_pack


@pytest.mark.parametrize(("lengths", "cp_size"), [((1, 16, 17, 40), 1), ((8, 72), 2)])
def test_pages_hold_the_keys_of_their_segment(lengths, cp_size):
    for rank in range(cp_size):
        segments = plan_pack(lengths, cp_size, rank, CPU).segments
        keys = torch.arange(int(segments.cu_keys[-1]))
        pages = segments.pages
        cache = keys[pages.rows].view(-1, PAGE_TOKENS)
        starts = segments.cu_keys.tolist()
        for table, num_keys, start, end in zip(pages.table, pages.num_keys, starts[:-1], starts[1:], strict=True):
            assert int(num_keys) == end - start
            assert torch.equal(cache[table.long()].flatten()[: end - start], keys[start:end])
