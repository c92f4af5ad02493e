"""What measurements of precision share: models by name, a brief training, another recipe on the same weights."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.synthetic import Language
from megatron_fp8rl.config import ModelConfig, PrecisionConfig, RunConfig
from model_configs import dense, qwen3, tiny

if TYPE_CHECKING:
    from megatron_fp8rl.trainer.parallel import Parallel
    from megatron_fp8rl.trainer.policy import Policy
    from megatron_fp8rl.types import TrainBatch


def small() -> ModelConfig:
    """A dense model of 120 M parameters whose every matrix fills whole FP8 blocks."""
    return ModelConfig(
        family="qwen3", num_layers=8, hidden_size=1024, num_attention_heads=8, num_key_value_heads=4, head_dim=128,
        vocab_size=2048, ffn_hidden_size=4096, max_position_embeddings=4096,
    )  # fmt: skip


def small_moe() -> ModelConfig:
    """The same with 16 experts, 4 of them for a token: 260 M parameters."""
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
    """This process as the only trainer rank."""
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


def batches(cfg: RunConfig, language: Language, num_steps: int, *, num_sequences: int, length: int) -> list[TrainBatch]:
    """One packed batch of the language per step, the same for every recipe."""
    from megatron_fp8rl.data.packing import pack_for

    packed = []
    for step in range(num_steps):
        packed += pack_for(cfg, language.samples(num_sequences, length, seed=cfg.seed * 100_000 + step), data_rank=0)
    return packed


def train(policy: Policy, steps: Sequence[TrainBatch]) -> list[float]:
    """Supervised updates; the loss of each."""
    from megatron_fp8rl.algo.losses import sft

    return [policy.update(batch, sft)["train/loss/mean"] for batch in steps]


def switch_precision(policy: Policy, precision: PrecisionConfig, history: Sequence[TrainBatch] = ()) -> None:
    """Rebuild ``policy`` under another recipe with the same weights and a new optimizer.

    Delayed scaling starts with an empty amax history; ``history`` are batches that fill it. They run forward and
    backward, and no weight changes.
    """
    import torch

    cfg, parallel = replace(policy.cfg, precision=precision), policy.parallel
    weights = {name: parameter.detach().cpu() for name, parameter in policy.named_parameters()}
    policy.__dict__.clear()  # before the other one is built: there is not always room for both
    free_memory()
    policy.__dict__.update(type(policy).build(cfg, parallel).__dict__)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter.copy_(weights[name])
    if precision.trainer == "delayed":
        for batch in history:
            gradients(policy, batch)
            _finish_step(policy)


def gradients(policy: Policy, batch: TrainBatch) -> None:
    """Leave the gradient of the supervised loss of ``batch`` in every parameter's ``main_grad``, and update nothing."""
    from megatron_fp8rl.algo.losses import sft
    from megatron_fp8rl.trainer.forward import Forward

    for chunk in policy.chunks:
        chunk.train()
    policy.optimizer.zero_gradients()
    Forward(policy.cfg, policy.parallel).gradients(policy.chunks, batch, sft)


def _finish_step(policy: Policy) -> None:
    from megatron_fp8rl.trainer.model.build import finish_fp8_step

    finish_fp8_step(policy.chunks, policy.parallel)


def free_memory() -> None:
    """After the last reference to a policy is gone: make room for another, or for an engine."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
