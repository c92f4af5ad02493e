"""Rounding without bytes gives the numbers of quantizing and dequantizing, bit for bit."""

import pytest
import torch

from megatron_fp8rl.kernels import blockwise


def _spread(dtype: torch.dtype) -> torch.Tensor:
    """Values over the whole range of a block, its subnormals included, blocks of zeros and one with an infinity."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 300, generator=generator) * torch.exp2(torch.randint(-24, 4, (64, 300), generator=generator))
    x[3] = 0
    x[5, :128] = -0.0
    x[7, 200] = torch.inf
    x[9] *= 2.0**-100
    return x.to(dtype)


@pytest.mark.parametrize("scales", ["pow2", "fp32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equals_quantize_then_dequantize(scales, dtype):
    x = _spread(dtype)
    expected = blockwise.dequantize_activation(*blockwise.quantize_activation(x, scales))
    assert torch.equal(
        blockwise.round_activation(x, scales, torch.float32).nan_to_num(nan=12345.0), expected.nan_to_num(nan=12345.0)
    )


def test_every_e4m3_value_and_midpoint_rounds_as_the_cast():
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # 0 .. 448
    midpoints = (values[1:] + values[:-1]) / 2
    x = torch.cat([values, midpoints, -values, -midpoints, torch.tensor([448.0])])
    x = torch.nn.functional.pad(x, (0, -len(x) % 127)).view(-1, 127)
    x = torch.cat([x, torch.full((len(x), 1), 448.0)], dim=1)  # each block has scale 1
    assert torch.equal(blockwise.round_activation(x, "pow2", torch.float32), x.to(torch.float8_e4m3fn).float())
