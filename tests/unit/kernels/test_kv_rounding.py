"""Rounding to an FP8 KV cache: every value of E4M3 stays, others go to the nearest, gradients pass."""

import pytest
import torch

from megatron_fp8rl.kernels.kv_rounding import as_cached, to_cache

ALL = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
FINITE = ALL[torch.isfinite(ALL.float())]


@pytest.mark.parametrize("scale", [2.0**-10, 1.0, 2.0**5])
def test_what_a_cache_holds_stays(scale):
    held = (FINITE.float() * scale).bfloat16()
    scales = torch.tensor(scale)
    assert torch.equal(to_cache(held, scales).view(torch.uint8), FINITE.view(torch.uint8))
    assert torch.equal(as_cached(held, scales), held)


def test_others_go_to_the_nearest():
    torch.manual_seed(0)
    x = torch.cat([torch.randn(4_000) * 30, torch.tensor([-1e6, 1e6, 0.0])]).bfloat16()
    scale = 2.0**-3
    held = FINITE.double() * scale
    error = (x.double() - to_cache(x, scale).double() * scale).abs()
    assert torch.equal(error, (x.double()[:, None] - held).abs().amin(dim=1))


def test_gradients_pass_straight_through():
    x = torch.tensor([0.3, 1000.0, -2000.0], requires_grad=True)
    out = as_cached(x, torch.tensor(1.0))
    assert out.tolist() == [0.3125, 448.0, -448.0]
    (out * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert x.grad.tolist() == [1.0, 2.0, 3.0]
