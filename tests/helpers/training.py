"""Small models, ragged batches and training runs that tests execute on ranks of any layout."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp8rl.algo.load_function import load_loss
from megatron_fp8rl.config import (
    AlgoConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    SamplingConfig,
)
from megatron_fp8rl.data.packing import pack_for
from megatron_fp8rl.token_array import TokenArray
from megatron_fp8rl.types import Sample, Segment, TrainBatch
from tests.helpers.models import small_model
from tests.helpers.unshard import unshard
from tests.tolerances import FP8_FIRST_LOSS, FP8_LOSS_NOISE, LAYOUT_WEIGHTS

VOCAB = 62
MOE = small_model(
    (4, 64, 4, 2, 16, VOCAB), experts=(4, 2, 32), max_position_embeddings=128, initializer_range=0.08
)  # wide enough for log-probabilities to differ between tokens
DENSE = replace(MOE, family="qwen3", num_experts=0, experts_per_token=0, moe_ffn_hidden_size=0, ffn_hidden_size=96)

# With Adam's usual eps the first updates are lr * sign(gradient), which turns rounding of a gradient near 0 into a
# different weight. A large eps makes the update a smooth function of the gradient.
SMOOTH_ADAM = OptimConfig(lr=1e-2, eps=1e-2, weight_decay=0.1)


def run_config(
    *,
    model: ModelConfig = MOE,
    optim: OptimConfig = SMOOTH_ADAM,
    algo: AlgoConfig | None = None,
    trainer: str = "bf16",
    params: str = "fp32",
    max_tokens: int = 96,
    **parallel: int,
) -> RunConfig:
    """A run of FP32 parameters and no FP8 unless told otherwise, at a temperature that is not 1."""
    return RunConfig(
        name="test",
        model=model,
        parallel=ParallelConfig(**parallel),
        precision=PrecisionConfig(trainer=trainer, params=params),
        optim=replace(optim, max_tokens_per_microbatch=max_tokens),
        sampling=SamplingConfig(temperature=0.8),
        algo=algo or AlgoConfig(entropy_coef=0.01, loss="grpo"),
    )


@contextmanager
def alone(cfg: RunConfig) -> Iterator:
    """A single trainer rank in this process, because a forked process cannot use the parent's GPU."""
    from megatron_fp8rl.trainer.parallel import Parallel

    assert "RANK" not in os.environ, "run this test without torchrun"
    parallel = Parallel.init(cfg.parallel, deadline_s=60)
    try:
        yield parallel
    finally:
        parallel.close()


def make_samples(num: int = 8, *, length: int | None = None, seed: int = 5) -> list[Sample]:
    """Sequences of random tokens, ragged or of one length; rollout log-probabilities are near the uniform one."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    samples = []
    for index in range(num):
        num_tokens = length or draw(6, 30)
        num_prompt = draw(1, num_tokens - 2)
        num_completion = num_tokens - num_prompt
        advantage = float(torch.randn((), generator=generator))
        rollout = (-3.5 - torch.rand(num_completion, generator=generator)).tolist()
        ids = TokenArray(torch.randint(0, VOCAB, (num_tokens,), generator=generator).int().numpy())
        samples.append(
            Sample(
                name=f"sample{index}",
                environment="test",
                segments=(
                    Segment(ids[:num_prompt]),
                    Segment(ids[num_prompt:], TokenArray.from_floats(rollout), advantage, True),
                ),
            )
        )
    return samples


def make_batch(cfg: RunConfig, data_rank: int, samples: list[Sample] | None = None) -> TrainBatch:
    """One update's batch for a data-parallel rank."""
    (batch,) = pack_for(cfg, make_samples() if samples is None else samples, data_rank=data_rank)
    return batch


def make_loss(cfg: RunConfig) -> Callable:
    return load_loss(cfg.algo)


def token_values(batch: TrainBatch, values: list[Tensor]) -> dict[str, Tensor]:
    """Values of the loss tokens by sequence name, so that they compare between ways to pack."""
    result = {}
    for mb, values_T in zip(batch.microbatches, values, strict=True):
        for index, name in enumerate(mb.names):
            if name:
                result[name] = values_T[(mb.sequence_ids_T == index) & mb.loss_mask_T].detach().clone()
    return result


@dataclass
class Trained:
    metrics: list[dict[str, float]]
    old_logprobs: dict[str, Tensor]  # of the first update, by sequence name
    pieces: dict[str, tuple[int, Tensor]]  # global name -> (rank of the piece, this rank's piece of the weight)


def train(cfg: RunConfig, num_updates: int = 2, samples: list[Sample] | None = None) -> Trained:
    """Runs on a rank: build the policy and update it on the same samples, with new old log-probabilities each time."""
    from megatron_fp8rl.trainer.parallel import Parallel
    from megatron_fp8rl.trainer.policy import Policy

    parallel = Parallel.init(cfg.parallel, deadline_s=60)
    policy = Policy.build(cfg, parallel)
    metrics, first = continue_training(policy, num_updates, samples)
    result = Trained(metrics=metrics, old_logprobs=first, pieces=weight_pieces(policy))
    parallel.barrier("done")
    return result


