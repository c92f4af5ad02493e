"""Qwen3, dense and mixtures of experts. Dimensions are those of the published config.json files."""

from __future__ import annotations

from dataclasses import replace

from megatron_fp8rl.config import ModelConfig, ParallelConfig, RunConfig
from model_configs import base


def qwen3_8b() -> ModelConfig:
    """Qwen/Qwen3-8B."""
    return ModelConfig(
        family="qwen3",
        num_layers=36,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        ffn_hidden_size=12288,
        max_position_embeddings=40960,
    )


def qwen3_30b_a3b() -> ModelConfig:
    """Qwen/Qwen3-30B-A3B. An expert is 768 wide, six FP8 blocks: it tiles over 1, 2, 3 or 6 ranks and no others."""
    return ModelConfig(
        family="qwen3_moe",
        num_layers=48,
        hidden_size=2048,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=151936,
        ffn_hidden_size=6144,  # named in config.json; no layer is dense
        num_experts=128,
        experts_per_token=8,
        moe_ffn_hidden_size=768,
        max_position_embeddings=40960,
    )


def qwen3_235b_a22b() -> ModelConfig:
    """Qwen/Qwen3-235B-A22B. An expert is 1536 wide, twelve FP8 blocks: it tiles over 1, 2, 3, 4, 6 or 12 ranks."""
    return replace(
        qwen3_30b_a3b(),
        num_layers=94,
        hidden_size=4096,
        num_attention_heads=64,
        ffn_hidden_size=12288,
        moe_ffn_hidden_size=1536,
    )


def grpo_qwen3_8b() -> RunConfig:
    """Qwen3-8B on 8 H200: trainer on 4 (TP2), one engine on each of the other 4."""
    return base.grpo(
        "grpo_qwen3_8b",
        qwen3_8b(),
        parallel=ParallelConfig(world_size=4, tensor=2),
        engine=base.engines(4),
        optim=base.optim(),
    )


def grpo_qwen3_8b_colocated() -> RunConfig:
    """Qwen3-8B on 8 H200, which train (TP2) and sample (one engine on each) in turns."""
    return base.colocated(grpo_qwen3_8b(), "grpo_qwen3_8b_colocated", parallel=ParallelConfig(world_size=8, tensor=2))


def grpo_qwen3_30b_a3b() -> RunConfig:
    """Qwen3-30B-A3B on 8 H200: trainer on 6 (PP3 x EP2; 4 cannot hold the optimizer), an engine on each other 2."""
    return base.grpo(
        "grpo_qwen3_30b_a3b",
        qwen3_30b_a3b(),
        parallel=ParallelConfig(world_size=6, pipeline=3, virtual_stages=2, expert=2),
        engine=base.engines(2),
        optim=base.optim(),
    )


def grpo_qwen3_30b_a3b_colocated() -> RunConfig:
    """Qwen3-30B-A3B on 8 H200, which train (EP8) and sample (one engine on each) in turns; 440 GiB of host memory."""
    return base.colocated(
        grpo_qwen3_30b_a3b(), "grpo_qwen3_30b_a3b_colocated", parallel=ParallelConfig(world_size=8, expert=8)
    )


def grpo_qwen3_30b_a3b_16gpu() -> RunConfig:
    """Qwen3-30B-A3B on 16 H200: trainer on 8 (EP8, no pipeline), one engine on each of the other 8."""
    return base.grpo(
        "grpo_qwen3_30b_a3b_16gpu",
        qwen3_30b_a3b(),
        parallel=ParallelConfig(world_size=8, expert=8),
        engine=base.engines(8),
        prompts=128,
        optim=base.optim(),
    )


def grpo_qwen3_235b_a22b() -> RunConfig:
    """Qwen3-235B-A22B on 64 H200: trainer on 48 (TP4 x PP3, EP16), 4 engines of 4."""
    return base.grpo(
        "grpo_qwen3_235b_a22b",
        qwen3_235b_a22b(),
        parallel=ParallelConfig(world_size=48, tensor=4, pipeline=3, expert=16),
        engine=base.engines(4, tensor=4),
        prompts=128,
        optim=base.optim("full"),
    )
