"""The rotation's kernel on a GPU against torch on a CPU, bit for bit; -s shows its speed."""

import pytest
import torch

from megatron_fp8rl.trainer.model.rotary import Rotary

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize(
    "width, first, rotated, heads, interleaved",
    [
        *((128, 0, 128, 32, False), (128, 0, 64, 3, False), (128, 0, 96, 24, False)),
        *((192, 128, 64, 20, True), (40, 0, 40, 17, True)),
    ],
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


def separately(mixed, groups, norms, eps, rotary, cos, sin):
    """The steps of ``split_heads`` one by one."""
    from megatron_fp8rl.trainer.model.norm import te_rms_norm

    width = 2 * cos.shape[-1]
    heads = mixed.unflatten(1, (groups, -1, width))
    query, key, value = (part.flatten(1, 2) for part in heads.split([heads.shape[2] - 2, 1, 1], dim=2))
    query, key = (te_rms_norm(x.contiguous(), weight, eps) for x, weight in zip((query, key), norms))
    return rotary.rotate(query, cos, sin), rotary.rotate(key, cos, sin), value.contiguous()


def test_heads_in_one_piece_are_those_of_one_after_the_other():
    """Heads and gradients by one kernel and by Transformer Engine's norms and the rotation; prints what each takes."""
    from benchmarks.timing import milliseconds
    from megatron_fp8rl.kernels.triton.rotate import split_heads

    tokens, groups, queries, width, eps = 16_384, 4, 8, 128, 1e-6
    rotary = Rotary(num_features=width, first_feature=0, theta=1e4, scaling=None, interleaved=False)
    mixed = torch.randn(tokens, groups * (queries + 2) * width, device="cuda").bfloat16().requires_grad_()
    norms = tuple((1 + torch.randn(width, device="cuda")).bfloat16().requires_grad_() for _ in range(2))
    angles = torch.randn(tokens, 1, width // 2, device="cuda") * 9
    cos, sin = (table.bfloat16().float() for table in (angles.cos(), angles.sin()))
    grads = [torch.randn(tokens, n, width, device="cuda").bfloat16() for n in (groups * queries, groups, groups)]
    ways = {
        "one piece": lambda: split_heads(mixed, groups, norms, eps, cos, sin),
        "one by one": lambda: separately(mixed, groups, norms, eps, rotary, cos, sin),
    }
    actual = []
    for name, way in ways.items():
        out = way()
        actual.append([*out, *torch.autograd.grad(out, (mixed, *norms), grads, retain_graph=True)])
        forward = milliseconds(way, 20)
        both = milliseconds(lambda: torch.autograd.grad(way(), (mixed, *norms), grads), 20)
        print(f"\n{name}: forward {forward:.3f} ms, with backward {both:.3f} ms", end="")
    for ours, theirs in zip(*actual, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        away = (ours.float() - theirs.float()).norm() / theirs.float().norm()
        assert away < 2e-3, away
