"""Qwen3 and Qwen3-MoE: a norm of each query and key head; every layer of the latter is a mixture of experts."""

from megatron_fp8rl.names import blocks
from megatron_fp8rl.names.family import DENSE, Family

_FIXED = {"attention_bias": False, "use_sliding_window": False}
_IGNORED = frozenset({"sliding_window"})  # no effect without use_sliding_window

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    rows=blocks.decoder,
    fields=DENSE,
    fixed=_FIXED,
    defaults={"num_key_value_heads": 32, "head_dim": 128},
    ignored=_IGNORED,
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    rows=blocks.decoder,
    fields=DENSE
    | {
        "num_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
        "moe_intermediate_size": "moe_ffn_hidden_size",
        "norm_topk_prob": "router.normalize",
    },
    fixed=_FIXED | {"decoder_sparse_step": 1, "mlp_only_layers": []},
    defaults={"norm_topk_prob": False, "num_key_value_heads": 4},
    aliases={"num_local_experts": "num_experts"},
    ignored=_IGNORED,
    routing={"scoring_func": "softmax", "topk_method": "greedy"},
)
