"""The rotation's kernel on a GPU against torch on a CPU, bit for bit; -s shows its speed."""

import pytest
import torch

from megatron_fp8rl.trainer.model.rotary import Rotary

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize(
    "width, first, rotated, heads, interleaved",
    [(128, 0, 128, 32, False), (128, 0, 64, 3, False), (192, 128, 64, 20, True), (40, 0, 40, 17, True)],
)
def test_bits_are_those_of_torch(width, first, rotated, heads, interleaved):
    rotary = Rotary(num_features=rotated, first_feature=first, theta=1e4, scaling=None, interleaved=interleaved)
    wide = torch.randn(333, heads, width + 8).bfloat16().requires_grad_()
    angles = torch.randn(333, 1, rotated // 2) * 9
    cos, sin = (table.bfloat16().float() for table in (angles.cos(), angles.sin()))
    grad, sides = torch.randn(333, heads, width).bfloat16(), []
    for device in ("cpu", "cuda"):
        x = wide.detach().to(device).requires_grad_()
        y = rotary.rotate(x[..., :width], cos.to(device), sin.to(device))
        sides.append((y.detach().cpu(), torch.autograd.grad(y, x, grad.to(device))[0].cpu()))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*sides))


def test_speed():
    """Prints what share of a copy's speed it reaches; says nothing about what it should be."""
    from benchmarks.timing import copy_bandwidth, milliseconds

    rotary = Rotary(num_features=128, first_feature=0, theta=1e4, scaling=None, interleaved=False)
    x = torch.randn(16_384, 32, 128, device="cuda").bfloat16()
    cos, sin = (torch.randn(16_384, 1, 64, device="cuda") for _ in range(2))
    ms = milliseconds(lambda: rotary.rotate(x, cos, sin), 20)
    num_bytes = 2 * x.numel() * 2 + 2 * cos.numel() * 4
    share = num_bytes / ms * 1e3 / copy_bandwidth()
    print(f"\nrotation of 16,384 x 32 x 128: {ms:.3f} ms, {share:.0%} of a copy's speed")