def continue_training(
    policy, num_updates: int, samples: list[Sample] | None = None
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Runs on a rank: (metrics of each update, old log-probabilities of the first)."""
    cfg, metrics, first = policy.cfg, [], {}
    for _ in range(num_updates):
        batch = policy.with_old_logprobs(make_batch(cfg, policy.parallel.dp_rank, samples))
        first = first or token_values(batch, [mb.old_logprobs_T for mb in batch.microbatches])
        metrics.append(policy.update(batch, make_loss(cfg)))
    return metrics, first


def assert_same_training(expected: tuple, other: tuple) -> None:
    """Compare (metrics, old log-probabilities) of two kernels: equal bits at first, then FP8 noise."""
    for key, old in expected[1].items():
        assert torch.equal(other[1][key], old), f"{key}: the forward pass computes other numbers"
    assert_same_metrics(expected[0], other[0])


def assert_same_metrics(expected: list[dict], other: list[dict]) -> None:
    for step, (a, b) in enumerate(zip(other, expected, strict=True)):
        loss, norm = (FP8_LOSS_NOISE if step else FP8_FIRST_LOSS), (0.1 if step else 0.01)
        assert a["train/loss/mean"] == pytest.approx(b["train/loss/mean"], abs=loss)
        assert a["train/grad_norm/max"] == pytest.approx(b["train/grad_norm/max"], rel=norm)


def assert_learns_as_on_te(field: str, cfg: RunConfig, trainer: str = "blockwise") -> None:
    """Four updates with the kernels of a ``field`` on DeepGEMM and on Transformer Engine."""
    from megatron_fp8rl.trainer.policy import Policy

    runs = {}
    for kind in ("te", "deep_gemm"):
        cfg = replace(cfg, precision=PrecisionConfig(trainer=trainer, kernels={field: kind}, exact=False))
        with alone(cfg) as parallel:
            runs[kind] = continue_training(Policy.build(cfg, parallel), 4)[0]
    losses, norms = (
        [[step[key] for step in runs[kind]] for kind in ("deep_gemm", "te")]
        for key in ("train/loss/mean", "train/grad_norm/max")
    )
    print(f"\ndeep_gemm train {trainer}: loss {losses[0]}, TE {losses[1]}; norm {norms[0]}, TE {norms[1]}")
    assert losses[0][0] == pytest.approx(losses[1][0], abs=FP8_FIRST_LOSS)
    assert losses[0][1:] == pytest.approx(losses[1][1:], abs=FP8_LOSS_NOISE)
    # Holds because the first forward passes are equal, to the bit of the loss: backward starts from the same numbers.
    # Kernels that round a few activations otherwise would move this norm by 5 to 50 % and be as right (TINY_FP8_LOSS);
    # what is right is held by tests of the products.
    assert norms[0][0] == pytest.approx(norms[1][0], rel=0.05)


def assert_same_weights(model: ModelConfig, expected: "Trained", ranks: "list[Trained]") -> None:
    """Compare the norms of a layout's gradients and its weights with those of one rank."""
    for got, want in zip(ranks[0].metrics, expected.metrics, strict=True):
        assert got["train/grad_norm/max"] == pytest.approx(want["train/grad_norm/max"], rel=1e-5)
    weights = full_weights(model, [result.pieces for result in ranks])
    for name, weight in full_weights(model, [expected.pieces]).items():
        torch.testing.assert_close(weights[name], weight, **LAYOUT_WEIGHTS, msg=name)


def first_gradients(cfg: RunConfig, state: Callable = lambda policy: None) -> tuple[dict[str, Tensor], Any]:
    """Runs on a rank: (gradients by name, ``state`` of the policy) after one forward and backward."""
    from megatron_fp8rl.trainer.forward import Forward
    from megatron_fp8rl.trainer.parallel import Parallel
    from megatron_fp8rl.trainer.policy import Policy

    parallel = Parallel.init(cfg.parallel, deadline_s=60)
    policy = Policy.build(cfg, parallel)
    batch = policy.with_old_logprobs(make_batch(cfg, parallel.dp_rank))
    policy.optimizer.zero_gradients()
    Forward(cfg, parallel).gradients(policy.chunks, batch, make_loss(cfg))
    return {name: parameter.main_grad.clone() for name, parameter in policy.named_parameters()}, state(policy)


def weight_pieces(policy) -> dict[str, tuple[int, Tensor]]:
    from megatron_fp8rl.names import registry

    parallel = policy.parallel
    return {
        name: (parallel.etp_rank if registry.is_expert(name) else parallel.tp_rank, parameter.detach().clone())
        for name, parameter in policy.named_parameters()
    }


def full_weights(model: ModelConfig, ranks: list[dict[str, tuple[int, Tensor]]]) -> dict[str, Tensor]:
    """Whole tensors by global name. Raises if two ranks with the same piece differ in a bit."""

    result: dict[str, dict[int, Tensor]] = {}
    for pieces in ranks:
        for name, (index, piece) in pieces.items():
            known = result.setdefault(name, {}).setdefault(index, piece)
            assert torch.equal(known, piece), f"{name}: replicas of piece {index} differ"
    return {name: unshard(name, [parts[i] for i in sorted(parts)], model) for name, parts in result.items()}


def assert_equal_gradients(expected: list, actual: list) -> None:
    """The gradients of :func:`first_gradients` on all ranks are not zero and equal, bit for bit."""
    for (before, _), (after, _) in zip(expected, actual, strict=True):
        for key, gradient in before.items():
            assert gradient.any() and torch.equal(after[key], gradient), key
