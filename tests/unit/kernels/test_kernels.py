"""Kernels that quantize, in Triton's interpreter, against the definition in torch."""

import numpy
import pytest
import torch

from megatron_fp8rl.kernels import blockwise
from megatron_fp8rl.kernels.blockwise import quantize_activation
from megatron_fp8rl.kernels.types import BLOCK
from tests.helpers.interpreter import assert_passes_interpreted, in_interpreter, starts_interpreter


@starts_interpreter
def test_in_the_interpreter():
    assert_passes_interpreted(__file__, says="1 skipped", deadline_s=400.0)


def heavy_tailed(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    """Float32 numbers over many orders of magnitude, with exact ties between E4M3 numbers, a zero block's worth of
    zeros in front, and subnormal float32 numbers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randint(-14, 9, shape, generator=generator).float())
    x[: min(128, shape[0]), : min(128, shape[1])] = 0
    x[-1, -4:] = torch.tensor([448.0, 17.0, -19.0, 2.0**-10])
    if shape[0] > 256:
        x[128:256] *= 2.0**-140  # of float32, subnormal
    return x


def assert_equals_definition(weight: torch.Tensor, scales: str, data: torch.Tensor, scale: torch.Tensor) -> None:
    expected, expected_scale = blockwise.quantize_weight(weight, scales)
    assert torch.equal(scale.isnan(), expected_scale.isnan())
    assert torch.equal(scale.nan_to_num(-1), expected_scale.nan_to_num(-1))
    actual, expected = data.view(torch.uint8), expected.view(torch.uint8)
    is_nan = (expected & 0x7F) == 0x7F
    assert torch.equal((actual & 0x7F) == 0x7F, is_nan)
    assert torch.equal(actual[~is_nan], expected[~is_nan])  # NaN has no sign that means anything


@in_interpreter
@pytest.mark.parametrize("scales", ["pow2", "fp32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(256, 128), (300, 200), (5, 16)])
def test_bytes_and_scales_are_those_of_the_definition(shape, dtype, scales):
    from megatron_fp8rl.kernels.triton import quantize

    weight = heavy_tailed(shape).to(dtype)
    data, scale = quantize.quantize_weight(weight, scales)
    assert data.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    assert_equals_definition(weight, scales, data, scale)


@in_interpreter
@pytest.mark.parametrize("scales", ["pow2", "fp32"])
def test_every_bf16_number_in_a_block_whose_scale_is_one(scales):
    from megatron_fp8rl.kernels.triton import quantize

    numbers = torch.arange(0, 0x8000, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[numbers.float() <= 448.0]
    numbers = torch.cat([numbers, -numbers])
    weight = torch.nn.functional.pad(numbers, (0, -len(numbers) % 127), value=448.0).view(-1, 127)
    weight = torch.cat([weight, torch.full((len(weight), 1), 448.0, dtype=torch.bfloat16)], dim=1)
    data, scale = quantize.quantize_weight(weight, scales)
    assert (scale == 1).all()
    assert torch.equal(data.view(torch.uint8), weight.to(torch.float8_e4m3fn).view(torch.uint8))


@in_interpreter
@pytest.mark.parametrize("scales", ["pow2", "fp32"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_makes_its_block_nan(bad, scales):
    from megatron_fp8rl.kernels.triton import quantize

    weight = torch.ones(140, 256)
    weight[3, 130] = bad
    data, scale = quantize.quantize_weight(weight, scales)
    assert scale.isnan().tolist() == [[False, True], [False, False]]
    assert_equals_definition(weight, scales, data, scale)


@in_interpreter
def test_many_matrices_of_several_shapes_strides_and_types_in_given_memory():
    from megatron_fp8rl.kernels.triton import quantize

    wide = heavy_tailed((200, 512), seed=1)
    weights = [
        wide[:, :256],  # rows are strided
        wide[:, 3:131],  # and begin at odd addresses
        heavy_tailed((130, 100), seed=2).bfloat16(),
        wide.t()[:140],  # columns are strided
        torch.empty(0, 128),
    ]
    bucket = torch.zeros(1 << 18, dtype=torch.uint8)
    data, scale, end = [], [], 0
    for weight in weights:
        data.append(bucket[end : end + weight.numel()].view(torch.float8_e4m3fn).view(weight.shape))
        scale.append(torch.full([-(-n // 128) for n in weight.shape], -1.0))
        end += weight.numel()
    quantize.quantize_weights_into(weights, data, scale, "pow2")
    for weight, bytes_of_it, scale_of_it in zip(weights, data, scale):
        if weight.numel():
            assert_equals_definition(weight, "pow2", bytes_of_it, scale_of_it)
    assert not bucket[end:].any()


@in_interpreter
def test_a_destination_that_does_not_fit_is_named():
    from megatron_fp8rl.kernels.triton import quantize

    weight, data = torch.zeros(130, 128), torch.zeros(130, 128).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"matrix 1 of 2: scale_out has to be contiguous torch.float32 \[2, 1\]"):
        quantize.quantize_weights_into([weight] * 2, [data] * 2, [torch.zeros(2, 1), torch.zeros(1, 1)], "pow2")
    with pytest.raises(ValueError, match="BF16 or FP32"):
        quantize.quantize_weight_into(weight.double(), data, torch.zeros(2, 1), "pow2")


@in_interpreter
def test_transposed_bytes():
    from megatron_fp8rl.kernels.triton import quantize

    data = torch.randint(0, 256, (3, 256, 384), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    actual = quantize.transposed(data.view(torch.float8_e4m3fn))
    assert actual.is_contiguous() and torch.equal(actual.view(torch.uint8), data.transpose(1, 2))


def empty(num_rows: int, num_columns: int, aligned: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes, and scales as vLLM's compiler allocates them: transposed, with columns aligned to 16 bytes or not."""
    blocks, rows = -(-num_columns // BLOCK), -(-num_rows // 4) * 4 if aligned else num_rows
    data = torch.empty(num_rows, num_columns, dtype=torch.float8_e4m3fn)
    return data, torch.full((blocks, rows), -1.0).t()[:num_rows]


@in_interpreter
@pytest.mark.parametrize("scales", ["pow2", "fp32"])
def test_swiglu_gives_the_bytes_of_the_rounded_activation(scales):
    from megatron_fp8rl.kernels.triton.quantize_activations import swiglu_quantize

    h = (4 * torch.randn(21, 768, generator=torch.Generator().manual_seed(2))).bfloat16()
    h[3] = 0
    data, scale = empty(21, 384, aligned=True)
    values = torch.empty(21, 384).bfloat16()
    swiglu_quantize(h, data, scale, scales, values)
    gate, up = h.float().chunk(2, 1)
    divisor = 1.0 + torch.from_numpy(numpy.exp((-gate).contiguous().numpy()))  # the interpreter's exp
    activation = (gate / divisor).bfloat16() * up.bfloat16()
    expected, expected_scale = quantize_activation(activation, scales)
    assert torch.equal(scale, expected_scale) and (scale[3] == 1).all() and torch.equal(values, activation)
    assert torch.equal(data.view(torch.uint8), expected.view(torch.uint8))


@in_interpreter
@pytest.mark.parametrize("scales", ["pow2", "fp32"])
@pytest.mark.parametrize("num_rows", [0, 1, 21])
def test_rows_get_the_bytes_of_the_definition(num_rows, scales):
    from megatron_fp8rl.kernels.triton.quantize_activations import quantize_rows

    x = (4 * torch.randn(num_rows, 384, generator=torch.Generator().manual_seed(3))).bfloat16()
    x[:, 128:256] *= 2.0**-40
    x[3:4] = 0
    data, scale = empty(num_rows, 384, aligned=True)
    quantize_rows(x, data, scale, scales)
    expected, expected_scale = quantize_activation(x, scales)
    assert torch.equal(scale, expected_scale) and torch.equal(data.view(torch.uint8), expected.view(torch.uint8))
    with pytest.raises(ValueError, match="F a multiple of 128"):
        quantize_rows(x[:, :300], data, scale, scales)


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
    from megatron_fp8rl.kernels.triton.quantize_activations import swiglu_quantize

    x, (data, scale) = torch.ones(2, 256).bfloat16(), empty(2, 256)
    with pytest.raises(ValueError, match=r"F a multiple of 128, not \[2, 256\] and \[2, 256\]"):
        swiglu_quantize(x, data, scale, "pow2")
