"""GLM-4.5-Air and GLM-4.7-Flash. Dimensions are those of the published config.json."""

from __future__ import annotations

from dataclasses import replace

from megatron_fp8rl.config import MlaConfig, ModelConfig, ParallelConfig, PrecisionConfig, RouterConfig, RunConfig
from model_configs import base


def glm_45_air() -> ModelConfig:
    """zai-org/GLM-4.5-Air without its prediction layer. Experts have width 1408: eleven FP8 blocks."""
    return ModelConfig(
        family="glm4_moe",
        num_layers=46,
        hidden_size=4096,
        num_attention_heads=96,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151552,
        ffn_hidden_size=10944,
        num_experts=128,
        experts_per_token=8,
        moe_ffn_hidden_size=1408,
        num_shared_experts=1,
        first_dense_layers=1,
        router=RouterConfig(score="sigmoid", correction_bias=True),
        qkv_bias=True,
        qk_norm=False,
        rotary_fraction=0.5,
        norm_eps=1e-5,
        max_position_embeddings=131072,
    )


def grpo_glm_45_air() -> RunConfig:
    """GLM-4.5-Air on 32 H200: trainer on 24 (PP3, EP8), one engine with an FP8 KV cache on each of the other 8.

    The first layer is BF16: its feed-forward part, 10944 wide, is no multiple of the FP8 tile. Answers have 3k tokens.
    """
    cfg = base.grpo(
        "grpo_glm_45_air",
        glm_45_air(),
        parallel=ParallelConfig(world_size=24, pipeline=3, expert=8),
        engine=base.engines(8),
        prompts=128,
        optim=base.optim("full"),
    )
    return replace(
        cfg,
        precision=PrecisionConfig(bf16_first_layers=1),
        engine=replace(cfg.engine, kv_cache_dtype="fp8"),
        sampling=replace(cfg.sampling, max_completion_tokens=3072),
    )


def glm_47_flash() -> ModelConfig:
    """zai-org/GLM-4.7-Flash without its prediction layer: latent attention, 64 experts."""
    mla = MlaConfig(q_lora_rank=768, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256)
    return ModelConfig(
        family="glm4_moe_lite",
        num_layers=47,
        hidden_size=2048,
        num_attention_heads=20,
        num_key_value_heads=20,
        head_dim=mla.qk_head_dim,
        vocab_size=154880,
        ffn_hidden_size=10240,
        num_experts=64,
        experts_per_token=4,
        moe_ffn_hidden_size=1536,
        num_shared_experts=1,
        first_dense_layers=1,
        router=RouterConfig(score="sigmoid", correction_bias=True, scaling_factor=1.8),
        mla=mla,
        norm_eps=1e-5,
        max_position_embeddings=202752,
    )


def grpo_glm_47_flash() -> RunConfig:
    """GLM-4.7-Flash on 16 H200: trainer on 8 (EP8), one engine on each of the other 8."""
    return base.grpo(
        "grpo_glm_47_flash",
        glm_47_flash(),
        parallel=ParallelConfig(world_size=8, expert=8),
        engine=base.engines(8),
        optim=base.optim("full"),
    )
