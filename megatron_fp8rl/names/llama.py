"""Llama 3 and its relatives: grouped-query attention and a dense SwiGLU feed-forward, tied or not."""

from megatron_fp8rl.names import blocks
from megatron_fp8rl.names.family import DENSE, Family

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    rows=blocks.decoder,
    fields=DENSE,
    fixed={"attention_bias": False, "mlp_bias": False},
)
