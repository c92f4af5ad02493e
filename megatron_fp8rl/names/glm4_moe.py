"""GLM-4.5: grouped-query attention that rotates half of each head, followed by DeepSeek-V3's experts."""

from megatron_fp8rl.names import blocks
from megatron_fp8rl.names.deepseek_v3 import ALIASES, EXPERTS, ROUTER
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
