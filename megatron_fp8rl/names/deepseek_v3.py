"""DeepSeek-V3: latent attention, sigmoid routing over groups with a correction bias, shared experts."""

from megatron_fp8rl.names import blocks
from megatron_fp8rl.names.family import COMMON, Family

# Router and experts of every family that adopted DeepSeek-V3's.
EXPERTS = {
    "intermediate_size": "ffn_hidden_size",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "first_k_dense_replace": "first_dense_layers",
    "n_group": "router.num_groups",
    "topk_group": "router.groups_per_token",
    "routed_scaling_factor": "router.scaling_factor",
    "norm_topk_prob": "router.normalize",
    "num_nextn_predict_layers": "num_mtp_layers",
}
LATENT = {
    name: f"mla.{name}"
    for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
}
ROUTER = {"router.score": "sigmoid", "router.correction_bias": True}
ALIASES = {"num_mtp_layers": "num_nextn_predict_layers", "num_local_experts": "n_routed_experts"}

_FOR_ENGINES = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    rows=blocks.decoder,
    fields=COMMON | EXPERTS | LATENT,
    fixed={
        "attention_bias": False,
        "moe_layer_freq": 1,
        **_FOR_ENGINES,
        "rope_interleave": True,
    },
    implied=ROUTER,
    defaults={"norm_topk_prob": True},
    aliases=ALIASES,
    ignored=frozenset({"head_dim", "qk_head_dim"}),  # sums of the others
    rope_scalings=("yarn",),
    for_engines=(*_FOR_ENGINES,),
    mtp=blocks.MTP,
)
