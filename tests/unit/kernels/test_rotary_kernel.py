"""Kernels that rotate, split and norm heads, against torch: in Triton's interpreter, and compiled for a Hopper GPU."""

from pathlib import Path

import pytest
import torch

from megatron_fp8rl.kernels.float64 import rotate_halves
from megatron_fp8rl.trainer.model.rotary import Rotary
from tests.helpers.compiled import compile_kernel, register_report
from tests.helpers.interpreter import INTERPRETED, assert_passes_interpreted, in_interpreter, starts_interpreter

# (features of a head, first rotated one, rotated ones, heads, pairs are neighbours)
ROTATIONS = {
    "whole heads": (128, 0, 128, 32, False),
    "few heads of an odd number": (64, 0, 64, 3, False),
    "half of each": (96, 0, 48, 20, False),
    "the last part, neighbours": (192, 128, 64, 5, True),
    "neighbours alone": (40, 0, 40, 17, True),
}


@pytest.mark.slow
@starts_interpreter
def test_in_the_interpreter():
    assert_passes_interpreted(__file__, deadline_s=400.0)


def rotation(name: str):
    """(heads in a wider tensor, as a fused projection leaves them; cosines; sines; gradient; the rotary of torch)."""
    width, first, rotated, heads, interleaved = ROTATIONS[name]
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(7, heads, width + 8, generator=generator).bfloat16().requires_grad_()
    angles = torch.randn(7, 1, rotated // 2, generator=generator) * 9
    cos, sin = (table.bfloat16().float() for table in (angles.cos(), angles.sin()))
    rotary = Rotary(num_features=rotated, first_feature=first, theta=1e4, scaling=None, interleaved=interleaved)
    return wide, cos, sin, torch.randn(7, heads, width, generator=generator).bfloat16(), rotary


@in_interpreter
@pytest.mark.parametrize("name", ROTATIONS)
def test_bits_are_those_of_torch(name):
    from megatron_fp8rl.kernels.triton import rotate

    wide, cos, sin, grad, rotary = rotation(name)
    x = wide[..., : grad.shape[-1]]
    expected = rotary.rotate(x, cos, sin)
    actual = rotate.rotate(x, cos, sin, rotary.first_feature, rotary.interleaved)
    assert torch.equal(actual, expected) and actual.dtype == torch.bfloat16 and actual.is_contiguous()
    strided = grad.transpose(0, 1).contiguous().transpose(0, 1)
    for gradient in (grad, strided):
        ours, theirs = (torch.autograd.grad(y, wide, gradient, retain_graph=True)[0] for y in (actual, expected))
        assert torch.equal(ours, theirs)


@in_interpreter
def test_no_token_at_all():
    from megatron_fp8rl.kernels.triton import rotate

    nothing = torch.zeros(0, 1, 8)
    assert rotate.rotate(torch.zeros(0, 4, 16).bfloat16(), nothing, nothing, 0, False).shape == (0, 4, 16)


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels do not compile")
def test_products_are_not_fused_with_sums(tmp_path: Path):
    from megatron_fp8rl.kernels.triton.rotate import _rotate_heads

    types = {"x": "*bf16", "out": "*bf16", "cos": "*fp32", "sin": "*fp32"}
    constants = dict(WIDTH=128, FIRST=0, HALF=64, HALF_UP=64, WIDTH_UP=128, IN_STEP=1, IN_RIGHT=64, OUT_STEP=1)
    constants |= dict(OUT_RIGHT=64, BACKWARD=False, HEADS=16, HARDWARE=True)
    how = dict(default="i32", is_aligned=lambda name, kind: True, num_warps=4, enable_fp_fusion=False)
    ptx = compile_kernel(_rotate_heads, types, constants, **how)["ptx"]
    assert "fma.rn.f32" not in ptx and "mul" in ptx
    assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx
    output = register_report(ptx, tmp_path, "--fmad=false")
    assert " 0 bytes spill stores" in output, output


# (tokens, key heads, query heads of each, features of a head)
HEADS = {
    "many queries": (37, 2, 8, 128),
    "one query": (16, 3, 1, 64),
    "one group": (5, 1, 5, 32),
    "no token": (0, 2, 2, 32),
}
EPS = 1e-6


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def norm(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """RMSNorm of float32 heads, rounded once to BF16."""
    if weight is None:
        return x
    return rounded(x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.float())


def heads_case(name: str, has_norms: bool):
    tokens, groups, queries, width = HEADS[name]
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    mixed = draw(tokens, groups * (queries + 2) * width).requires_grad_()
    norms = tuple((1 + draw(width)).requires_grad_() for _ in range(2)) if has_norms else None
    angles = torch.randn(tokens, 1, width // 2, generator=generator) * 9
    cos, sin = (table.bfloat16().float() for table in (angles.cos(), angles.sin()))
    grads = draw(tokens, groups * queries, width), draw(tokens, groups, width), draw(tokens, groups, width)
    return mixed, groups, norms, cos, sin, grads


def expected(mixed, groups, norms, cos, sin, grads):
    """Heads and gradients by torch in float32, rounded to BF16 where the kernel rounds."""
    width = grads[0].shape[-1]
    heads = mixed.detach().float().unflatten(1, (groups, -1, width))
    query, key, value = (part.flatten(1, 2).requires_grad_() for part in heads.split([heads.shape[2] - 2, 1, 1], dim=2))
    weights = (None, None) if norms is None else tuple(weight.detach().float().requires_grad_() for weight in norms)
    normed = [norm(x, weight) for x, weight in zip((query, key), weights)]
    out = [rotate_halves(x.bfloat16(), cos, sin) for x in normed] + [value.detach().bfloat16()]
    turned = [rotate_halves(grad, cos, -sin).float() for grad in grads[:2]]
    wanted = [x for x in (query, key, *weights) if x is not None]
    plain = [
        x if w is None else x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * w
        for x, w in zip((query, key), weights)
    ]
    result = torch.autograd.grad(plain, wanted, turned)
    parts = (*result[:2], grads[2].float())
    dmixed = torch.cat([part.unflatten(1, (groups, -1)) for part in parts], dim=2).flatten(1)
    return out, dmixed, result[2:]


def assert_close(actual: torch.Tensor, wanted: torch.Tensor, share: float = 0.01) -> None:
    """Equal but for one in a hundred values, which may be the next BF16 number."""
    assert actual.dtype == torch.bfloat16 and actual.shape == wanted.shape
    torch.testing.assert_close(actual.float(), wanted.float(), rtol=2**-7, atol=2**-9)
    if actual.numel():
        assert (actual != wanted.bfloat16()).float().mean() <= share


@in_interpreter
@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("name", HEADS)
def test_heads_and_gradients_are_those_of_torch(name, has_norms):
    from megatron_fp8rl.kernels.triton import rotate

    mixed, groups, norms, cos, sin, grads = heads_case(name, has_norms)
    actual = rotate.split_heads(mixed, groups, norms, EPS, cos, sin)
    heads, dmixed, dweights = expected(mixed, groups, norms, cos, sin, grads)
    for ours, theirs in zip(actual, heads, strict=True):
        assert ours.is_contiguous()
        assert_close(ours, theirs, 0.01 if has_norms else 0.0)
    strided = [grad.transpose(0, 1).contiguous().transpose(0, 1) for grad in grads]
    for gradients in (grads, strided):
        ours, *of_weights = torch.autograd.grad(actual, (mixed, *(norms or ())), gradients, retain_graph=True)
        assert_close(ours, dmixed, 0.02 if has_norms else 0.0)
        for one, theirs in zip(of_weights, dweights, strict=True):
            assert_close(one, theirs, 0.05)


@in_interpreter
@pytest.mark.parametrize("name", HEADS)
def test_every_kernel_gives_a_head_the_same_bits(name):
    """Split heads, heads of an engine's projection, and a norm followed by a rotation."""
    from megatron_fp8rl.kernels.triton import rotate
    from megatron_fp8rl.kernels.triton.norm import rms_norm

    mixed, groups, norms, cos, sin, _ = heads_case(name, True)
    tokens, _, queries, width = HEADS[name]
    mixed, norms = mixed.detach(), tuple(weight.detach() for weight in norms)
    actual = rotate.split_heads(mixed, groups, norms, EPS, cos, sin)
    heads = [part.flatten(1, 2) for part in mixed.unflatten(1, (groups, -1, width)).split([queries, 1, 1], dim=2)]
    for part, head, weight in zip(actual, heads, norms):
        assert torch.equal(part, rotate.rotate(rms_norm(head, weight, EPS)[0], cos, sin, 0, False))
    projection = torch.cat([head.flatten(1) for head in heads], dim=1)
    wide = torch.cat([projection, torch.zeros(tokens, 8).bfloat16()], dim=1)[:, : projection.shape[1]]
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(2))
    table = torch.cat([cos[:, 0], sin[:, 0]], dim=1)[order].bfloat16()  # row i has the angles of token order[i]
    rotate.norm_and_rotate_(wide, groups * queries, groups, norms, EPS, order.argsort(), table)
    assert torch.equal(wide, torch.cat([part.flatten(1) for part in actual], dim=1))


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels do not compile")
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("half", [32, 64, 128])
def test_it_compiles_without_spills(half, backward):
    from megatron_fp8rl.kernels.triton.rotate import _TOKENS, _split_heads

    types = dict(cos="*fp32", sin="*fp32", dweights="*fp32", num_tokens="i32", num_groups="i32", eps="fp32")
    constants = dict(QUERIES=8, HALF=half, TOKENS=_TOKENS, NORM=True, BACKWARD=backward, HARDWARE=True)
    how = dict(default="*bf16", num_warps=4, enable_fp_fusion=False)
    ptx = compile_kernel(_split_heads, types, constants, **how)["ptx"]
    vector = "v2" if half == 32 else "v4"  # a thread has 4 or more numbers of a half
    assert f"ld.global.{vector}.b32" in ptx and f"st.global.{vector}.b32" in ptx
    assert "fma.rn.f32" not in ptx and "ld.local" not in ptx
