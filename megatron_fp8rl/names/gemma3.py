"""Gemma 3, its text model: zero-centred norms before and behind attention and feed-forward, GeGLU, a scaled embedding,
and in five of six layers a window of attention with another rotary base."""

from functools import partial
from typing import Any

from megatron_fp8rl.names import blocks, rope
from megatron_fp8rl.names.family import DENSE, WINDOWS, Family, with_layer_types


def _complete(config: dict[str, Any]) -> dict[str, Any]:
    every = config.get("sliding_window_pattern", 6)
    return with_layer_types(rope.of_full_layers(config, 10_000.0), every)


GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    rows=partial(blocks.decoder, norms=blocks.FOUR_NORMS),
    fields=DENSE | WINDOWS | {"query_pre_attn_scalar": "query_pre_attn_scalar"},
    fixed={
        "attention_bias": False,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    # The published folders of 4B, 12B and 27B leave out what transformers assumes.
    defaults={
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
    },
    # The patterns only complete layer_types.
    ignored=frozenset({"sliding_window_pattern", "_sliding_window_pattern", "cache_implementation"}),
    rope_theta=1_000_000.0,
    complete=_complete,
    zero_centred_norms=True,
    activation="gelu_tanh",
    scales_embedding=True,
)
