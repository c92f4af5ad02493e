"""Comparison of quantized operands of grouped products."""

import torch

from megatron_fp8rl.kernels.types import ExpertPermutation, Quantized


def assert_equal(actual: Quantized, expected: Quantized, layout: ExpertPermutation) -> None:
    """Bytes, scales and numbers of all rows up to the end of the last expert."""
    end = int(layout.offsets[-1])
    for name in ("rows", "row_scales", "columns", "column_scales", "bf16"):
        ours, theirs = getattr(actual, name), getattr(expected, name)
        assert (ours is None) == (theirs is None), name
        if ours is None:
            continue
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, name
        assert not ours.numel() or ours.stride() == theirs.stride(), name
        if name.startswith("column"):
            ours, theirs = ours[: end // 128], theirs[: end // 128]
        else:
            ours, theirs = ours[:end], theirs[:end]
        if ours.dtype == torch.float8_e4m3fn:
            ours, theirs = ours.view(torch.uint8), theirs.view(torch.uint8)
            ours, theirs = (torch.where(x & 0x7F == 0x7F, 0x7F, x) for x in (ours, theirs))  # NaN has no sign
        differ = (ours != theirs) & ~(ours.isnan() & theirs.isnan())
        where = differ.nonzero()[:1].tolist()
        assert not differ.any(), f"{name}: {int(differ.sum())} of {differ.numel()}, first {where}"
