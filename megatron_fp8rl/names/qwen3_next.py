"""Qwen3-Next: three gated delta nets, then gated attention with partial rotation; experts beside a gated shared one."""

from typing import Any

from megatron_fp8rl.names import blocks
from megatron_fp8rl.names.family import DENSE, Family, with_layer_types

DELTA_NET = {
    "linear_num_key_heads": "gdn.num_key_heads",
    "linear_num_value_heads": "gdn.num_value_heads",
    "linear_key_head_dim": "gdn.key_head_dim",
    "linear_value_head_dim": "gdn.value_head_dim",
    "linear_conv_kernel_dim": "gdn.conv_width",
}


def complete(config: dict[str, Any]) -> dict[str, Any]:
    """The kinds of layers and the number of shared experts, which releases express by other keys."""
    config = with_layer_types(config, config.get("full_attention_interval", 4), "linear_attention")
    shared, width = config.get("shared_expert_intermediate_size"), config.get("moe_intermediate_size")
    if not isinstance(shared, int) or not isinstance(width, int) or not width:
        return config
    return config | {"num_shared_experts": shared // width}


ATTENTION: dict[str, Any] = {  # gated attention with partial rotation beside gated delta nets
    "implied": {"qk_norm": True},
    "layer_types": ("full_attention", "linear_attention"),
    "zero_centred_norms": True,
    "rope_scalings": (),  # not compared with transformers
    "rotary_fraction": 0.25,
}
SHARED_EXPERTS: dict[str, Any] = {  # whose number config.json expresses by their width
    "unwritten": frozenset({"num_shared_experts"}),
    "derived": {
        "shared_expert_intermediate_size": (
            "a multiple of moe_intermediate_size",
            lambda model: model.num_shared_experts * model.moe_ffn_hidden_size,
        )
    },
}

QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    rows=blocks.decoder,
    fields=DENSE
    | DELTA_NET
    | {
        "layer_types": "layer_types",
        "num_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
        "moe_intermediate_size": "moe_ffn_hidden_size",
        "num_shared_experts": "num_shared_experts",
        "norm_topk_prob": "router.normalize",
    },
    fixed={"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    defaults={"norm_topk_prob": True, "num_key_value_heads": 2, "head_dim": 256},
    aliases={"num_local_experts": "num_experts"},
    ignored=frozenset({"full_attention_interval"}),  # only read to complete layer_types
    routing={"scoring_func": "softmax", "topk_method": "greedy"},
    complete=complete,
    **SHARED_EXPERTS,
    **ATTENTION,
)
