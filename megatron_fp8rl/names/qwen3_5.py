"""Qwen3.5, its text models, dense and MoE: Qwen3-Next's layers, whose gated delta nets have four projections."""

from functools import partial
from typing import Any

from megatron_fp8rl.names import blocks
from megatron_fp8rl.names.family import COMMON, GROUPED_QUERY, Family
from megatron_fp8rl.names.qwen3_next import ATTENTION, DELTA_NET, SHARED_EXPERTS, complete

_KEYS = COMMON | GROUPED_QUERY | DELTA_NET | {"layer_types": "layer_types"}
_EXPERTS = {
    "num_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "num_shared_experts": "num_shared_experts",
}
_SAME: dict[str, Any] = ATTENTION | {
    "rows": partial(blocks.decoder, mixers=blocks.MIXERS | {"gdn": blocks.gated_delta_net_in_parts}),
    # The trainer's states of gated delta nets are float32.
    "fixed": {"attention_bias": False, "attn_output_gate": True, "mamba_ssm_dtype": "float32"},
    # The prediction layer is not read, and no layer of an MoE model has the width intermediate_size.
    "ignored": frozenset(
        {"full_attention_interval", "intermediate_size", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}
    ),
    # Tokens of text have one position on all axes of the published rotary embedding. vLLM would ask for three.
    "for_engines": ("rope_parameters",),
}

QWEN3_5 = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    fields=_KEYS | {"intermediate_size": "ffn_hidden_size"},
    defaults={"num_key_value_heads": 4, "head_dim": 256},
    complete=complete,
    **_SAME,
)

QWEN3_5_MOE = Family(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    fields=_KEYS | _EXPERTS,
    defaults={"num_key_value_heads": 2, "head_dim": 256},
    routing={"norm_topk_prob": True},
    complete=complete,
    **SHARED_EXPERTS,
    **_SAME,
)
