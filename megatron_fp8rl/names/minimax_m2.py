"""MiniMax-M2: a norm of all query heads together and one of all key heads, partial rotation, sigmoid routing."""

from functools import partial
from typing import Any

from megatron_fp8rl.names import blocks
from megatron_fp8rl.names.family import COMMON, GROUPED_QUERY, LOCAL_EXPERTS, Family

_FOR_ENGINES = {"scoring_func": "sigmoid", "use_routing_bias": True}


def _with_fraction(config: dict[str, Any]) -> dict[str, Any]:
    rotated, width = config.get("rotary_dim"), config.get("head_dim")
    if not isinstance(rotated, int) or not isinstance(width, int) or not width:
        return config
    return {"partial_rotary_factor": rotated / width, **config}


MINIMAX_M2 = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    rows=partial(
        blocks.decoder, parent="block_sparse_moe", router_bias="e_score_correction_bias", norms_all_heads=True
    ),
    fields=COMMON | GROUPED_QUERY | LOCAL_EXPERTS,
    fixed={"attention_bias": False, "use_qk_norm": True, "qk_norm_type": "per_layer", **_FOR_ENGINES},
    implied={"qk_norm": True, "router.score": "sigmoid", "router.correction_bias": True},
    defaults={"num_key_value_heads": 8, "head_dim": 128},
    aliases={"num_experts": "num_local_experts"},
    # Of dense layers, shared experts and prediction layers, which these checkpoints do not have.
    ignored=frozenset("mlp_intermediate_size shared_moe_mode mtp_transformer_layers num_mtp_modules use_mtp".split()),
    routing={"topk_method": "noaux_tc", "norm_topk_prob": True},
    rope_theta=5_000_000.0,
    rotary_fraction=1.0,
    complete=_with_fraction,
    derived={
        "rotary_dim": ("partial_rotary_factor", lambda model: int(model.head_dim * model.rotary_fraction)),
        "attn_type_list": ("num_hidden_layers", lambda model: [1] * model.num_layers),  # 0 is linear attention
    },
    for_engines=(*_FOR_ENGINES, "rotary_dim"),
    fp32_router=True,
    module_prefixes=(".block_sparse_moe.", ".mlp."),
)
