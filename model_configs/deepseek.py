"""DeepSeek-V3. Dimensions are those of the published config.json."""

from __future__ import annotations

import dataclasses

from megatron_fp8rl.config import MlaConfig, ModelConfig, ParallelConfig, RopeScaling, RouterConfig, RunConfig
from model_configs import base


def deepseek_v3() -> ModelConfig:
    """deepseek-ai/DeepSeek-V3, without its multi-token prediction layer."""
    mla = MlaConfig(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    return ModelConfig(
        family="deepseek_v3",
        num_layers=61,
        hidden_size=7168,
        num_attention_heads=128,
        num_key_value_heads=128,
        head_dim=mla.qk_head_dim,
        vocab_size=129280,
        ffn_hidden_size=18432,
        num_experts=256,
        experts_per_token=8,
        moe_ffn_hidden_size=2048,
        num_shared_experts=1,
        first_dense_layers=3,
        router=RouterConfig(
            score="sigmoid", correction_bias=True, num_groups=8, groups_per_token=4, scaling_factor=2.5, normalize=True
        ),
        mla=mla,
        rope_theta=10_000.0,
        rope_scaling=RopeScaling(
            kind="yarn",
            factor=40.0,
            original_max_position_embeddings=4096,
            beta_fast=32.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
        ),
        max_position_embeddings=163840,
    )


def kimi_k2() -> ModelConfig:
    """moonshotai/Kimi-K2-Instruct: DeepSeek-V3's architecture with 384 experts and half the heads."""
    return dataclasses.replace(
        deepseek_v3(),
        num_attention_heads=64,
        num_key_value_heads=64,
        vocab_size=163840,
        num_experts=384,
        first_dense_layers=1,
        router=RouterConfig(score="sigmoid", correction_bias=True, scaling_factor=2.827, normalize=True),
        rope_theta=50_000.0,
        rope_scaling=RopeScaling(
            kind="yarn",
            factor=32.0,
            original_max_position_embeddings=4096,
            beta_fast=1.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
        ),
        max_position_embeddings=131072,
    )


def grpo_deepseek_v3() -> RunConfig:
    """DeepSeek-V3 on 256 H200: trainer on 128 (TP4 x PP4, EP32), 16 engines of 8."""
    return base.grpo(
        "grpo_deepseek_v3",
        deepseek_v3(),
        parallel=ParallelConfig(world_size=128, tensor=4, pipeline=4, expert=32),
        engine=base.engines(16, tensor=8),
        prompts=256,
        optim=base.optim("full"),
    )
