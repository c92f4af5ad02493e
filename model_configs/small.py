"""Models of half a billion parameters that learn to sort digits within minutes on one H200."""

from __future__ import annotations

from dataclasses import replace

from megatron_fp8rl.config import (
    AlgoConfig,
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    EnvironmentConfig,
    ModelConfig,
    ObserveConfig,
    OptimConfig,
    RunConfig,
    SamplingConfig,
    ScoringConfig,
    WarmStartConfig,
    WeightSyncConfig,
)


def small_qwen3() -> RunConfig:
    """Qwen3-0.6B's layers over characters, 0.44 B parameters: 6 to 10 digits to sort, on 1 H200 with its engine."""
    return RunConfig(
        name="small_qwen3",
        model=ModelConfig(
            family="qwen3",
            num_layers=28,
            hidden_size=1024,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=128,
            ffn_hidden_size=3072,
            max_position_embeddings=1024,
        ),
        optim=OptimConfig(lr=1e-5, warmup_steps=5, max_tokens_per_microbatch=16384),
        sampling=SamplingConfig(
            prompts_per_step=128, completions_per_prompt=16, max_prompt_tokens=96, max_completion_tokens=72
        ),
        engine=EngineConfig(max_num_sequences=512, gpu_memory_utilization=0.3, graphs="plain"),
        weight_sync=WeightSyncConfig(transport="auto"),
        data=DataConfig(
            environments=(
                EnvironmentConfig(
                    dataset="number_sorting",
                    options={
                        "min_numbers": 6,
                        "max_numbers": 10,
                        "min_decimals": 0,
                        "max_decimals": 0,
                        "min_value": 0,
                        "max_value": 9,
                    },
                    template="{direction} {original_numbers} = ",
                ),
            )
        ),
        scoring=ScoringConfig(num_workers=8),
        warm_start=WarmStartConfig(steps=1500, batch_size=128, lr=3e-4, wrong_answers=0.25, stop_pass_rate=0.5),
        algo=AlgoConfig(clip_high=0.28),
        checkpoint=CheckpointConfig(every_steps=50),
        observe=ObserveConfig(eval_prompts=256, eval_every=20),
        num_steps=60,
    )


def small_qwen3_8_layers() -> RunConfig:
    """The same with 8 layers, 0.13 B parameters, and a quarter of the prompts: a short curve, on 1 H200."""
    full = small_qwen3()
    return replace(
        full,
        name="small_qwen3_8_layers",
        model=replace(full.model, num_layers=8),
        # Two waves of sequences: kernels are compiled for few sizes of batches, and starting is longer than sampling.
        sampling=replace(full.sampling, prompts_per_step=32),
        engine=replace(full.engine, max_num_sequences=256, graphs="none", kv_cache_bytes=2 << 30),
        observe=ObserveConfig(eval_prompts=128),  # at the start and at the end
        num_steps=15,
    )


def small_qwen3_moe_4_layers() -> RunConfig:
    """4 layers of 32 experts, 0.23 B parameters, and as few prompts: a short curve of a mixture, on 1 H200."""
    return replace(
        small_qwen3_8_layers(), name="small_qwen3_moe_4_layers", model=replace(small_qwen3_moe().model, num_layers=4)
    )


def small_qwen3_moe() -> RunConfig:
    """12 layers of 32 experts, 4 of them per token: 0.68 B parameters, 0.15 B active, the same task on 1 H200."""
    dense = small_qwen3()
    return replace(
        dense,
        name="small_qwen3_moe",
        model=replace(
            dense.model,
            family="qwen3_moe",
            num_layers=12,
            ffn_hidden_size=0,
            num_experts=32,
            experts_per_token=4,
            moe_ffn_hidden_size=512,
            qk_norm=None,
        ),
    )
