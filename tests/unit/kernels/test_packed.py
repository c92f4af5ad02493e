"""Rows that travel in FP8: the bytes of ``quantize_activation``, and what grouped GEMMs are given of them."""

import pytest
import torch

from megatron_fp8rl.kernels import fused_moe_torch
from megatron_fp8rl.kernels.backend import INTERPRETED
from megatron_fp8rl.kernels.blockwise import dequantize_activation, quantize_activation
from megatron_fp8rl.kernels.expert_slots import Choice
from megatron_fp8rl.kernels.fused_moe import pack, permute_quantize
from megatron_fp8rl.kernels.types import BLOCK, Packed
from tests.helpers.interpreter import assert_passes_interpreted, starts_interpreter


def rows(num_tokens: int, num_features: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(num_features)
    x = torch.randn(num_tokens, num_features, generator=draw) * torch.exp(
        8 * torch.randn(num_tokens, 1, generator=draw)
    )
    x[0] = 0.0
    x[-1, :BLOCK] = 224.0  # the largest number of its block is 448 times half of another scale
    x[1, 5] = 2.0**-120
    return x.bfloat16()


def layout_of(num_tokens: int):
    scores = torch.rand(num_tokens, 3, generator=torch.Generator().manual_seed(1))
    return Choice.of(torch.where(scores < 0.7, scores, -1.0)).slots(3).layout


@pytest.mark.parametrize(("num_tokens", "num_features"), [(40, 256), (3, 128), (17, 2304)])
def test_rows_are_their_bytes_and_their_exponents(num_tokens, num_features):
    x = rows(num_tokens, num_features)
    packed, (data, scale) = pack(x), quantize_activation(x, "pow2")
    assert packed.data.shape == (num_tokens, Packed.width(num_features)) and packed.data.shape[1] % 16 == 0
    assert torch.equal(packed.data[:, :num_features], data.view(torch.uint8))
    exponents = packed.data[:, num_features : num_features + num_features // BLOCK]
    assert torch.equal(2.0 ** (exponents.double() - 127), scale.double())
    assert torch.equal(fused_moe_torch.unpacked(packed).float(), dequantize_activation(data, scale))


def test_what_is_not_finite_stays_so():
    x = rows(4, 256)
    x[1, 3], x[2, 200] = float("nan"), float("inf")
    bad = fused_moe_torch.unpacked(pack(x)).isnan()
    assert bad[1, :BLOCK].all() and bad[2, BLOCK:].all() and bad.sum() == 2 * BLOCK


@pytest.mark.parametrize("columns", [False, True])
def test_operands_have_the_values_of_rows_that_did_not_travel(columns):
    x = rows(150, 256)
    layout, packed = layout_of(150), pack(x)
    ours = permute_quantize(packed, layout, "pow2", columns=columns)
    theirs = permute_quantize(x, layout, "pow2", columns=columns)
    real = layout.rows >= 0
    values = [dequantize_activation(one.rows, one.row_scales)[real] for one in (ours, theirs)]
    assert torch.equal(*values)
    if columns:
        again = permute_quantize(fused_moe_torch.unpacked(packed), layout, "pow2", columns=True)
        assert torch.equal(ours.columns.view(torch.uint8), again.columns.view(torch.uint8))
        assert torch.equal(ours.column_scales, again.column_scales)
    if INTERPRETED:
        reference = fused_moe_torch.permute_quantize(
            packed, layout, "pow2", rows=True, columns=columns, bf16=False, probs=None
        )
        assert torch.equal(ours.rows.view(torch.uint8)[real], reference.rows.view(torch.uint8)[real])


@pytest.mark.parametrize(("num_tokens", "dtype"), [(5, torch.uint8), (150, torch.float32)])
def test_other_rows_are_refused(num_tokens, dtype):
    with pytest.raises(ValueError, match=r"packed rows must be uint8 \[150, 272\] without probs, not .* \[\d+, 272\]"):
        permute_quantize(Packed(torch.zeros(num_tokens, 272, dtype=dtype), 256), layout_of(150), "pow2")


@starts_interpreter
def test_in_the_interpreter():
    assert_passes_interpreted(__file__)
