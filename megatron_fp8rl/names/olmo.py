"""OLMo-2: Llama's layers with norms behind attention and feed-forward instead of before them, and with a norm of all
query heads together and one of all key heads."""

from functools import partial

from megatron_fp8rl.names import blocks
from megatron_fp8rl.names.family import DENSE, Family

OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    rows=partial(blocks.decoder, norms=blocks.OUTPUT_NORMS, norms_all_heads=True, whole_norms=True),
    fields=DENSE,
    fixed={"attention_bias": False},
    derives_head_dim=True,
)
