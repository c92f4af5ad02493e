"""MiniMax-M2. Dimensions are those of the published config.json."""

from __future__ import annotations

from megatron_fp8rl.config import ModelConfig, ParallelConfig, RouterConfig, RunConfig
from model_configs import base


def minimax_m2() -> ModelConfig:
    """MiniMaxAI/MiniMax-M2, without its prediction layers."""
    return ModelConfig(
        family="minimax_m2",
        num_layers=62,
        hidden_size=3072,
        num_attention_heads=48,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=200064,
        num_experts=256,
        experts_per_token=8,
        moe_ffn_hidden_size=1536,
        router=RouterConfig(score="sigmoid", correction_bias=True),
        qk_norm=True,
        rotary_fraction=0.5,
        rope_theta=5_000_000.0,
        max_position_embeddings=196608,
    )


def grpo_minimax_m2() -> RunConfig:
    """MiniMax-M2 on 64 H200: trainer on 48 (TP4 x PP3, EP16), 4 engines of 4."""
    return base.grpo(
        "grpo_minimax_m2",
        minimax_m2(),
        parallel=ParallelConfig(world_size=48, tensor=4, pipeline=3, expert=16),
        engine=base.engines(4, tensor=4),
        prompts=128,
        optim=base.optim("full"),
    )
