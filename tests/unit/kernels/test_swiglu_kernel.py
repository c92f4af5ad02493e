"""SwiGLU and the router's weight of experts on the linears' kernels: Triton's interpreter against torch and float64."""

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.interpreter import assert_passes_interpreted, in_interpreter, starts_interpreter

SIZES = [(19, 264), (8, 256), (1, 40), (5, 1)]  # (rows, features): parts of tiles, a whole one, less than one


@pytest.mark.slow
@starts_interpreter
def test_in_the_interpreter():
    assert_passes_interpreted(__file__)


def numbers(*shape: int, seed: int) -> torch.Tensor:
    """BF16 of magnitudes from 2^-6 to 2^5, and zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-6, 4, shape, generator=generator).float())
    x[:, ::7] = 0
    return x.clamp(-60, 60).bfloat16()


def assert_rounded_once(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Half a unit of BF16's last place, and float32's own errors, which are larger where terms cancel."""
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8 * 1.01, atol=1e-5)


@in_interpreter
@pytest.mark.parametrize("rows, width", SIZES)
def test_swiglu(rows, width):
    from megatron_fp8rl.kernels.triton import swiglu

    wide = numbers(rows, 2 * width + 8, seed=0).requires_grad_()
    h, grad = wide[:, : 2 * width], numbers(width, rows, seed=1).t()
    found = swiglu.swiglu(h)
    gate, up = h.detach().chunk(2, dim=1)
    expected = F.silu(gate) * up
    differ = found != expected  # exp of numpy and of torch may differ in the last bit of float32
    assert differ.float().mean() < 2e-3 and found.is_contiguous()
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)
    (ours,) = torch.autograd.grad(found, wide, grad)
    exact = h.detach().double().requires_grad_()
    gate, up = exact.chunk(2, dim=1)
    (theirs,) = torch.autograd.grad(F.silu(gate) * up, exact, grad.double())
    assert_rounded_once(ours[:, : 2 * width], theirs)
    assert not ours[:, 2 * width :].any()


@in_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, width", SIZES)
def test_the_routers_weight(rows, width, dtype):
    from megatron_fp8rl.kernels.triton import swiglu

    y, grad = numbers(rows, width, seed=0).requires_grad_(), numbers(width, rows, seed=1).t()
    probs = torch.rand(rows, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()
    found = swiglu.weighted(y, probs)
    expected = (y * probs[:, None]).to(y.dtype)
    assert torch.equal(found, expected)
    dy, dprobs = torch.autograd.grad(found, (y, probs), grad)
    assert torch.equal(dy, torch.autograd.grad(expected, y, grad)[0])
    exact = (y.detach().double() * grad.double()).sum(1)
    tolerance = 2**-8 if dtype == torch.bfloat16 else 2e-6
    bound = tolerance * (y.detach().double() * grad.double()).abs().sum(1)
    assert dprobs.dtype == dtype and ((dprobs.double() - exact).abs() <= bound).all()


@in_interpreter
def test_no_token_at_all():
    from megatron_fp8rl.kernels.triton import swiglu

    h, probs = torch.zeros(0, 64).bfloat16().requires_grad_(), torch.zeros(0).requires_grad_()
    out = swiglu.weighted(swiglu.swiglu(h), probs)
    out.sum().backward()
    assert out.shape == (0, 32) and h.grad.shape == (0, 64) and probs.grad.shape == (0,)
