"""Qwen3-Next. Dimensions are those of the published config.json."""

from __future__ import annotations

from megatron_fp8rl.config import GdnConfig, ModelConfig


def qwen3_next_80b_a3b() -> ModelConfig:
    """Qwen/Qwen3-Next-80B-A3B-Instruct, without its prediction layer. For conversions."""
    return ModelConfig(
        family="qwen3_next",
        num_layers=48,
        layer_types=(*["linear_attention"] * 3, "full_attention"),
        hidden_size=2048,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=256,
        gdn=GdnConfig(num_key_heads=16, num_value_heads=32, key_head_dim=128, value_head_dim=128),
        vocab_size=151936,
        ffn_hidden_size=5120,  # of no layer
        num_experts=512,
        experts_per_token=10,
        moe_ffn_hidden_size=512,
        num_shared_experts=1,
        qk_norm=True,
        rotary_fraction=0.25,
        rope_theta=10_000_000.0,
        max_position_embeddings=262144,
    )
