"""Mistral 7B: Llama's layers. Releases before 0.2 attend over a window of 4096 tokens."""

from megatron_fp8rl.names import blocks
from megatron_fp8rl.names.family import DENSE, Family

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    rows=blocks.decoder,
    fields=DENSE | {"sliding_window": "sliding_window"},
    defaults={"sliding_window": 4096, "num_key_value_heads": 8},
)
