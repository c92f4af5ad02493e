"""Mixtral. Dimensions are those of the published config.json."""

from __future__ import annotations

from megatron_fp8rl.config import ModelConfig, ParallelConfig, RunConfig
from model_configs import base


def mixtral_8x7b() -> ModelConfig:
    """mistralai/Mixtral-8x7B-v0.1."""
    return ModelConfig(
        family="mixtral",
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=32000,
        num_experts=8,
        experts_per_token=2,
        moe_ffn_hidden_size=14336,
        norm_eps=1e-5,
        max_position_embeddings=32768,
    )


def grpo_mixtral_8x7b() -> RunConfig:
    """Mixtral-8x7B on 16 H200: trainer on 8 (TP2, EP8), one engine on each of the other 8."""
    return base.grpo(
        "grpo_mixtral_8x7b",
        mixtral_8x7b(),
        parallel=ParallelConfig(world_size=8, tensor=2, expert=8),
        engine=base.engines(8),
        prompts=128,
        optim=base.optim("full"),
    )
