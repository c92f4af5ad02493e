"""Models by name, a single trainer rank, and random batches for benchmarks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_fp8rl.config import ModelConfig, RunConfig
from model_configs import dense, qwen3, tiny

if TYPE_CHECKING:
    from megatron_fp8rl.trainer.parallel import Parallel
    from megatron_fp8rl.types import TrainBatch


def small() -> ModelConfig:
    """A dense model of 120 M parameters whose matrices are whole FP8 blocks."""
    return ModelConfig(
        family="qwen3",
        num_layers=8,
        hidden_size=1024,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=2048,
        ffn_hidden_size=4096,
        max_position_embeddings=4096,
    )


def small_moe() -> ModelConfig:
    """The same with 16 experts, 4 per token: 260 M parameters."""
    return replace(
        small(), family="qwen3_moe", ffn_hidden_size=0, num_experts=16, experts_per_token=4, moe_ffn_hidden_size=512
    )


MODELS = {
    "tiny": lambda: tiny.tiny_qwen3().model,
    "tiny_moe": lambda: tiny.tiny_qwen3_moe().model,
    "small": small,
    "small_moe": small_moe,
    "qwen3_1_7b": dense.qwen3_1_7b,
    "qwen25_7b": dense.qwen25_7b,
    "qwen3_8b": qwen3.qwen3_8b,
    "qwen3_30b_a3b": qwen3.qwen3_30b_a3b,
}


def model_of(name: str, num_layers: int | None) -> ModelConfig:
    """A model by its name, cut to its first ``num_layers`` layers."""
    model = MODELS[name]()
    return model if num_layers is None else replace(model, num_layers=min(num_layers, model.num_layers))


@contextmanager
def single_rank(cfg: RunConfig) -> Iterator[Parallel]:
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # before Megatron-Core is imported
    from megatron_fp8rl.trainer.compat import megatron_on_cpu

    megatron_on_cpu.install()
    from megatron_fp8rl.trainer.parallel import Parallel

    parallel = Parallel.init(cfg.parallel)
    try:
        yield parallel
    finally:
        parallel.close()


def random_batch(cfg: RunConfig, num_sequences: int, length: int) -> TrainBatch:
    import numpy as np

    from megatron_fp8rl.trainer.warm_up import batch_of

    draw = np.random.default_rng(cfg.seed)
    tokens = draw.integers(8, cfg.model.vocab_size, num_sequences * length, np.int32)
    return batch_of(cfg, tokens, num_sequences, length)
