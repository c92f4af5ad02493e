"""GLM-4.5 and GLM-4.7-Flash: DeepSeek-V3's experts. The former has grouped-query attention that rotates half of each
head, the latter DeepSeek-V3's latent attention."""

from typing import Any

from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.names import blocks
from megatron_fp8rl.names.deepseek_v3 import ALIASES, EXPERTS, LATENT, ROUTER
from megatron_fp8rl.names.family import COMMON, GROUPED_QUERY, Family

GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    rows=blocks.decoder,
    fields=COMMON | GROUPED_QUERY | EXPERTS | {"attention_bias": "qkv_bias", "use_qk_norm": "qk_norm"},
    implied=ROUTER,
    defaults={"attention_bias": False, "use_qk_norm": False, "norm_topk_prob": True, "num_key_value_heads": 8},
    aliases=ALIASES,
    routing={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    rotary_fraction=0.5,
    mtp=blocks.MTP,
    fp32_router=True,
)


def _with_dense_layers(config: dict[str, Any]) -> dict[str, Any]:
    kinds = config.get("mlp_layer_types")
    return {"first_k_dense_replace": kinds.count("dense"), **config} if isinstance(kinds, list) else config


def _layer_types(model: ModelConfig) -> list[str]:
    return ["sparse" if kind.is_moe else "dense" for kind in model.layers[: model.num_layers]]


GLM4_MOE_LITE = Family(
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    rows=blocks.decoder,
    fields=COMMON | EXPERTS | LATENT,
    fixed={"attention_bias": False, "rope_interleave": True, "moe_layer_freq": 1},
    implied=ROUTER,
    defaults={"norm_topk_prob": True, "first_k_dense_replace": 1},
    aliases=ALIASES,
    ignored=frozenset({"head_dim", "qk_head_dim"}),  # sums of the others
    routing={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    rope_scalings=(),
    complete=_with_dense_layers,
    derived={"mlp_layer_types": ("first_k_dense_replace and num_hidden_layers", _layer_types)},
    for_engines=("first_k_dense_replace",),
    mtp=blocks.MTP,
    fp32_router=True,
)
