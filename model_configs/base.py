"""Common settings of runs of real models: GRPO on problems that generators make and check.

A run starts from random weights and a character tokenizer. ``--model.hf_path DIR`` names a checkpoint, its tokenizer
and its chat template.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from megatron_fp8rl.config import (
    AlgoConfig,
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    EnvironmentConfig,
    ModelConfig,
    ObserveConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    SamplingConfig,
    ScoringConfig,
)

_TEMPLATE = "{question}\n\nThink step by step, then give the final answer alone in <answer></answer>."


def grpo(
    name: str,
    model: ModelConfig,
    *,
    parallel: ParallelConfig,
    engine: EngineConfig,
    optim: OptimConfig,
    prompts: int = 64,
) -> RunConfig:
    """GRPO in FP8 for trainer and engines, with clip-higher and token truncation of the mismatch at 2.

    Each prompt has 16 completions of up to 7k tokens.
    """
    return RunConfig(
        name=name,
        model=model,
        parallel=parallel,
        optim=optim,
        engine=replace(engine, deadline_scale=3.0),
        sampling=SamplingConfig(
            prompts_per_step=prompts, completions_per_prompt=16, max_prompt_tokens=1024, max_completion_tokens=7168
        ),
        algo=AlgoConfig(clip_high=0.28),
        data=DataConfig(
            environments=(
                EnvironmentConfig(dataset="gsm_symbolic", template=_TEMPLATE),
                EnvironmentConfig(dataset="countdown", template=_TEMPLATE),
            )
        ),
        scoring=ScoringConfig(num_workers=16),
        checkpoint=CheckpointConfig(every_steps=20, every_minutes=30),
        observe=ObserveConfig(eval_every=20),
        num_steps=400,
    )


def optim(recompute: Literal["none", "selective", "full"] = "selective") -> OptimConfig:
    """AdamW for RL of large models.

    "selective" computes feed-forward parts again, which keep 53 % (DeepSeek-V3) to 81 % (Mixtral) of a layer's
    activations by the doctor's count. It keeps attention, whose cost grows with the square of the length.
    """
    return OptimConfig(
        lr=1e-6,
        warmup_steps=10,
        weight_decay=0.1,
        overlap_grad_reduce=True,
        recompute=recompute,
        max_tokens_per_microbatch=8192,
    )


def engines(replicas: int, tensor: int = 1) -> EngineConfig:
    """Engines on separate GPUs."""
    return EngineConfig(num_replicas=replicas, tensor=tensor, placement="separate")


def colocated(cfg: RunConfig, name: str, *, parallel: ParallelConfig, tensor: int = 1) -> RunConfig:
    """``cfg`` with trainer and engines on the same GPUs, alternating.

    Engines drop their weights while the trainer works, because every step publishes new ones. The trainer's state waits
    in host memory while engines sample.
    """
    engines = replace(
        cfg.engine,
        num_replicas=parallel.world_size // tensor,
        tensor=tensor,
        placement="colocated",
        sleep_level=2,
        gpu_memory_utilization=0.8,
    )
    offloading = replace(cfg.optim, offload=("params", "gradients", "optimizer"))
    return replace(cfg, name=name, parallel=parallel, engine=engines, optim=offloading)
