"""Blockwise FP8 against bytes worked out by hand and a loop in float64 that knows the format from its definition."""

import math
from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.kernels import blockwise
from megatron_fp8rl.kernels.blockwise import E4M3, E5M2, dequantize_weight, quantize_weight
from megatron_fp8rl.kernels.fp8_parameter import fp8_weight, has_nan, is_fp8, plain
from megatron_fp8rl.kernels.kv_rounding import as_cached, to_cache
from megatron_fp8rl.kernels.types import BLOCK
from megatron_fp8rl.names import registry, slicing
from tests.helpers.fake_fp8_tensor import Fp8Tensor
from tests.helpers.models import small_model
from tests.tolerances import BF16_ROUNDING, FLOAT32_ACCUMULATION


def _e4m3_numbers() -> list[float]:
    """The numbers of E4M3 by byte 0..126: 4 exponent bits with bias 7, 3 mantissa bits, no infinity; 127 is NaN."""
    numbers = []
    for byte in range(127):
        exponent, mantissa = byte >> 3, byte & 7
        numbers.append(mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return numbers


NUMBERS = _e4m3_numbers()


def _nearest_byte(x: float) -> int:
    """Byte of the nearest E4M3 number; of two equally near ones, that with the even byte (even mantissa)."""
    magnitude = abs(x)
    byte = min(range(127), key=lambda b: (abs(NUMBERS[b] - magnitude), b & 1))
    return byte | (128 if math.copysign(1.0, x) < 0 else 0)


def _loop_scale(amax: float, scales: str) -> float:
    if amax == 0:
        return 1.0
    if scales == "fp32":
        return float(torch.tensor(amax) / torch.tensor(448.0))
    exponent = -140
    while 448.0 * 2.0**exponent < amax:  # powers of two are exact, so this is the definition of the rounded logarithm
        exponent += 1
    return 2.0**exponent


def _loop(blocks: list[torch.Tensor], scales: str):
    """(scale, bytes) of each block, number by number."""
    for block in blocks:
        scale = _loop_scale(block.double().abs().max().item(), scales)
        # The quotient is a float32 number, as every implementation computes it.
        quotients = (block.float() / torch.tensor(scale)).flatten().tolist()
        yield scale, torch.tensor([_nearest_byte(q) for q in quotients], dtype=torch.uint8).view(block.shape)


def _ragged(shape, seed=0) -> torch.Tensor:
    """Numbers over many orders of magnitude, some rows zero, some exact ties between E4M3 numbers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-12, 8, shape, generator=generator).float())
    x[1] = 0
    x[0, :4] = torch.tensor([448.0, 17.0, -19.0, 2.0**-10])
    return x.bfloat16()


@pytest.mark.parametrize("scales", ["pow2", "fp32"])
def test_weight_bytes_and_scales_against_a_loop(scales):
    weight = _ragged((140, 200))
    data, scale_inv = blockwise.quantize_weight(weight, scales)
    assert data.dtype == torch.float8_e4m3fn and scale_inv.dtype == torch.float32 and scale_inv.shape == (2, 2)
    corners = [(i, j) for i in (0, BLOCK) for j in (0, BLOCK)]
    blocks = [weight[i : i + BLOCK, j : j + BLOCK] for i, j in corners]
    for (i, j), (scale, expected) in zip(corners, _loop(blocks, scales)):
        assert scale_inv[i // BLOCK, j // BLOCK].item() == scale
        assert torch.equal(data.view(torch.uint8)[i : i + BLOCK, j : j + BLOCK], expected)


@pytest.mark.parametrize("scales", ["pow2", "fp32"])
def test_activation_bytes_and_scales_against_a_loop(scales):
    x = _ragged((6, 400), seed=1)[:, ::2]  # strided: the last axis is not contiguous
    data, scale_inv = blockwise.quantize_activation(x, scales)
    assert scale_inv.shape == (6, 2)
    for row in range(6):
        for block, (scale, expected) in enumerate(_loop([x[row, :BLOCK], x[row, BLOCK:]], scales)):
            assert scale_inv[row, block].item() == scale
            assert torch.equal(data.view(torch.uint8)[row, block * BLOCK : (block + 1) * BLOCK], expected)


def test_bytes_worked_out_by_hand():
    # amax 900: 448 < 900 <= 896 * 2, so the scale is 4 and 900 / 4 = 225 lies between 224 (0x76) and 240 (0x77).
    x = torch.tensor([[900.0, -900.0, 4.0, 6.0, 0.0, -0.0, 4 * 2.0**-9, 4 * 1.5 * 2.0**-9, 4 * 17.0, 4 * 19.0]])
    data, scale_inv = blockwise.quantize_activation(x, "pow2")
    assert scale_inv.tolist() == [[4.0]]
    #   224    -224    1.0   1.5   0   -0    smallest, 1.5 of it to even, 17 -> 16, 19 -> 20 (ties to even)
    assert data.view(torch.uint8).tolist() == [[0x76, 0xF6, 0x38, 0x3C, 0, 0x80, 0x01, 0x02, 0x58, 0x5A]]


def test_power_of_two_scales_are_the_next_power_of_two_for_every_mantissa():
    # Also one unit in the last place around 448 * 2^k, where a logarithm in float32 would round.
    amax = torch.tensor([448.0 * 2.0**k for k in range(-100, 100, 7)] + [1.0, 1.3, 3.9e30, 2e-30])
    above, below = torch.nextafter(amax, torch.tensor(torch.inf)), torch.nextafter(amax, torch.tensor(0.0))
    for values in (amax, above, below):
        expected = [_loop_scale(v, "pow2") for v in values.double().tolist()]
        assert blockwise.scale_of(values, "pow2").tolist() == expected


def test_zero_blocks_have_zero_bytes_and_a_finite_scale():
    data, scale_inv = blockwise.quantize_weight(torch.zeros(130, 10), "pow2")
    assert scale_inv.tolist() == [[1.0], [1.0]] and not data.view(torch.uint8).any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scales", ["pow2", "fp32"])
def test_what_is_not_finite_makes_its_block_nan(bad, scales):
    x = torch.ones(2, 256)
    x[0, 130] = bad
    restored = blockwise.dequantize_activation(*blockwise.quantize_activation(x, scales))
    assert restored[0, 128:].isnan().all()
    assert torch.equal(restored[0, :128], x[0, :128]) and torch.equal(restored[1], x[1])
    assert torch.equal(blockwise.round_activation(x, scales, torch.float32).isnan(), restored.isnan())


@pytest.mark.parametrize("scales", ["pow2", "fp32"])
def test_shards_quantize_to_slices_of_the_whole(scales):
    weight = _ragged((512, 384), seed=2)
    data, scale_inv = blockwise.quantize_weight(weight, scales)
    for rank in range(4):
        rows = slice(rank * 128, (rank + 1) * 128)
        shard, shard_scale = blockwise.quantize_weight(weight[rows], scales)
        assert torch.equal(shard.view(torch.uint8), data[rows].view(torch.uint8))
        assert torch.equal(shard_scale, scale_inv[rank : rank + 1])
    for rank in range(3):
        columns = slice(rank * 128, (rank + 1) * 128)
        shard, shard_scale = blockwise.quantize_weight(weight[:, columns], scales)
        assert torch.equal(shard.view(torch.uint8), data[:, columns].view(torch.uint8))
        assert torch.equal(shard_scale, scale_inv[:, rank : rank + 1])


def test_quantizing_what_was_dequantized_changes_nothing():
    weight = _ragged((256, 256), seed=3)
    data, scale_inv = blockwise.quantize_weight(weight, "pow2")
    restored = blockwise.dequantize_weight(data, scale_inv)
    assert torch.equal(restored, restored.bfloat16().float()), "power-of-two scales are exact in BF16"
    again, again_scale = blockwise.quantize_weight(restored, "pow2")
    assert torch.equal(blockwise.dequantize_weight(again, again_scale), restored)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_rounding_to_the_grid_equals_torchs_conversion(fmt):
    # Every BF16 number up to the largest of the format, both signs.
    x = torch.arange(0, 0x8000, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    x = x[x <= fmt.max]
    x = torch.cat([x, -x])
    assert torch.equal(blockwise.round_to_grid_(x.clone(), torch.ones(1), fmt), x.to(fmt.dtype).float())


@pytest.mark.parametrize("scales", ["pow2", "fp32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_linear_against_float64(scales, dtype):
    x, weight = _ragged((9, 300), seed=5).to(dtype) * 0.1, _ragged((200, 300), seed=6).to(dtype)
    data, scale_inv = blockwise.quantize_weight(weight, scales)
    y = blockwise.linear(x, data, scale_inv, scales)
    operand = blockwise.dequantize_activation(*blockwise.quantize_activation(x, scales)).double()
    restored = blockwise.dequantize_weight(data, scale_inv).double()
    exact = operand @ restored.T
    magnitude = (operand.abs() @ restored.abs().T).amax()
    assert y.dtype == dtype
    tolerance = BF16_ROUNDING if dtype == torch.bfloat16 else FLOAT32_ACCUMULATION
    torch.testing.assert_close(y.double(), exact, rtol=tolerance["rtol"], atol=tolerance["atol"] * magnitude.item())


def test_every_e4m3_number_is_read_as_torch_reads_it():
    data = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).repeat(3, 1)
    for columns in (256, 200):  # whole blocks, and a shorter one
        scale = torch.tensor([[0.3, 7.0]])
        expected = data[:, :columns].float() * scale.repeat_interleave(128, 1)[:, :columns]
        actual = blockwise.dequantize_weight(data[:, :columns], scale)
        assert torch.equal(actual.isnan(), expected.isnan()) and actual.isnan().any()
        assert torch.equal(actual.nan_to_num(7e7), expected.nan_to_num(7e7))
        numbers = ~expected.isnan()
        assert torch.equal(actual[numbers].signbit(), expected[numbers].signbit())  # of zeros, too


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


MODEL = small_model((1, 256, 4, 2, 128, 64), ffn=256)
QKV = registry.weight("decoder.layers.0.self_attention.linear_qkv.weight", MODEL)


def _matrix(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).bfloat16()


def test_bytes_and_scales_are_views_without_padding():
    matrix = _matrix(192, 640)  # one and a half blocks of rows; five of columns, which are padded to eight
    parameter = torch.nn.Parameter(Fp8Tensor.of(matrix, "pow2"))
    data, scale = quantize_weight(matrix, "pow2")
    held = fp8_weight(parameter)
    assert is_fp8(parameter) and not is_fp8(matrix) and not is_fp8(None)
    assert torch.equal(held.data.view(torch.uint8), data.view(torch.uint8)) and torch.equal(held.scale, scale)
    assert held.data.data_ptr() == parameter._rowwise_data.data_ptr()
    assert torch.equal(plain(parameter), dequantize_weight(data, scale).bfloat16())
    assert plain(matrix).data_ptr() == matrix.data_ptr()


def test_nan_is_found_and_nothing_else():
    every_byte = torch.arange(256, dtype=torch.uint8)
    is_nan = every_byte.view(torch.float8_e4m3fn).float().isnan()
    assert [bool(has_nan(byte.view(torch.float8_e4m3fn))) for byte in every_byte.split(1)] == is_nan.tolist()


@pytest.mark.parametrize("rank", [0, 1])
def test_scales_are_cut_where_the_rows_are(rank):
    full = _matrix(*QKV.shape)
    own = slicing.cut(QKV, MODEL, full, 2, rank)
    held = fp8_weight(Fp8Tensor.of(own, "pow2"))
    data = slicing.split(QKV, MODEL, held.data.view(torch.uint8), 2, rank)
    scales = slicing.split(QKV, MODEL, held.scale, 2, rank, block=128)
    for part, scale, matrix in zip(data, scales, slicing.split(QKV, MODEL, own, 2, rank), strict=True):
        expected = quantize_weight(matrix, "pow2")
        assert torch.equal(part, expected[0].view(torch.uint8)) and torch.equal(scale, expected[1])


def test_heads_that_share_a_block_are_named():
    narrow = replace(MODEL, head_dim=64)
    weight = registry.weight(QKV.name, narrow)
    with pytest.raises(ValueError, match=r"linear_qkv\.weight: .*v_proj\.weight begins within a block of 128"):
        slicing.split(weight, narrow, torch.zeros(4, 2), 1, 0, block=128)
