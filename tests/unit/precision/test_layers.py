"""The layer table of every family: which matrices are FP8, as the published FP8 checkpoints have it."""

from dataclasses import replace

import pytest

from megatron_fp8rl.config import GdnConfig, MlaConfig, ModelConfig, PrecisionConfig, RouterConfig
from megatron_fp8rl.names import registry
from megatron_fp8rl.precision.layer_table import LayerTable
from tests.helpers.hf_parts import hf_names_of

COMMON = dict(num_layers=3, hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=16, vocab_size=64)
EXPERTS = dict(num_experts=2, experts_per_token=1, moe_ffn_hidden_size=32)
ROUTER = RouterConfig(score="sigmoid", correction_bias=True)
MLA = MlaConfig(q_lora_rank=32, kv_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16)
SHARING = dict(ffn_hidden_size=96, num_shared_experts=1, first_dense_layers=1, router=ROUTER, num_mtp_layers=1)
SHARING |= EXPERTS | COMMON
MODELS = {
    "qwen2": ModelConfig(family="qwen2", ffn_hidden_size=96, qkv_bias=True, **COMMON),
    "mixtral": ModelConfig(family="mixtral", **EXPERTS, **COMMON),
    "glm4_moe": ModelConfig(family="glm4_moe", qkv_bias=True, qk_norm=True, rotary_fraction=0.5, **SHARING),
    "deepseek_v3": ModelConfig(family="deepseek_v3", mla=MLA, **SHARING),
    "glm4_moe_lite": ModelConfig(family="glm4_moe_lite", mla=MLA, **SHARING),
    "olmo2": ModelConfig(family="olmo2", ffn_hidden_size=96, **COMMON),
    "phi3": ModelConfig(family="phi3", ffn_hidden_size=96, **COMMON),
    "gemma3_text": ModelConfig(family="gemma3_text", ffn_hidden_size=96, **COMMON),
    "gpt_oss": ModelConfig(family="gpt_oss", qkv_bias=True, **EXPERTS, **COMMON),
    "minimax_m2": ModelConfig(family="minimax_m2", qk_norm=True, router=ROUTER, **EXPERTS, **COMMON),
    "qwen3_next": ModelConfig(
        family="qwen3_next",
        qk_norm=True,
        gdn=GdnConfig(num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=8),
        layer_types=("linear_attention", "full_attention"),
        num_shared_experts=1,
        **EXPERTS,
        **COMMON,
    ),
}
MODELS["qwen3_5_moe_text"] = replace(MODELS["qwen3_next"], family="qwen3_5_moe_text")
QKVO = {f"self_attn.{x}_proj" for x in "qkvo"}
DENSE = {f"mlp.{x}_proj" for x in ("gate", "up", "down")}
ROUTED = {f"mlp.experts.{e}.{x}_proj" for e in range(2) for x in ("gate", "up", "down")}
SHARED = {f"mlp.shared_experts.{x}_proj" for x in ("gate", "up", "down")}
# As the weight_scale_inv of DeepSeek-V3's published checkpoint.
LATENT = {f"self_attn.{x}" for x in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")}
MIXTRAL = {f"block_sparse_moe.experts.{e}.w{i}" for e in range(2) for i in (1, 2, 3)}
# As the modules_to_not_convert of Qwen3-Next's FP8 checkpoint, which lists the others.
DELTA_NET = {"linear_attn.in_proj_qkvz", "linear_attn.out_proj"}
IN_PARTS = {"linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.out_proj"}
GATED = ROUTED | {f"mlp.shared_expert.{x}_proj" for x in ("gate", "up", "down")}
EXPECTED = {  # by layer; the last of four is for multi-token prediction
    "qwen2": [QKVO | DENSE] * 3,
    "mixtral": [QKVO | MIXTRAL] * 3,
    "glm4_moe": [QKVO | DENSE] + [QKVO | ROUTED | SHARED] * 3,
    "deepseek_v3": [LATENT | DENSE] + [LATENT | ROUTED | SHARED] * 3,
    "glm4_moe_lite": [LATENT | DENSE] + [LATENT | ROUTED | SHARED] * 3,
    "olmo2": [QKVO | DENSE] * 3,
    "phi3": [QKVO | DENSE] * 3,
    "gemma3_text": [QKVO | DENSE] * 3,
    "gpt_oss": [QKVO | ROUTED] * 3,
    "minimax_m2": [QKVO | MIXTRAL] * 3,
    "qwen3_next": [DELTA_NET | GATED, QKVO | GATED, DELTA_NET | GATED],
    "qwen3_5_moe_text": [IN_PARTS | GATED, QKVO | GATED, IN_PARTS | GATED],
}


def fp8_names(model: ModelConfig, precision: PrecisionConfig) -> set[str]:
    table = LayerTable.build(model, precision)
    result = {name for name in registry.hf_tensors(model) if table.rollout_format(name).is_quantized}
    assert result == {name for name in registry.hf_tensors(model) if table.trainer_format(name).is_quantized}
    return result


@pytest.mark.parametrize("family", MODELS)
def test_projections_of_every_layer_and_nothing_else(family):
    layers = enumerate(EXPECTED[family])
    expected = {f"model.layers.{layer}.{name}.weight" for layer, actual in layers for name in actual}
    assert fp8_names(MODELS[family], PrecisionConfig()) == expected


@pytest.mark.parametrize("family", MODELS)
def test_edges_stay_bf16(family):
    actual = fp8_names(MODELS[family], PrecisionConfig(bf16_first_layers=1, bf16_last_layers=1))
    layers = {int(name.split(".")[2]) for name in actual}
    assert layers == ({1} if MODELS[family].num_mtp_layers == 0 else {1, 3})


def test_parts_of_one_megatron_matrix_are_fp8_together():
    for model in MODELS.values():
        table = LayerTable.build(model, PrecisionConfig())
        for name in registry.weights(model):
            assert len({table.trainer_format(part).is_quantized for part in hf_names_of(name, model)}) == 1, name
