"""gpt-oss: attention sinks, windows in every other layer, biases, and experts with a clamped SwiGLU.

A checkpoint stores all experts of a layer in one tensor; the names of this table are those of single experts
(``data/fused_experts.py``).
"""

from typing import Any

from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.names import blocks
from megatron_fp8rl.names.family import COMMON, GROUPED_QUERY, LOCAL_EXPERTS, Family
from megatron_fp8rl.names.table import Row

_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}  # if missing
_EXPERT, _HF_EXPERT = blocks.M + "mlp.experts.{expert}.", blocks.H + "mlp.experts.{expert}."


def _rows(model: ModelConfig) -> tuple[Row, ...]:
    def same(mcore: str, hf: str, *shape: str) -> Row:
        return Row(blocks.M + mcore, ((blocks.H + hf, shape),))

    sinks = ((blocks.H + "self_attn.sinks", ("heads",)),)
    gate_up = tuple((f"{_HF_EXPERT}{name}_proj.bias", ("expert_ffn",)) for name in ("gate", "up"))
    return (
        *blocks.edges(model),
        *blocks.NORMS,
        *blocks.attention(model),
        same("self_attention.linear_proj.bias", "self_attn.o_proj.bias", "hidden"),
        Row(blocks.M + "self_attention.core_attention.softmax_offset", sinks, "rows", unit="heads"),
        same("mlp.router.weight", "mlp.router.weight", "experts", "hidden"),
        same("mlp.router.bias", "mlp.router.bias", "experts"),
        *blocks.feed_forward("mlp.experts.{expert}", "mlp.experts.{expert}", "expert_ffn", "moe"),
        Row(_EXPERT + "linear_fc1.bias", gate_up, "rows", "gate_up"),
        Row(_EXPERT + "linear_fc2.bias", ((_HF_EXPERT + "down_proj.bias", ("hidden",)),)),
    )


def _layer_types(num_layers: int) -> list[str]:
    return [("sliding_attention", "full_attention")[index % 2] for index in range(num_layers)]


def _complete(config: dict[str, Any]) -> dict[str, Any]:
    layers = config.get("num_hidden_layers")
    if config.get("layer_types") is None and isinstance(layers, int):
        config = config | {"layer_types": _layer_types(layers)}
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        config = config | {"rope_scaling": _YARN}
    return config


def _positions(model: ModelConfig) -> int | None:
    return model.rope_scaling and model.rope_scaling.original_max_position_embeddings


GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    rows=_rows,
    fields=COMMON | GROUPED_QUERY | LOCAL_EXPERTS | {"sliding_window": "sliding_window", "layer_types": "layer_types"},
    fixed={"attention_bias": True},
    implied={"qkv_bias": True},
    defaults={"sliding_window": 128, "head_dim": 64, "num_key_value_heads": 8, "num_experts_per_tok": 4},
    aliases={"num_experts": "num_local_experts"},
    routing={"scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": True},
    rope_scalings=("yarn",),
    yarn_options=("beta_fast", "beta_slow"),
    rope_theta=150_000.0,
    complete=_complete,
    derived={
        # vLLM computes these values, whatever config.json says.
        "swiglu_limit": ("the family's models (7.0)", lambda model: 7.0),
        "layer_types": (
            "num_hidden_layers, or the engine: its even layers have a window",
            lambda model: _layer_types(model.num_layers),
        ),
        "experts_per_token": ("num_experts_per_tok", lambda model: model.experts_per_token),
        "initial_context_length": ("rope_scaling", _positions),
    },
    fused_experts=True,
)
