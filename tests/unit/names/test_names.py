"""Names and shards of single parameters; tests of every family are in test_family_tables.py."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3MoeConfig

from megatron_fp8rl.names import registry
from tests.helpers.hf_parts import hf_names_of

# Odd on purpose: one key/value head, a head size unrelated to the hidden size, three layers, six experts.
DENSE = {
    "vocab_size": 97,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 24,
}
GROUPED = DENSE | {"vocab_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}
MOE = GROUPED | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True}


def test_shard_layouts():
    """The rank's piece of the fused matrices, written out by hand."""
    model = registry.from_hf_config(Qwen3Config(**GROUPED).to_dict())
    layer = "decoder.layers.0."
    tag = {"q_proj": 1000, "k_proj": 2000, "v_proj": 3000, "gate_proj": 4000, "up_proj": 5000}

    def get(name: str) -> torch.Tensor:
        rows, hidden = registry.hf_tensors(model)[name]
        base = next(value for key, value in tag.items() if key in name)
        return (base + torch.arange(rows, dtype=torch.float32)).repeat(hidden, 1).T

    qkv = registry.from_hf(layer + "self_attention.linear_qkv.weight", get, model)
    second = registry.shard(layer + "self_attention.linear_qkv.weight", qkv, model, 2, 1)[:, 0]
    expected = [*range(1072, 1144), *range(2024, 2048), *range(3024, 3048)]  # group 1: q heads 3..5, k head 1, v head 1
    assert second.int().tolist() == expected
    fc1 = registry.from_hf(layer + "mlp.linear_fc1.weight", get, model)
    second = registry.shard(layer + "mlp.linear_fc1.weight", fc1, model, 2, 1)[:, 0]
    assert second.int().tolist() == [*range(4028, 4056), *range(5028, 5056)]


@pytest.mark.parametrize(
    ("local", "expected"),
    [
        (
            "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight",
            "decoder.layers.3.mlp.experts.6.linear_fc1.weight",
        ),
        ("decoder.layers.0.mlp.experts.linear_fc2.weight11", "decoder.layers.2.mlp.experts.15.linear_fc2.weight"),
        ("module.module.decoder.layers.10.mlp.router.weight", "decoder.layers.12.mlp.router.weight"),
        ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.2.input_layernorm.weight"),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "decoder.layers.2.pre_mlp_layernorm.weight"),
        ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
    ],
)
def test_global_name(local, expected):
    assert registry.global_name(local, layer_offset=2, expert_offset=4) == expected
    assert registry.is_expert(expected) == (".experts." in expected)


def test_tied_output_layer_is_the_embedding():
    model = registry.from_hf_config(Qwen3Config(**DENSE, tie_word_embeddings=True).to_dict())
    assert "output_layer.weight" not in registry.weights(model)
    assert hf_names_of("output_layer.weight", model) == ["model.embed_tokens.weight"]


def test_mistakes_are_named():
    config = Qwen3Config(**DENSE).to_dict()
    model = registry.from_hf_config(config)
    with pytest.raises(KeyError, match="layers.9.*not a parameter"):
        hf_names_of("decoder.layers.9.mlp.linear_fc2.weight", model)
    with pytest.raises(ValueError, match="model.norm.weight: shape"):
        registry.from_hf("decoder.final_layernorm.weight", lambda _: torch.zeros(3), model)
    qkv = "decoder.layers.0.self_attention.linear_qkv.weight"
    with pytest.raises(ValueError, match="1 query groups cannot be divided over 2"):
        registry.shard(qkv, torch.zeros(120, 40), model, 2, 0)
    with pytest.raises(ValueError, match="attention_bias = True"):
        registry.from_hf_config(config | {"attention_bias": True})
    with pytest.raises(ValueError, match="rope_type"):
        registry.from_hf_config(
            config | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}
        )
    with pytest.raises(ValueError, match="mlp_only_layers"):
        registry.from_hf_config(Qwen3MoeConfig(**MOE | {"mlp_only_layers": [1]}).to_dict())
    with pytest.raises(ValueError, match="model_type 'gemma3'"):
        registry.from_hf_config({"model_type": "gemma3"})
