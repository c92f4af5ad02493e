"""Runs of agents with several turns and tools."""

from __future__ import annotations

from dataclasses import replace

from megatron_fp8rl.config import (
    CheckpointConfig,
    EnvironmentConfig,
    ModelConfig,
    PrecisionConfig,
    RunConfig,
    SessionConfig,
)
from model_configs.tiny import tiny_qwen3_moe


def tiny_calculator() -> RunConfig:
    """The tiny mixture of experts multiplies with a calculator: it writes the call, reads the result, and answers.

    The warm start shows whole sessions; most of them answer another product.
    """
    base = tiny_qwen3_moe()
    source = EnvironmentConfig(
        dataset="env:megatron_fp8rl.envs.example_agents:Products",
        agent="megatron_fp8rl.envs.example_agents:with_calculator",
    )
    return replace(
        base,
        name="tiny_calculator",
        sampling=replace(base.sampling, prompts_per_step=32, max_prompt_tokens=16, max_completion_tokens=18),
        data=replace(base.data, environments=(source,)),
        warm_start=replace(base.warm_start, steps=600, batch_size=64, lr=3e-3, wrong_answers=0.6),
        session=SessionConfig(max_tokens=128, max_turns=2),
        observe=replace(base.observe, eval_prompts=128, eval_every=10),
        num_steps=40,
    )


def talk_qwen3_1_7b() -> RunConfig:
    """Eight turns of up to 512 tokens with tools of 50 ms to 2 s, at Qwen3-1.7B's shape with random weights.

    Measures the cost of sessions on a GPU, and whether every turn is exact.
    """
    base = tiny_calculator()
    (source,) = base.data.environments
    source = replace(source, agent="megatron_fp8rl.envs.example_agents:long_talk")
    return replace(
        base,
        name="talk_qwen3_1_7b",
        model=ModelConfig(
            family="qwen3",
            num_layers=28,
            hidden_size=2048,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            ffn_hidden_size=6144,
            vocab_size=151_936,
            tie_embeddings=True,
            max_position_embeddings=40_960,
            random=True,
        ),
        precision=PrecisionConfig(exact=True),
        sampling=replace(base.sampling, prompts_per_step=8, completions_per_prompt=4, max_completion_tokens=512),
        optim=replace(base.optim, max_tokens_per_microbatch=8192),
        engine=replace(base.engine, kv_cache_bytes=None, gpu_memory_utilization=0.5, graphs="compiled"),
        data=replace(base.data, environments=(source,)),
        warm_start=replace(base.warm_start, steps=0),
        session=SessionConfig(max_tokens=4736, max_turns=8),
        algo=replace(base.algo, zero_variance="keep"),
        checkpoint=CheckpointConfig(export_hf=False),
        observe=replace(base.observe, eval_prompts=0),
        num_steps=3,
    )


def tail_qwen3_1_7b() -> RunConfig:
    """Answers of long-tailed lengths on two GPUs, one for the trainer and one for the engine.

    Compares batches in order with a window (``--sampling.max_staleness``, ``--sampling.window_groups``).
    """
    base = talk_qwen3_1_7b()
    (source,) = base.data.environments
    return replace(
        base,
        name="tail_qwen3_1_7b",
        precision=PrecisionConfig(trainer="bf16", rollout="bf16"),
        engine=replace(base.engine, placement="separate", gpu_memory_utilization=0.85),
        sampling=replace(base.sampling, prompts_per_step=16, completions_per_prompt=8, max_completion_tokens=4096),
        session=SessionConfig(max_tokens=4352, max_turns=1),
        data=replace(base.data, environments=(replace(source, agent="megatron_fp8rl.envs.example_agents:long_tail"),)),
        num_steps=100,
    )


def tail_tiny() -> RunConfig:
    """The same on CPU cores: tiny models, answers of at most 384 tokens."""
    base = tiny_calculator()
    (source,) = base.data.environments
    source = replace(
        source,
        agent="megatron_fp8rl.envs.example_agents:long_tail",
        agent_options={"median": 40, "limit": 384, "tool_s": 1.0},
    )
    return replace(
        base,
        name="tail_tiny",
        precision=replace(base.precision, exact=False),
        model=replace(base.model, random=True, max_position_embeddings=512),
        sampling=replace(base.sampling, prompts_per_step=8, completions_per_prompt=4, max_completion_tokens=384),
        engine=replace(base.engine, kv_cache_bytes=64 << 20),
        data=replace(base.data, environments=(source,)),
        warm_start=replace(base.warm_start, steps=0),
        session=SessionConfig(max_tokens=448, max_turns=1, max_running=64),
        algo=replace(base.algo, zero_variance="keep"),
        checkpoint=CheckpointConfig(export_hf=False),
        observe=replace(base.observe, eval_prompts=0),
        num_steps=100,
    )
