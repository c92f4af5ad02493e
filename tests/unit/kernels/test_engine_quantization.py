"""An engine's norms and SwiGLU with the quantization of their output: in Triton's interpreter against the definition."""

import numpy
import pytest
import torch

from megatron_fp8rl.kernels.blockwise import dequantize_activation, quantize_activation
from megatron_fp8rl.kernels.types import BLOCK
from tests.helpers.interpreter import assert_passes_interpreted, in_interpreter, starts_interpreter

EPS = 1e-6


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm in float64 but for the factor, rounded to BF16."""
    number = x.double()
    return (number * (number.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()).bfloat16()


def empty(num_rows: int, num_columns: int, aligned: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes, and scales as vLLM's compiler allocates them: transposed, with columns aligned to 16 bytes or not."""
    blocks, rows = -(-num_columns // BLOCK), -(-num_rows // 4) * 4 if aligned else num_rows
    data = torch.empty(num_rows, num_columns, dtype=torch.float8_e4m3fn)
    return data, torch.full((blocks, rows), -1.0).t()[:num_rows]


@starts_interpreter
def test_in_the_interpreter():
    assert_passes_interpreted(__file__)


@in_interpreter
@pytest.mark.parametrize("scales", ["pow2", "fp32"])
@pytest.mark.parametrize(("num_rows", "width"), [(5, 256), (1, 384), (8, 200)])
@pytest.mark.parametrize("adds", [False, True], ids=["plain", "with a residual"])
def test_norms_give_the_bytes_of_the_rounded_norm(scales, num_rows, width, adds):
    from megatron_fp8rl.kernels.triton.quantize_activations import norm_quantize

    draw = torch.Generator().manual_seed(width)
    wide = torch.randn(num_rows, width + 56, generator=draw).bfloat16()
    x, weight = wide[:, :width], torch.rand(width, generator=draw).bfloat16()
    residual = torch.randn(num_rows, width, generator=draw).bfloat16() if adds else None
    total = x if residual is None else x + residual
    data, scale = empty(num_rows, width, aligned=num_rows == 5)
    norm_quantize(x, weight, EPS, data, scale, scales, residual)
    assert residual is None or torch.equal(residual, total)
    expected, expected_scale = quantize_activation(norm(total, weight), scales)
    # A float32 sum may make another BF16 number of one, and that another scale where it is the largest of its block.
    assert torch.isclose(scale, expected_scale, rtol=2**-7 if scales == "fp32" else 0).float().mean() > 0.9
    values, wanted = dequantize_activation(data, scale), dequantize_activation(expected, expected_scale)
    assert (values == wanted).float().mean() > (0.98 if scales == "pow2" else 0.5)
    torch.testing.assert_close(values, wanted, rtol=0.13, atol=1e-3)


@in_interpreter
@pytest.mark.parametrize("scales", ["pow2", "fp32"])
def test_swiglu_gives_the_bytes_of_the_rounded_activation(scales):
    from megatron_fp8rl.kernels.triton.quantize_activations import swiglu_quantize

    h = (4 * torch.randn(21, 768, generator=torch.Generator().manual_seed(2))).bfloat16()
    h[3] = 0
    data, scale = empty(21, 384, aligned=True)
    swiglu_quantize(h, data, scale, scales)
    gate, up = h.float().chunk(2, 1)
    divisor = 1.0 + torch.from_numpy(numpy.exp((-gate).contiguous().numpy()))  # the interpreter's exp
    expected, expected_scale = quantize_activation((gate / divisor).bfloat16() * up.bfloat16(), scales)
    assert torch.equal(scale, expected_scale) and (scale[3] == 1).all()
    assert torch.equal(data.view(torch.uint8), expected.view(torch.uint8))


@in_interpreter
def test_what_is_not_finite_makes_its_block_nan():
    from megatron_fp8rl.kernels.triton.quantize_activations import swiglu_quantize

    h = torch.ones(2, 512).bfloat16()
    h[1, 130] = torch.nan
    data, scale = empty(2, 256)
    swiglu_quantize(h, data, scale, "pow2")
    assert scale.isnan().nonzero().tolist() == [[1, 1]]
    assert data.float().isnan().sum() == BLOCK


@in_interpreter
def test_what_would_be_misread_is_refused():
    from megatron_fp8rl.kernels.triton.quantize_activations import norm_quantize, swiglu_quantize

    x, (data, scale) = torch.ones(2, 256).bfloat16(), empty(2, 256)
    with pytest.raises(ValueError, match=r"BF16 rows are needed, not torch.float32 \[2, 256\]"):
        norm_quantize(x.float(), x[0], EPS, data, scale, "pow2")
    with pytest.raises(ValueError, match=r"scales: float32 \[2, 2\] are needed, not torch.float32 \[2, 1\]"):
        norm_quantize(x, x[0], EPS, data, scale[:, :1], "pow2")
    with pytest.raises(ValueError, match=r"F a multiple of 128, not \[2, 256\] and \[2, 256\]"):
        swiglu_quantize(x, data, scale, "pow2")
