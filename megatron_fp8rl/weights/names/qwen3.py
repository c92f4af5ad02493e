"""Qwen3 and Qwen3-MoE: every weight as Megatron names it, and the Hugging Face tensors that it is made of.

A new family is a file like this one and a line in ``FAMILIES`` of the package.
"""

from __future__ import annotations

from typing import Any

from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.weights.names.table import Row

_M, _H = "decoder.layers.{layer}.", "model.layers.{layer}."

EMBEDDING = Row("embedding.word_embeddings.weight", (("model.embed_tokens.weight", ("vocab", "hidden")),), "rows")
FINAL_NORM = Row("decoder.final_layernorm.weight", (("model.norm.weight", ("hidden",)),))
HEAD = Row("output_layer.weight", (("lm_head.weight", ("vocab", "hidden")),), "rows")

ATTENTION = (
    Row(_M + "input_layernorm.weight", ((_H + "input_layernorm.weight", ("hidden",)),)),
    Row(
        _M + "self_attention.linear_qkv.weight",
        (
            (_H + "self_attn.q_proj.weight", ("q", "hidden")),
            (_H + "self_attn.k_proj.weight", ("kv", "hidden")),
            (_H + "self_attn.v_proj.weight", ("kv", "hidden")),
        ),
        "rows",
        "qkv",
    ),
    Row(_M + "self_attention.q_layernorm.weight", ((_H + "self_attn.q_norm.weight", ("head",)),)),
    Row(_M + "self_attention.k_layernorm.weight", ((_H + "self_attn.k_norm.weight", ("head",)),)),
    Row(_M + "self_attention.linear_proj.weight", ((_H + "self_attn.o_proj.weight", ("hidden", "q")),), "columns"),
    Row(_M + "pre_mlp_layernorm.weight", ((_H + "post_attention_layernorm.weight", ("hidden",)),)),
)
DENSE = (
    Row(
        _M + "mlp.linear_fc1.weight",
        (
            (_H + "mlp.gate_proj.weight", ("ffn", "hidden")),
            (_H + "mlp.up_proj.weight", ("ffn", "hidden")),
        ),
        "rows",
        "gate_up",
    ),
    Row(_M + "mlp.linear_fc2.weight", ((_H + "mlp.down_proj.weight", ("hidden", "ffn")),), "columns"),
)
MOE = (
    Row(_M + "mlp.router.weight", ((_H + "mlp.gate.weight", ("experts", "hidden")),)),
    Row(
        _M + "mlp.experts.{expert}.linear_fc1.weight",
        (
            (_H + "mlp.experts.{expert}.gate_proj.weight", ("expert_ffn", "hidden")),
            (_H + "mlp.experts.{expert}.up_proj.weight", ("expert_ffn", "hidden")),
        ),
        "rows",
        "gate_up",
    ),
    Row(
        _M + "mlp.experts.{expert}.linear_fc2.weight",
        ((_H + "mlp.experts.{expert}.down_proj.weight", ("hidden", "expert_ffn")),),
        "columns",
    ),
)


def rows(model: ModelConfig) -> tuple[Row, ...]:
    """The weights of ``model``. With tied embeddings there is no output head of its own."""
    head = () if model.tie_embeddings else (HEAD,)
    return (EMBEDDING, *ATTENTION, *(MOE if model.is_moe else DENSE), FINAL_NORM, *head)


def to_hf_config(model: ModelConfig) -> dict[str, Any]:
    """Content of config.json."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM" if model.is_moe else "Qwen3ForCausalLM"],
        "model_type": model.family,
        "dtype": "bfloat16",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size or model.moe_ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings,
        "initializer_range": model.initializer_range,
        "rms_norm_eps": model.norm_eps,
        # transformers 5 reads rope_parameters, earlier releases rope_theta.
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_theta": model.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": model.tie_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "use_cache": True,
    }
    if model.is_moe:
        config |= {
            "num_experts": model.num_experts,
            "num_experts_per_tok": model.experts_per_token,
            "moe_intermediate_size": model.moe_ffn_hidden_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config


def _refuse_unsupported(config: dict[str, Any], rope: dict[str, Any]) -> None:
    """Raise ValueError for a feature that changes the function and that the trainer does not compute."""
    wanted = {
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "quantization_config": None,
    }
    if config["model_type"] == "qwen3_moe":
        wanted |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    # transformers leaves norm_topk_prob out when it is False, its default.
    defaults = wanted | {"norm_topk_prob": False}
    found = {key: config.get(key, defaults[key]) for key in wanted}
    wrong = [f"{key} = {found[key]!r} (supported: {value!r})" for key, value in wanted.items() if found[key] != value]
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        wrong.append(f"rope_parameters = {rope!r} (supported: rope_type 'default')")
    if wrong:
        raise ValueError(f"config.json of a {config['model_type']} model has " + "; ".join(wrong))


def from_hf_config(config: dict[str, Any]) -> ModelConfig:
    """The architecture in a config.json. Raises ValueError for a feature that is not supported."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    _refuse_unsupported(config, rope)
    heads = config["num_attention_heads"]
    is_moe = config["model_type"] == "qwen3_moe"
    moe: dict[str, Any] = {}
    if is_moe:
        moe = {
            "num_experts": config.get("num_experts") or config["num_local_experts"],
            "experts_per_token": config["num_experts_per_tok"],
            "moe_ffn_hidden_size": config["moe_intermediate_size"],
        }
    return ModelConfig(
        family=config["model_type"],
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_attention_heads=heads,
        num_key_value_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        ffn_hidden_size=0 if is_moe else config["intermediate_size"],
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10_000.0))),
        norm_eps=config["rms_norm_eps"],
        tie_embeddings=config.get("tie_word_embeddings", False),
        max_position_embeddings=config["max_position_embeddings"],
        initializer_range=config.get("initializer_range", 0.02),
        **moe,
    )
