"""Mixtral: Mistral's attention, and experts that the checkpoint calls w1 (gate), w3 (up) and w2 (down)."""

from functools import partial

from megatron_fp8rl.names import blocks
from megatron_fp8rl.names.family import COMMON, GROUPED_QUERY, LOCAL_EXPERTS, Family

MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    rows=partial(blocks.decoder, parent="block_sparse_moe"),
    fields=COMMON | GROUPED_QUERY | LOCAL_EXPERTS | {"sliding_window": "sliding_window"},
    defaults={"sliding_window": None, "num_key_value_heads": 8},
    aliases={"num_experts": "num_local_experts"},
    routing={"scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": True},
    rope_theta=1_000_000.0,
)
