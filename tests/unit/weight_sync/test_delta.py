"""Deltas of bytes: applied they give the new bytes, over any gaps; damage is named and changes nothing; several join."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import zstandard

from megatron_fp8rl.kernels.blockwise import quantize_weight
from megatron_fp8rl.weight_sync import delta


def changed(base: torch.Tensor, places, seed: int = 0) -> torch.Tensor:
    new = base.clone()
    new[torch.tensor(places, dtype=torch.int64)] ^= torch.randint(1, 255, (len(places),), dtype=torch.uint8)
    return new


def random_bytes(num_bytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@pytest.mark.parametrize(
    "places",
    [
        [],
        [0],
        [199_999],
        [0, 1, 2, 70_000, 199_999],
        list(range(0, 200_000, 7)),
        [65_534],
        [65_535],
        [65_536],
        [0, 65_535 + 1],
        [0, 65_536 + 1],
    ],
)
def test_a_delta_gives_the_new_bytes(places):
    base = random_bytes(200_000, 1)
    new = changed(base, places)
    payload = delta.encode(base, new)
    held = base.clone()
    delta.apply(held, payload)
    assert torch.equal(held, new)
    found, _ = delta.decode(payload, len(base))
    assert found.tolist() == places
    assert len(payload) < 100 + 4 * len(places)


def test_what_changes_everywhere_is_not_sent_as_a_delta():
    assert delta.encode(random_bytes(10_000, 1), random_bytes(10_000, 2)) is None
    assert delta.encode(random_bytes(1, 1), random_bytes(1, 2)) is None


@pytest.mark.parametrize("damage", ["cut", "noise", "short", "long", "gap"])
def test_damage_is_named_and_changes_nothing(damage):
    base = random_bytes(5_000, 3)
    payload = delta.encode(base, changed(base, [5, 4_000]))
    pack = zstandard.ZstdCompressor().compress
    content = zstandard.ZstdDecompressor().decompress(payload)
    wrong = {
        "cut": payload[:-3],
        "noise": b"no delta at all",
        "short": pack(b"few"),
        "long": pack(content + b"x"),
        "gap": pack(np.array([1, 0], "<i8").tobytes() + np.array([6_000], "<u2").tobytes() + b"x"),
    }[damage]
    held = base.clone()
    with pytest.raises(delta.DeltaError):
        delta.apply(held, wrong)
    assert torch.equal(held, base)


def test_adam_moves_few_bytes_of_a_real_shape():
    """One step of size 1e-6 on weights of a trained model's spread: the arithmetic of docs/scale.md, on a smaller matrix."""
    generator = torch.Generator().manual_seed(4)
    master = torch.randn(1024, 2048, generator=generator) * 0.02
    step = 1e-6 * torch.randn(master.shape, generator=generator).clamp(-1, 1)
    before, after = (quantize_weight(weights.bfloat16(), "pow2") for weights in (master, master + step))
    share = (before[0].view(torch.uint8) != after[0].view(torch.uint8)).float().mean().item()
    # A step crosses the edge between two E4M3 numbers as often as it is long against their distance, which is at least
    # 2^-4 of a weight and ends at 2^-9 of its block's scale.
    scale = before[1].repeat_interleave(128, 0).repeat_interleave(128, 1)
    exponent = (master.abs() / scale).clamp_min(2.0**-6).log2().floor()
    expected = (step.abs() / (scale * 2.0 ** (exponent - 3))).clamp_max(1.0).mean().item()
    assert share == pytest.approx(expected, rel=0.05) and 1e-3 < share < 4e-3
    assert (before[1] == after[1]).all()
    base, new = (weights[0].view(torch.uint8).flatten() for weights in (before, after))
    assert len(delta.encode(base, new)) < 4 * share * base.numel()
