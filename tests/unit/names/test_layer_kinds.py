"""The kinds of a model's layers, and what reads them: names, parameter counts, lengths and refusals."""

import dataclasses
from dataclasses import replace

import pytest

from megatron_fp8rl.config import LayerKind, MlaConfig, ModelConfig
from megatron_fp8rl.names import family, registry
from megatron_fp8rl.names.mistral import MISTRAL
from megatron_fp8rl.names.table import rows_of
from tests.helpers.configs import fields_of, make

SHAPE = dict(hidden_size=48, num_attention_heads=4, num_key_value_heads=4, head_dim=20, vocab_size=131)
DENSE = ModelConfig(family="llama", num_layers=4, ffn_hidden_size=56, **SHAPE)
EXPERTS = dict(num_experts=6, experts_per_token=2, moe_ffn_hidden_size=24)
MLA = MlaConfig(q_lora_rank=28, kv_lora_rank=36, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10)
PATTERN = ("sliding_attention", "sliding_attention", "full_attention")


def test_leading_dense_layers_and_latent_attention():
    model = replace(DENSE, family="deepseek_v3", mla=MLA, first_dense_layers=1, num_mtp_layers=1, **EXPERTS)
    dense, moe = LayerKind(mixer="mla", feed_forward="dense"), LayerKind(mixer="mla", feed_forward="moe")
    assert model.layers == (dense, moe, moe, moe, moe)  # the last predicts several tokens
    assert model.has("mla") and model.has("dense") and model.has("moe") and not model.has("attention")
    names = registry.weights(model)
    assert "decoder.layers.0.mlp.linear_fc1.weight" in names and "decoder.layers.1.mlp.router.weight" in names
    assert not any("linear_qkv" in name for name in names)


def test_a_pattern_repeats_over_the_layers():
    model = replace(DENSE, sliding_window=8, layer_types=PATTERN)
    assert [kind.window for kind in model.layers] == [8, 8, None, 8]
    assert replace(model, layer_types=[*PATTERN]) == model  # as JSON files have it
    assert [kind.window for kind in replace(model, num_layers=7).layers] == [8, 8, None, 8, 8, 8, None]
    assert model.max_sequence_tokens == model.max_position_embeddings  # a window does not shorten sequences
    assert {kind.window for kind in replace(DENSE, sliding_window=8).layers} == {8}


def test_rows_of_a_layer_are_those_of_its_parts():
    rows = registry.FAMILIES["qwen3_moe"].rows(replace(DENSE, family="qwen3_moe", **EXPERTS))

    def names(kind):
        return {row.mcore.partition("{layer}.")[2] for row in rows_of(rows, kind)}

    moe, dense = (names(LayerKind(mixer="attention", feed_forward=part)) for part in ("moe", "dense"))
    assert "mlp.router.weight" in moe - dense and "mlp.linear_fc1.weight" in dense - moe
    assert "self_attention.linear_qkv.weight" in moe & dense
    assert "self_attention.linear_qkv.weight" not in names(LayerKind(mixer="mla", feed_forward="moe"))


def test_config_json_lists_the_attention_of_each_layer():
    described = dataclasses.replace(MISTRAL, fields={**MISTRAL.fields, "layer_types": "layer_types"})
    model = replace(DENSE, family="mistral", sliding_window=8, layer_types=PATTERN, norm_eps=1e-5)
    config = family.write(described, model)
    assert config["layer_types"] == [*PATTERN, "sliding_attention"]
    saved = config | {"layer_types": [*config["layer_types"]]}  # JSON has lists
    assert family.read(described, saved, keep_mtp=True, fp8_weights=False) == model
    with pytest.raises(ValueError, match=r"layer_types = \['chunked_attention'\].*'sliding_attention'"):
        chunked = saved | {"layer_types": ["chunked_attention"] * 4}
        family.read(described, chunked, keep_mtp=True, fp8_weights=False)
    with pytest.raises(ValueError, match="layer_types = 3 is not a list"):
        family.read(described, saved | {"layer_types": 3}, keep_mtp=True, fp8_weights=False)


def test_a_window_without_its_size_is_refused():
    cfg = make(replace(DENSE, layer_types=PATTERN))
    assert "--model.layer_types" in fields_of(cfg)
