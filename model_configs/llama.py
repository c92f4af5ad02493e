"""Llama 3.1. Dimensions are those of the published config.json."""

from __future__ import annotations

from megatron_fp8rl.config import ModelConfig, ParallelConfig, RopeScaling, RunConfig
from model_configs import base


def llama31_8b() -> ModelConfig:
    """meta-llama/Llama-3.1-8B."""
    return ModelConfig(
        family="llama",
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        ffn_hidden_size=14336,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(
            kind="llama3", factor=8.0, original_max_position_embeddings=8192, low_freq_factor=1.0, high_freq_factor=4.0
        ),
        norm_eps=1e-5,
        max_position_embeddings=131072,
    )


def grpo_llama31_8b() -> RunConfig:
    """Llama-3.1-8B on 8 H200: trainer on 4 (TP2), one engine on each of the other 4."""
    return base.grpo(
        "grpo_llama31_8b",
        llama31_8b(),
        parallel=ParallelConfig(world_size=4, tensor=2),
        engine=base.engines(4),
        optim=base.optim(),
    )
