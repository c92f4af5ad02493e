"""Copies between fixed places: neighbours become one, types convert, strides are kept."""

import torch

from megatron_fp8rl.weight_sync.copies import Copies


def test_stacked_experts_are_one_copy():
    """Gate and up of four experts lie in the message as the kernel stacks them; a gap in the message ends a run."""
    stacked = torch.zeros(4, 256, 128).to(torch.float8_e4m3fn)
    message = torch.randint(0, 120, (4 * 256 * 128 + 64,), dtype=torch.uint8)
    pairs, size = [], 128 * 128
    for index in range(8):
        start = index * size + (64 if index >= 6 else 0)
        source = message[start : start + size].view(torch.float8_e4m3fn).view(128, 128)
        pairs.append((stacked[index // 2].split(128)[index % 2], source))
    copies = Copies(pairs[::-1])
    assert len(copies) == 2
    copies()
    expected = torch.cat([message[: 6 * size], message[6 * size + 64 :]])
    assert torch.equal(stacked.view(torch.uint8).reshape(-1), expected)
    message.zero_()
    copies()
    assert not stacked.view(torch.uint8).any()


def test_columns_conversions_and_odd_sizes():
    columns, router, odd = torch.zeros(8, 16), torch.zeros(4, 8), torch.zeros(7, dtype=torch.bfloat16)
    sources = torch.randn(8, 4), torch.randn(4, 8).bfloat16(), torch.randn(7).bfloat16()
    Copies([(columns[:, 4:8], sources[0]), (router, sources[1]), (odd, sources[2])])()
    assert torch.equal(columns[:, 4:8], sources[0]) and columns[:, :4].eq(0).all()
    assert torch.equal(router, sources[1].float())
    assert torch.equal(odd, sources[2])
