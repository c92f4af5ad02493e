"""Arguments of the engines."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from megatron_fp8rl.config import PrecisionConfig
from megatron_fp8rl.fp8.layers import LayerTable
from megatron_fp8rl.rollout import engine
from megatron_fp8rl.weights.names import hf_tensors
from model_configs.tiny import tiny_qwen3, tiny_qwen3_moe

PRECISIONS = {
    "fp8": PrecisionConfig(),
    "edges": PrecisionConfig(bf16_first_layers=1),
    "bf16": PrecisionConfig(trainer="bf16", rollout="bf16"),
}


@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("cfg", [tiny_qwen3(), tiny_qwen3_moe()], ids=lambda cfg: cfg.name)
def test_exceptions_are_the_complement_of_the_layer_table(cfg, precision):
    table = LayerTable.build(cfg.model, precision)
    listed = set(engine.modules_not_converted(cfg.model, precision))
    for name, shape in hf_tensors(cfg.model).items():
        if len(shape) == 2:
            assert (name.removesuffix(".weight") in listed) != table.rollout_fp8(name), name
    assert {"model.embed_tokens", "lm_head"} <= listed
    if cfg.model.is_moe:
        assert {f"model.layers.{i}.mlp.gate" for i in range(cfg.model.num_layers)} <= listed


def test_a_bf16_engine_is_quantized_on_a_cpu_in_name_only():
    cfg = replace(tiny_qwen3_moe(), precision=PRECISIONS["bf16"])
    on_cpu = engine.engine_arguments(cfg, "model", cpu=True)["hf-overrides"]["quantization_config"]
    assert len(on_cpu["modules_to_not_convert"]) == sum(len(shape) == 2 for shape in hf_tensors(cfg.model).values())
    assert "hf-overrides" not in engine.engine_arguments(cfg, "model", cpu=False)


def test_kv_cache_on_a_cpu_holds_every_sequence():
    cfg = tiny_qwen3_moe()
    cfg = replace(cfg, rollout=replace(cfg.rollout, kv_cache_bytes=None, max_num_sequences=10))
    block_bytes = 128 * (2 * 2 * 2 * 128 * 2)  # tokens * (layers, key and value, heads, head size, BF16)
    assert engine.kv_cache_bytes(cfg, cpu=True) == 11 * block_bytes  # 40 tokens fit into one block
    assert engine.kv_cache_bytes(cfg, cpu=False) is None
    fixed = replace(cfg, rollout=replace(cfg.rollout, kv_cache_bytes=1 << 20))
    assert engine.kv_cache_bytes(fixed, cpu=True) == 1 << 20


def test_command_line():
    command = engine.server_command({"a-b": 3, "flag": True, "off": False, "none": None, "j": {"x": [1]}}, listen_fd=7)
    assert command[1:5] == ["-m", "megatron_fp8rl.rollout.server", "--listen-fd=7", f"--parent-pid={os.getpid()}"]
    assert command[5:] == ["--a-b", "3", "--flag", "--j", json.dumps({"x": [1]})]


@pytest.mark.parametrize(("scales", "lever"), [("pow2", "1"), ("fp32", "0")])
def test_scale_kind_reaches_every_kernel(scales, lever):
    cfg = replace(tiny_qwen3_moe(), precision=PrecisionConfig(scales=scales))
    environment = engine.engine_environment(cfg, cpu=False)
    assert environment["MEGATRON_FP8RL_SCALES"] == scales
    assert environment["VLLM_USE_DEEP_GEMM_E8M0"] == lever
