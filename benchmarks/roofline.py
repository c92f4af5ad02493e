"""The memory-bandwidth limit of sampling.

A decode step reads each matrix once (of experts: those that the batch is expected to choose) and the KV cache of every
sequence, at half its final length on average.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_fp8rl.config import ModelConfig


@dataclass(frozen=True)
class Shape:
    prompt_tokens: int
    completion_tokens: int
    num_sequences: int


SHAPES = {
    "short": Shape(512, 1024, 256),
    "long": Shape(2048, 3072, 128),
    "8k": Shape(512, 8192, 64),
    "tiny": Shape(16, 8, 8),
}


@dataclass(frozen=True)
class Roofline:
    """Bytes that a decode step reads, and the tokens per second at a bandwidth."""

    weight_bytes: float
    kv_bytes_per_token: int
    kv_bytes: float
    tokens_per_s: float


def roofline(model: ModelConfig, precision: str, shape: Shape, bandwidth: float) -> Roofline:
    """The limit of reading, without arithmetic, prefill, sampling and launches. ``bandwidth`` in bytes/s."""
    fp8_bytes = 2.0 if precision == "bf16" else 1.0 + 4 / 128**2
    attention = model.hidden_size * model.head_dim * 2 * (model.num_attention_heads + model.num_key_value_heads)
    if model.is_moe:
        chosen = 1 - (1 - model.experts_per_token / model.num_experts) ** shape.num_sequences
        ffn = 3 * model.hidden_size * model.moe_ffn_hidden_size * model.num_experts * chosen
        router_bytes = 2 * model.hidden_size * model.num_experts
    else:
        ffn, router_bytes = 3 * model.hidden_size * model.ffn_hidden_size, 0
    head_bytes = 2 * model.vocab_size * model.hidden_size
    weight_bytes = model.num_layers * ((attention + ffn) * fp8_bytes + router_bytes) + head_bytes
    element_bytes = 1 if precision == "fp8_kv" else 2
    kv_token = 2 * model.num_layers * model.num_key_value_heads * model.head_dim * element_bytes
    kv_bytes = shape.num_sequences * (shape.prompt_tokens + shape.completion_tokens / 2) * kv_token
    tokens_per_s = shape.num_sequences * bandwidth / (weight_bytes + kv_bytes)
    return Roofline(weight_bytes, kv_token, kv_bytes, tokens_per_s)
