"""Formats against published checkpoints, against plain arithmetic, and with a format that no kernel knows yet."""

import math
from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.config import PrecisionConfig
from megatron_fp8rl.kernels.blockwise import quantize_weight
from megatron_fp8rl.names.layouts import EngineLayout, TrainerLayout
from megatron_fp8rl.precision import formats, quantizers
from megatron_fp8rl.precision.formats import (
    BF16,
    BLOCKWISE_FP32,
    BLOCKWISE_POW2,
    DELAYED,
    MXFP8,
    QuantFormat,
    weight_of_scales,
)
from megatron_fp8rl.weight_sync.plan import PlanError, plan
from megatron_fp8rl.weight_sync.schedule import plan_schedule
from tests.helpers.plans import MOE, table

# A format that no kernel knows.
OTHER = QuantFormat(
    name="other",
    element="float8_e4m3fn",
    weight_block=(1, 64),
    activation_block=(1, 64),
    scale_dtype="float32",
    scale_kind="pow2",
    tile=64,
    hf={"quant_method": "other"},
)


def test_blockwise_is_the_format_of_published_checkpoints():
    """config.json, names and shapes of deepseek-ai/DeepSeek-V3."""
    published = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    for fmt in (BLOCKWISE_POW2, BLOCKWISE_FP32):
        actual = fmt.hf_quantization_config(["lm_head"])
        assert actual.pop("modules_to_not_convert") == ["lm_head"] and actual == published
        wire = [(t.name, t.dtype, t.shape) for t in fmt.wire_tensors(name, (576, 7168))]
        assert wire == [(name, "float8_e4m3fn", (576, 7168)), (f"{name}_scale_inv", "float32", (5, 56))]


@pytest.mark.parametrize("scales", ["pow2", "fp32"])
@pytest.mark.parametrize("shape", [(128, 128), (300, 129), (1, 640)])
def test_quantized_tensors_are_those_that_the_format_describes(shape, scales):
    fmt = formats.rollout_format(PrecisionConfig(scales=scales))
    weight = torch.randn(shape)
    actual = quantizers.quantize(weight, fmt)
    described = [(getattr(torch, t.dtype), t.shape) for t in fmt.wire_tensors("w", shape)]
    assert [(t.dtype, tuple(t.shape)) for t in actual] == described
    assert fmt.num_bytes(shape) == sum(t.nbytes for t in actual)
    for tensor, expected in zip(actual, quantize_weight(weight, scales), strict=True):
        assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))
    error = (quantizers.dequantize(*actual, fmt) - weight).abs().max()
    assert error <= weight.abs().max() / 16


def test_bytes_of_large_tensors():
    side = 1 << 12
    for fmt in (BLOCKWISE_POW2, MXFP8, BF16, DELAYED):
        assert fmt.num_bytes((side, side)) / side**2 == pytest.approx(fmt.bytes_per_value, rel=1e-6)
    assert BLOCKWISE_POW2.activation_bytes_per_value == 1 + 4 / 128
    assert MXFP8.bytes_per_value == MXFP8.activation_bytes_per_value == 1 + 1 / 32
    assert BF16.bytes_per_value == 2 and BF16.num_bytes((3, 5)) == 30


def test_a_format_for_each_precision():
    precision = PrecisionConfig(trainer="delayed", rollout="blockwise", scales="fp32", bf16_first_layers=1)
    assert formats.trainer_format(precision) is DELAYED and formats.rollout_format(precision) is BLOCKWISE_FP32
    by_name = table(MOE, "edges")
    assert by_name.rollout_format("model.layers.1.self_attn.q_proj.weight") is BLOCKWISE_POW2
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.gate.weight", "lm_head.weight"):
        assert by_name.rollout_format(name) is by_name.trainer_format(name) is BF16


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_another_format_travels_without_changes_elsewhere(tensor):
    """Blocks of 1x32 with scales of one byte: 64 rows of a rank, which cut blocks of 128, cut none of these."""
    model, engine = MOE, EngineLayout(tensor=tensor)
    layouts = TrainerLayout(world_size=2, tensor=2), engine
    if tensor == 4:
        with pytest.raises(PlanError, match="not a multiple of 128"):
            plan(model, table(model, "fp8"), *layouts)
    made = plan(model, replace(table(model, "fp8"), rollout=MXFP8), *layouts)
    quantized = [t for t in made.transfers if t.is_fp8]
    assert len(quantized) == model.num_layers * (4 + 3 * model.num_experts)
    assert {t.quantize for t in quantized} == {"at_source"}
    schedule = plan_schedule(made, model, bucket_bytes=50_000)
    actual: dict[tuple[int, str], int] = {}
    for messages in schedule.rounds:
        for message in messages.messages:
            for part in message.parts:
                for rank in message.engine_ranks:
                    actual[rank, part.name] = actual.get((rank, part.name), 0) + part.num_bytes
    expected = {}
    for transfer in made.transfers:
        for rank, kept in enumerate(transfer.slices):
            shape = list(transfer.shape)
            shape[transfer.axis] = kept[1] - kept[0]
            size = math.prod(shape)
            if not size:  # the last of four ranks keeps padding of the vocabulary alone
                continue
            expected[rank, transfer.name] = size if transfer.is_fp8 else 2 * size
            if transfer.is_fp8:
                expected[rank, f"{transfer.name}_scale"] = shape[0] * (shape[1] // 32)
    assert actual == expected
    assert made.num_bytes == sum(
        math.prod(t.shape) * (33 / 32 if t.is_fp8 else 2) for t in made.transfers
    )  # every side is a multiple of 32


def test_blocks_and_edges():
    assert MXFP8.scale_shape((5, 70)) == (5, 3)
    assert MXFP8.blocks((3, 5), 0) == (3, 5) and MXFP8.blocks((32, 70), 1) == (1, 3)
    assert MXFP8.cuts_no_block([(0, 3), (3, 5)], 0, 5) and MXFP8.cuts_no_block([(0, 32), (32, 70)], 1, 70)
    assert not MXFP8.cuts_no_block([(0, 48), (48, 96)], 1, 96)
    assert not BLOCKWISE_POW2.cuts_no_block([(0, 64), (64, 128)], 0, 128)
    assert BF16.cuts_no_block([(0, 1), (1, 7)], 0, 7) and BF16.scale_shape((5, 70)) == ()


def test_what_no_checkpoint_or_kernel_knows_is_refused():
    with pytest.raises(ValueError, match="delayed: no quantization_config"):
        DELAYED.hf_quantization_config([])
    for call in (
        lambda: quantizers.quantize(torch.zeros(128, 128), OTHER),
        lambda: quantizers.prepare([], OTHER),
        lambda: quantizers.dequantize(torch.zeros(1, 32), torch.zeros(1, 1), BF16),
    ):
        with pytest.raises(ValueError, match="no kernel supports it"):
            call()
    assert OTHER.hf_quantization_config(["lm_head"]) == {"quant_method": "other", "modules_to_not_convert": ["lm_head"]}


def test_scales_are_known_by_their_names():
    name = "model.layers.0.mlp.down_proj.weight"
    for fmt in (BLOCKWISE_POW2, MXFP8):
        assert weight_of_scales(fmt.scale_name(name)) == name
    assert weight_of_scales(name) is None and weight_of_scales("model.layers.0.self_attn.k_scale") is None
