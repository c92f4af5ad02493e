"""RMSNorm with an order-independent sum: in Triton's interpreter against integers in torch, and compiled for Hopper."""

import re

import pytest
import torch

from megatron_fp8rl.kernels.blockwise import quantize_activation
from tests.helpers.compiled import compile_kernel
from tests.helpers.interpreter import INTERPRETED, assert_passes_interpreted, in_interpreter, starts_interpreter

EPS = 1e-6
SHAPES = [(5, 2048), (3, 1300), (40, 128), (7, 64), (1, 576)]


@pytest.mark.slow
@starts_interpreter
def test_in_the_interpreter():
    assert_passes_interpreted(__file__)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """BF16 numbers, a few of them a thousand times larger than the others, and a row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.where(torch.rand(shape, generator=generator) < 0.01, 1000, 1)
    x[-1] = 0
    return x.bfloat16()


def inverse_of(x: torch.Tensor) -> torch.Tensor:
    """float32 [rows]: the definition in torch, with integers in any order."""
    largest = x.float().abs().amax(-1, keepdim=True).clamp(min=2.0**-126)
    power = torch.exp2(torch.frexp(largest).exponent.float() - 1).clamp(max=2.0**126)
    part = (x.float() / power).square()
    total = (part.double() * 2.0**38).long().flip(-1).sum(-1)
    variance = (total.float() / x.shape[-1]) / 2.0**38 * power[..., 0] * power[..., 0]
    root = (variance + EPS).double().sqrt().float()  # torch's own float32 functions may miss the last bit
    return root.double().reciprocal().float()


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x.float() * inverse_of(x)[..., None] * weight.float()).bfloat16()


def weight_of(width: int) -> torch.Tensor:
    return (1 + torch.randn(width, generator=torch.Generator().manual_seed(9)) / 4).bfloat16()


@in_interpreter
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_follow_from_integers(shape):
    from megatron_fp8rl.kernels.triton.norm import rms_norm

    x, weight = numbers(*shape), weight_of(shape[-1])
    actual, inverse = rms_norm(x, weight, EPS)
    assert torch.equal(inverse, inverse_of(x)) and torch.equal(actual, normed(x, weight))
    exact = (x.double().square().mean(-1) + EPS).rsqrt()
    torch.testing.assert_close(inverse.double(), exact, rtol=3e-7, atol=0)
    order = torch.randperm(shape[-1], generator=torch.Generator().manual_seed(3))
    assert torch.equal(rms_norm(x[:, order], weight, EPS)[1], inverse)


@in_interpreter
def test_zero_centred_weights_are_added_to_one_in_float32():
    from megatron_fp8rl.kernels.triton.norm import one_plus, rms_norm

    x, weight = numbers(5, 320), (weight_of(320) / 100).bfloat16()
    assert torch.equal(rms_norm(x, one_plus(weight), EPS)[0], normed(x, 1 + weight.float()))


@in_interpreter
def test_heads_of_a_wider_tensor():
    from megatron_fp8rl.kernels.triton.norm import rms_norm

    projection, weight = numbers(6, 5 * 64), weight_of(64)
    heads = projection[:, 64:256].unflatten(1, (3, 64))
    actual, inverse = rms_norm(heads, weight, EPS)
    assert actual.is_contiguous() and torch.equal(actual, normed(heads, weight))
    assert torch.equal(inverse, inverse_of(heads).flatten())


@in_interpreter
@pytest.mark.parametrize("largest", [2.0**-133, 2.0**-60, 2.0**60, 2.0**127])
def test_magnitudes_at_the_ends_of_the_range(largest):
    from megatron_fp8rl.kernels.triton.norm import rms_norm

    x = (torch.tensor([[1.0, -0.5, 0.25, 0.0]]) * largest).bfloat16()
    _, inverse = rms_norm(x, weight_of(4), EPS)
    exact = (x.double().square().mean(-1) + EPS).rsqrt().float()
    torch.testing.assert_close(inverse, exact, rtol=3e-7, atol=1e-19)  # above 2^64, a square is infinite in float32


@in_interpreter
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_row_that_is_not_finite_is_nan(value):
    from megatron_fp8rl.kernels.triton.norm import rms_norm

    x = numbers(3, 256)
    x[1, 7] = value
    actual, inverse = rms_norm(x, weight_of(256), EPS)
    assert actual.isnan().any(-1).tolist() == inverse.isnan().tolist() == [False, True, False]


@in_interpreter
@pytest.mark.parametrize("kind", ["pow2", "fp32"])
@pytest.mark.parametrize("shape", [(5, 256), (8, 200)], ids=str)
def test_a_residual_sum_and_quantization_in_the_same_launch(kind, shape):
    from megatron_fp8rl.kernels.triton.norm import add_and_norm, norm_quantize

    (rows, width), weight = shape, weight_of(shape[1])
    x, residual = numbers(*shape), numbers(*shape, seed=1)
    total, stream, again = x + residual, residual.clone(), residual.clone()
    blocks = -(-width // 128)
    data, scales = torch.empty(shape, dtype=torch.float8_e4m3fn), torch.empty(blocks, rows).t()
    out = torch.empty_like(x)
    norm_quantize(x, weight, EPS, data, scales, kind, stream, out)
    assert torch.equal(stream, total) and torch.equal(out, normed(total, weight))
    expected, expected_scales = quantize_activation(out, kind)
    assert torch.equal(scales, expected_scales) and torch.equal(data.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(add_and_norm(x, weight, EPS, again), out) and torch.equal(again, total)


@in_interpreter
def test_no_row_at_all():
    from megatron_fp8rl.kernels.triton.norm import rms_norm

    actual, inverse = rms_norm(torch.zeros(0, 3, 64).bfloat16(), weight_of(64), EPS)
    assert actual.shape == (0, 3, 64) and inverse.shape == (0,)


@in_interpreter
def test_what_would_be_misread_is_refused():
    from megatron_fp8rl.kernels.triton.norm import norm_quantize, rms_norm

    x, weight = numbers(2, 256), weight_of(256)
    with pytest.raises(ValueError, match=r"BF16 rows are needed, not torch.float32 \[2, 256\]"):
        rms_norm(x.float(), weight, EPS)
    with pytest.raises(ValueError, match="contiguous tensors are needed"):
        rms_norm(x, weight_of(512)[::2], EPS)
    with pytest.raises(ValueError, match=r"scales: float32 \[2, 2\] are needed, not torch.float32 \[2, 1\]"):
        norm_quantize(x, weight, EPS, x.to(torch.float8_e4m3fn), torch.empty(2, 1), "pow2")


_TYPES = {"x": "*bf16", "residual": "*bf16", "weight": "*bf16", "out": "*bf16", "inverses": "*fp32", "data": "*u8"}
_TYPES |= {"scales": "*i32", "eps": "fp32"}
_FORM = {"BLOCKS": 16, "ADDS": True, "WRITES": True, "KEEPS": True, "QUANTIZES": True, "POW2": True, "HARDWARE": True}


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels do not compile")
@pytest.mark.parametrize("warps", [1, 8])
def test_square_root_and_quotients_are_rounded_correctly(warps):
    """Compilers may fuse or approximate; sums of integers and correctly rounded operations have one result."""
    from megatron_fp8rl.kernels.triton.norm import _norm

    ptx = compile_kernel(_norm, _TYPES, _FORM, default="i32", is_aligned=lambda *_: True, num_warps=warps)["ptx"]
    assert "sqrt.rn.f32" in ptx and "div.rn.f32" in ptx
    assert not re.search(r"(sqrt|rsqrt|div|rcp)\.(approx|full)|add\.f32.*shfl", ptx)
    assert "cvt.rzi.s64.f32" in ptx and "cvt.rn.f32.s64" in ptx and "ld.global.v4.b32" in ptx
