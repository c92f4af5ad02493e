"""Qwen2 and Qwen2.5: Llama's layers with biases of queries, keys and values, which config.json does not mention."""

from megatron_fp8rl.names import blocks
from megatron_fp8rl.names.family import DENSE, Family

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    rows=blocks.decoder,
    fields=DENSE,
    fixed={"use_sliding_window": False},
    implied={"qkv_bias": True},
    defaults={"num_key_value_heads": 32},
    ignored=frozenset({"sliding_window"}),  # no effect without use_sliding_window
    derives_head_dim=True,
)
