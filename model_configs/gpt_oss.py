"""gpt-oss. Dimensions are those of the published config.json, and those that FP8 blocks tile."""

from __future__ import annotations

from dataclasses import replace

from megatron_fp8rl.config import ModelConfig, ParallelConfig, RopeScaling, RunConfig
from model_configs import base


def gpt_oss_20b() -> ModelConfig:
    """openai/gpt-oss-20b."""
    return ModelConfig(
        family="gpt_oss",
        num_layers=24,
        hidden_size=2880,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=201088,
        num_experts=32,
        experts_per_token=4,
        moe_ffn_hidden_size=2880,
        qkv_bias=True,
        sliding_window=128,
        layer_types=("sliding_attention", "full_attention"),
        rope_theta=150_000.0,
        rope_scaling=RopeScaling(kind="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False),
        norm_eps=1e-5,
        max_position_embeddings=131072,
    )


def gpt_oss_120b() -> ModelConfig:
    """openai/gpt-oss-120b."""
    return replace(gpt_oss_20b(), num_layers=36, num_experts=128)


def tiled(model: ModelConfig) -> ModelConfig:
    """``model`` after ``python -m checkpoint_tools widen``: 2,880 features are 22.5 blocks of FP8, 2,944 are 23."""
    return replace(model, hidden_size=2944, moe_ffn_hidden_size=2944, norm_eps=model.norm_eps * 2880 / 2944)


def grpo_gpt_oss_20b() -> RunConfig:
    """gpt-oss-20b, widened, on 16 H200: trainer on 8 (EP8), 8 engines of 1."""
    return base.grpo(
        "grpo_gpt_oss_20b",
        tiled(gpt_oss_20b()),
        parallel=ParallelConfig(world_size=8, expert=8),
        engine=base.engines(8),
        optim=base.optim(),
    )


def grpo_gpt_oss_120b() -> RunConfig:
    """gpt-oss-120b, widened, on 32 H200: trainer on 24 (PP3, EP8), 4 engines of 2."""
    return base.grpo(
        "grpo_gpt_oss_120b",
        tiled(gpt_oss_120b()),
        parallel=ParallelConfig(world_size=24, pipeline=3, expert=8),
        engine=replace(base.engines(4, tensor=2), expert=2),
        optim=base.optim("full"),
    )
