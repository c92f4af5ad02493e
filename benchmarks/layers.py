"""Time of the trainer's layers for a microbatch, forward and backward: wall-clock time and busy time of the GPU.

    python -m benchmarks.layers
    python -m benchmarks.layers --model qwen3_8b --layers 4 --tokens 8192
    python -m benchmarks.layers --quick

A policy on one GPU with random weights accumulates gradients of four full microbatches without recomputation. Layers
are the difference of two depths, which removes embedding, head and log-probabilities. ``ms`` is wall-clock time.
``busy_ms`` is the time in which the GPU computes or copies, by PyTorch's profiler. Where they differ, the GPU waits for
the host.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchmarks import runner
from benchmarks.record import Row
from benchmarks.runner import num_gpus
from benchmarks.timing import busy_seconds, timed
from benchmarks.training import MODELS, model_of, random_batch, single_rank
from megatron_fp8rl.config import OptimConfig, PrecisionConfig, RunConfig, SamplingConfig
from megatron_fp8rl.preflight.auto_layout import microbatches_of
from megatron_fp8rl.preflight.findings import apply

if TYPE_CHECKING:
    from megatron_fp8rl.types import TrainBatch

_MICROBATCHES = 4
_LENGTH = 2048  # tokens of a sequence at most, so that microbatches are full


@dataclass(frozen=True)
class Cell:
    model: str
    layers: int
    tokens: int  # of a microbatch
    precision: str

    def run_config(self) -> RunConfig:
        """A run on one rank with the logits of a whole microbatch at once, as ``grpo`` chooses when memory suffices."""
        model = model_of(self.model, self.layers)
        if model.is_moe:
            model = replace(model, embedding_range=1.0)  # otherwise all tokens choose the same experts
        sampling = SamplingConfig(max_prompt_tokens=1, max_completion_tokens=min(_LENGTH, self.tokens) - 1)
        precision = PrecisionConfig(trainer=self.precision, rollout="bf16")
        cfg = RunConfig(name="layers", model=model, precision=precision, optim=OptimConfig(), sampling=sampling)
        return apply(cfg, microbatches_of(self.tokens))

    def batch(self, cfg: RunConfig) -> TrainBatch:
        """Full microbatches. Raises ValueError when packing leaves a gap."""
        length = min(_LENGTH, self.tokens)
        batch = random_batch(cfg, _MICROBATCHES * self.tokens // length, length)
        sizes = [mb.tokens_T.numel() for mb in batch.microbatches]
        if sizes != [self.tokens] * _MICROBATCHES:
            raise ValueError(f"microbatches have {sizes} tokens, not {self.tokens} each; change --tokens")
        return batch


def measure(cell: Cell, rounds: int) -> Row:
    """Milliseconds of a microbatch. ``first_s``: the first pass, which compiles kernels."""
    from megatron_fp8rl.algo.losses import sft
    from megatron_fp8rl.trainer.policy import Policy

    cfg = cell.run_config()
    with single_rank(cfg) as parallel:
        policy, batch = Policy.build(cfg, parallel), cell.batch(cfg)

        def work() -> None:
            policy.accumulate_gradients(batch, sft)

        scale = 1e3 / _MICROBATCHES
        first = timed(work)
        row: Row = {"ms": scale * statistics.median(timed(work) for _ in range(rounds))}
        if num_gpus():
            row["busy_ms"] = scale * busy_seconds(work)
        return row | {"first_s": round(first, 1)}


class Layers(runner.Benchmark):
    name, title, about = "layers", "Layers of a trainer", __doc__
    keys = ("model", "layers", "tokens", "precision", "device")

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.choices(parser, "--model", MODELS, ["qwen3_30b_a3b", "qwen3_8b"])
        parser.add_argument("--layers", type=int, default=4, help="layers of the deeper policy; the other has half")
        parser.add_argument("--tokens", type=int, default=16_384, help="tokens of a microbatch")
        runner.choices(parser, "--precision", ["bf16", "blockwise", "delayed", "tensorwise"], ["bf16", "blockwise"])
        parser.add_argument("--rounds", type=int, default=5)

    def settle(self, options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        if options.quick:
            options.rounds, options.layers, options.tokens = 2, 2, 4096
        if options.layers < 2 or options.layers % 2:
            parser.error(f"--layers {options.layers}: give an even number")

    def arms(self, options: argparse.Namespace) -> Iterator[Row]:
        for name in options.model:
            for precision in options.precision:
                yield {"model": name, "layers": options.layers, "tokens": options.tokens, "precision": precision}

    def measure(self, arm: Row, options: argparse.Namespace) -> Iterator[Row]:
        cells = [Cell(**{**arm, "layers": layers}) for layers in (options.layers // 2, options.layers)]
        fewer, all_of = (measure(cell, options.rounds) for cell in cells)
        row = {name: round(all_of[name], 3) for name in ("ms", "busy_ms") if name in all_of}
        for name in tuple(row):
            row[f"layers_{name}"] = round(2 * (all_of[name] - fewer[name]), 3)
        yield arm | row | {"first_s": fewer["first_s"]}

    def line(self, row: Row) -> Row:
        return {name: row.get(name) for name in (*self.keys, "ms", "busy_ms", "layers_ms", "layers_busy_ms", "first_s")}

    def notes(self, rows: Sequence[Row]) -> str:
        return (
            "Milliseconds of a microbatch, forward and backward, on one GPU without recomputation: in total, and for"
            " the layers alone. Busy: time with GPU work. Each batch of four also sets gradients to zero once. "
            "Random weights; embeddings of mixtures have standard deviation 1. First: seconds of the first batch, "
            "with compilation."
        )


if __name__ == "__main__":
    sys.exit(runner.main(Layers()))
