"""MXFP8: bytes against second formulas, and what compressed-tensors and vLLM read from them."""

import numpy as np
import pytest
import torch

from megatron_fp8rl.kernels.blockwise import float32_of_e8m0, scale_of
from megatron_fp8rl.precision import quantizers
from megatron_fp8rl.precision.formats import MXFP8


def scale_bytes_of_transformer_engine(amax: np.ndarray) -> np.ndarray:
    """ptx::float_to_e8m0(amax * max_norm_rcp) of Transformer Engine 2.16, for finite float32 numbers: the exponent
    of the product, plus 1 if a mantissa is left, except below the smallest scale."""
    bits = (amax.astype(np.float32) * np.float32(1 / 448)).view(np.uint32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    rounds_up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    return (exponent + rounds_up).astype(np.uint8)


def e4m3_bytes(values: np.ndarray) -> np.ndarray:
    """The nearest E4M3 number of each value by search in the table of all of them; ties to an even mantissa."""
    codes = np.arange(127)  # 127 is NaN
    exponent, mantissa = codes >> 3, codes & 7
    table = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    assert table[-1] == 448 and (np.diff(table) > 0).all()
    distance = np.abs(np.abs(values.astype(np.float64))[:, None] - table)
    nearest = distance == distance.min(1, keepdims=True)
    even = np.where(nearest & (codes % 2 == 0), codes, -1).max(1)
    code = np.where(nearest.sum(1) == 2, even, nearest.argmax(1))
    return (code | (np.signbit(values) << 7)).astype(np.uint8)


def test_scales_of_all_bf16_numbers():
    amax = (torch.arange(0x7F80, dtype=torch.int32) << 16).view(torch.float32)  # from 0 to the largest
    found = scale_of(amax, "e8m0").to(torch.float8_e8m0fnu).view(torch.uint8).numpy()
    np.testing.assert_array_equal(found, scale_bytes_of_transformer_engine(amax.numpy()))
    assert found[0] == 0 and found[-1] == 254 - 8 + 1
    # OCP MX 1.0 rounds down: its scales are half as large where the maximum would exceed 448.
    normal = amax.numpy() >= 2.0**-118
    ocp = np.floor(np.log2(amax.numpy()[normal].astype(np.float64))).astype(int) - 8 + 127
    mantissa = np.frexp(amax.numpy()[normal])[0] * 2
    np.testing.assert_array_equal(found[normal] - ocp, (mantissa > 1.75).astype(int))


def test_float32_maxima_around_448_are_rounded_as_by_transformer_engine():
    around = np.float32(448).view(np.uint32) + np.arange(-64, 65, dtype=np.int64)
    amax = np.concatenate([around + (k << 23) for k in range(-100, 100, 7)]).astype(np.uint32).view(np.float32)
    found = scale_of(torch.from_numpy(amax), "e8m0").to(torch.float8_e8m0fnu).view(torch.uint8).numpy()
    np.testing.assert_array_equal(found, scale_bytes_of_transformer_engine(amax))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_against_a_second_formula(dtype):
    generator = torch.Generator().manual_seed(0)
    spread = torch.exp2(torch.randint(-60, 40, (96, 4, 1), generator=generator).float())
    weight = (torch.randn(96, 4, 32, generator=generator) * spread).flatten(1).to(dtype)
    weight[3, :32] = 0
    data, scale = quantizers.quantize(weight, MXFP8)
    blocks = weight.float().numpy().reshape(-1, 32)
    expected = scale_bytes_of_transformer_engine(np.abs(blocks).max(1))
    np.testing.assert_array_equal(scale.numpy().reshape(-1), expected)
    values = blocks.astype(np.float64) * 2.0 ** (127.0 - expected[:, None])
    np.testing.assert_array_equal(data.view(torch.uint8).numpy().reshape(-1), e4m3_bytes(values.reshape(-1)))
    rounded = quantizers.round_activation(weight, MXFP8, torch.float64)
    assert torch.equal(quantizers.dequantize(data, scale, MXFP8).double(), rounded)


def test_a_value_that_is_not_finite_shows_in_its_scale_alone():
    weight = torch.randn(4, 96)
    weight[1, 40], weight[2, 95] = torch.nan, torch.inf
    _, scale = quantizers.quantize(weight, MXFP8)
    assert (scale == 255).nonzero().tolist() == [[1, 1], [2, 2]] and not quantizers.is_finite(scale)
    assert quantizers.is_finite(quantizers.quantize(torch.randn(4, 96), MXFP8)[1])
    assert float32_of_e8m0(torch.tensor([0, 127, 255], dtype=torch.uint8)).nan_to_num(7).tolist() == [2.0**-127, 1, 7]


def test_compressed_tensors_and_vllm_read_the_bytes():
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import dequant_mxfp8_to_bf16

    config = QuantizationConfig.model_validate(MXFP8.hf_quantization_config(["lm_head"]))
    scheme, preset = config.config_groups["group_0"], preset_name_to_scheme("MXFP8", ["Linear"])
    assert (scheme.weights, scheme.input_activations) == (preset.weights, preset.input_activations)
    assert config.ignore == ["lm_head"] and config.format == "mxfp8-quantized"
    weight = torch.randn(64, 96).bfloat16()
    data, scale = quantizers.quantize(weight, MXFP8)
    stored = {"weight": data, "weight_scale": scale}
    expected = quantizers.dequantize(data, scale, MXFP8).bfloat16()
    read = compressors.MXFP8QuantizationCompressor.decompress(stored, scheme)["weight"]
    assert torch.equal(read.bfloat16(), expected)
    assert torch.equal(dequant_mxfp8_to_bf16(data, scale), expected)
