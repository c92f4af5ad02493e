"""How a probe's recordings compare, on tensors whose differences are known."""

import math
from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.config import MlaConfig
from megatron_fp8rl.diagnose.operations import compare, decibels, first_different, operation_names, table
from model_configs.tiny import tiny_qwen3, tiny_qwen3_moe

MODEL = tiny_qwen3().model


def recordings(model=MODEL):
    """The engine's, the trainer's and the replayed operations, equal."""
    generator = torch.Generator().manual_seed(1)
    engine = {name: torch.randn(5, 64, generator=generator).bfloat16() for name in operation_names(model)}
    return engine, {k: v.clone() for k, v in engine.items()}, {k: v.clone() for k, v in engine.items()}


def test_decibels():
    reference = torch.full((10,), 2.0)
    assert decibels(torch.full((10,), 0.02), reference) == pytest.approx(-40.0, abs=1e-6)
    assert decibels(torch.zeros(10), reference) == -math.inf
    assert decibels(torch.ones(10), torch.zeros(10)) == math.inf
    assert math.isnan(decibels(torch.full((10,), math.nan), reference))


def test_names_follow_the_architecture():
    dense, moe = operation_names(MODEL), operation_names(tiny_qwen3_moe().model)
    assert dense[:3] == ["embedding", "layer.0.input", "layer.0.input_norm"]
    assert "layer.1.down" in dense and "layer.1.experts" not in dense
    assert "layer.1.experts" in moe and "layer.1.down" not in moe
    assert "layer.0.q_norm" not in operation_names(replace(MODEL, family="llama", qk_norm=False))
    mla = MlaConfig(q_lora_rank=None, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
    with pytest.raises(ValueError, match="cannot be probed"):
        operation_names(replace(MODEL, mla=mla))


def beyond_rounding(rows):
    return [row.name for row in rows if row.is_beyond_rounding]


def test_own_error_is_told_from_inherited():
    engine, trainer, replayed = recordings()
    names = list(engine)
    start = names.index("layer.1.o_proj")
    for name in names[start:]:
        trainer[name] = trainer[name] + 0.1  # everything behind o_proj inherits
    replayed["layer.1.o_proj"] = trainer["layer.1.o_proj"].clone()
    rows = compare(engine, trainer, replayed, MODEL)
    assert [row.name for row in rows] == names
    assert first_different(rows).name == "layer.1.o_proj"
    assert beyond_rounding(rows) == ["layer.1.o_proj"]
    assert rows[start + 1].isolated_db == -math.inf and rows[start + 1].total_db == pytest.approx(-20, abs=1.5)
    assert "| layer.1.o_proj |" in table(rows) and table(rows).count("beyond rounding") == 1


def test_one_rounding_is_no_difference():
    """Half a unit in the last place, more than rounding, passes; four units do not."""
    engine, trainer, replayed = recordings()
    name = "layer.0.down"
    replayed[name] = (engine[name].float() * (1 + 2**-8.5)).bfloat16()
    assert beyond_rounding(compare(engine, trainer, replayed, MODEL)) == []
    replayed[name] = (engine[name].float() * (1 + 2**-6)).bfloat16()
    assert beyond_rounding(compare(engine, trainer, replayed, MODEL)) == [name]


def test_what_is_not_a_number_is_beyond_rounding():
    engine, trainer, replayed = recordings()
    replayed["final_norm"][2, 3] = math.nan
    assert beyond_rounding(compare(engine, trainer, replayed, MODEL)) == ["final_norm"]


def test_other_shapes_are_named():
    engine, trainer, replayed = recordings()
    trainer["layer.0.qkv"] = trainer["layer.0.qkv"][:-1]
    with pytest.raises(ValueError, match=r"layer.0.qkv: \(4, 64\) trainer, \(5, 64\) in the engine"):
        compare(engine, trainer, replayed, MODEL)
