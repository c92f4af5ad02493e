"""OLMo-2 and OLMo-3: Llama's layers with norms behind attention and feed-forward instead of before them, and with one
norm of all query heads and one of all key heads. OLMo-3 has a window of attention in three of four layers."""

from functools import partial
from typing import Any

from megatron_fp8rl.names import blocks, rope
from megatron_fp8rl.names.family import DENSE, WINDOWS, Family, with_layer_types

_ROWS = partial(blocks.decoder, norms=blocks.OUTPUT_NORMS, norms_all_heads=True, whole_norms=True)

OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    rows=_ROWS,
    fields=DENSE,
    fixed={"attention_bias": False},
    derives_head_dim=True,
)


def _complete(config: dict[str, Any]) -> dict[str, Any]:
    return with_layer_types(rope.of_full_layers(config, 500_000.0), 4)


OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    rows=_ROWS,
    fields=DENSE | WINDOWS,
    fixed={"attention_bias": False},
    defaults={"sliding_window": 4096},
    rope_theta=500_000.0,
    complete=_complete,
    derives_head_dim=True,
)
