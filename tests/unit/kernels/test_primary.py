"""What is read from a parameter that is FP8 itself, and how its scales are cut with its rows."""

import pytest
import torch

from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.kernels.blockwise import dequantize_weight, quantize_weight
from megatron_fp8rl.kernels.fp8_parameter import fp8_weight, has_nan, is_fp8, plain
from megatron_fp8rl.names import registry, slicing
from tests.helpers.fake_fp8_tensor import Fp8Tensor

MODEL = ModelConfig(
    family="qwen3",
    num_layers=1,
    hidden_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=128,
    vocab_size=64,
    ffn_hidden_size=256,
)
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
    narrow = ModelConfig(**{**vars(MODEL), "head_dim": 64})
    weight = registry.weight(QKV.name, narrow)
    with pytest.raises(ValueError, match=r"linear_qkv\.weight: .*v_proj\.weight begins within a block of 128"):
        slicing.split(weight, narrow, torch.zeros(4, 2), 1, 0, block=128)
