"""Memory of a trainer update on one GPU by part: measured, and predicted by the doctor.

    python -m benchmarks.memory
    python -m benchmarks.memory --model qwen3_8b --layers 4 --recompute none full
    python -m benchmarks.memory --quick

A policy has the matrices of a real model, fewer layers and random weights. It computes log-probabilities of two full
microbatches, and two updates with them. The second update counts: Adam has its moments, and all FP8 copies exist.
Without a GPU, only the doctor's predictions are printed, and the exit status is 2. Measured parts:

    weights, gradients     Megatron-Core's buffers, and weights outside them
    optimizer states       other memory that stays allocated after an update
    FP8 copies             memory that dropping the copies frees before the optimizer's step
    activations            allocated at the loss, less all of the above
    temporaries            the peak of forward and backward pass, less all of the above
    communication, CUDA    used on the device, less PyTorch's reserved memory
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from benchmarks import runner
from benchmarks.record import Row
from benchmarks.runner import device_name, num_gpus
from benchmarks.training import MODELS, model_of, random_batch, single_rank
from megatron_fp8rl.config import OptimConfig, PrecisionConfig, RunConfig, SamplingConfig
from megatron_fp8rl.preflight import trainer_memory
from megatron_fp8rl.preflight.memory import GIB, GPUS, Estimate

if TYPE_CHECKING:
    from megatron_fp8rl.trainer.parallel import Parallel
    from megatron_fp8rl.trainer.policy import Policy
    from megatron_fp8rl.types import TrainBatch

PARTS = (
    *("weights", "gradients", "optimizer states", "FP8 copies"),
    *("activations", "temporaries", "communication, CUDA"),
)
_SHAPES = {"qwen3_8b": (8, 16384), "qwen3_30b_a3b": (3, 8192)}  # (layers, tokens of a microbatch)
_MICROBATCHES = 2


@dataclass(frozen=True)
class Cell:
    model: str
    layers: int
    tokens: int  # of a microbatch
    precision: str
    recompute: str

    def run_config(self) -> RunConfig:
        """The run of this cell on one rank. Selective recompute is of the feed-forward part."""
        model = model_of(self.model, self.layers)
        if model.is_moe:
            model = replace(model, embedding_range=1.0)  # otherwise all tokens choose the same experts
        precision = PrecisionConfig(trainer=self.precision, rollout="bf16")
        modules = ("moe",) if model.is_moe else ("mlp",)
        return RunConfig(
            name="memory",
            model=model,
            precision=precision,
            optim=OptimConfig(
                recompute=self.recompute, recompute_modules=modules, max_tokens_per_microbatch=self.tokens
            ),
            sampling=SamplingConfig(
                prompts_per_step=_MICROBATCHES * self.tokens // self.length // 2,
                completions_per_prompt=2,
                max_prompt_tokens=1,
                max_completion_tokens=self.length - 1,
            ),
        )

    @property
    def length(self) -> int:
        """Tokens of every sequence, so that microbatches are full."""
        return min(2048, self.tokens)


class Meter:
    def allocated(self) -> int:
        import torch

        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        """The largest :meth:`allocated` since :meth:`reset`."""
        import torch

        return torch.cuda.max_memory_allocated()

    def reset(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats()

    def outside(self) -> int:
        """Bytes on the device outside PyTorch's allocator: CUDA context, modules, communication."""
        import torch

        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()


def full_batch(cfg: RunConfig, cell: Cell, number: int = _MICROBATCHES) -> TrainBatch:
    """``number`` full microbatches. Raises ValueError when packing leaves a gap."""
    batch = random_batch(cfg, number * cell.tokens // cell.length, cell.length)
    sizes = [mb.tokens_T.numel() for mb in batch.microbatches]
    if sizes != [cell.tokens] * number:
        raise ValueError(f"microbatches have {sizes} tokens, not {number} x {cell.tokens}; change --tokens")
    return batch


def measure(cell: Cell, cfg: RunConfig, parallel: Parallel, meter: Meter) -> Row:
    """Bytes by part, and bytes of further phases."""
    from megatron_fp8rl.trainer.optimizer.offload import unique_storages
    from megatron_fp8rl.trainer.optimizer.shared_memory import bytes_of_weights
    from megatron_fp8rl.trainer.policy import Policy

    before = meter.allocated()
    batch = full_batch(cfg, cell)
    policy = Policy.build(cfg, parallel)
    built = meter.allocated() - before
    meter.reset()
    batch = policy.with_old_logprobs(batch)
    logprobs_peak = meter.peak() - before
    watch = _Watch(policy, meter)
    watch.update(batch)
    states = meter.allocated() - before
    watch.update(batch)

    buffers = [b for chunk in policy.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    # Weights in the memory of gradients count as weights.
    shared = bytes_of_weights(buffers)
    of_weights = unique_storages(parameter for buffer in buffers for parameter in buffer.params)
    weights = sum(shared.get(address, storage.nbytes()) for address, storage in of_weights.items())
    of_gradients = unique_storages(buffer.grad_data for buffer in buffers)
    gradients = sum(storage.nbytes() - shared.get(address, 0) for address, storage in of_gradients.items())
    activations = watch.at_loss - watch.before_step
    return {
        "weights": weights,
        "gradients": gradients,
        "optimizer states": states - weights - gradients,
        "FP8 copies": watch.fp8_copies,
        "activations": activations,
        "temporaries": watch.peak - watch.before_step - activations,
        "communication, CUDA": meter.outside(),
        "left": before,
        "built": built,
        "logprobs_peak": logprobs_peak,
        "update_peak": watch.peak - before,
        "step_peak": watch.step_peak - before,
    }


class _Watch:
    def __init__(self, policy: Policy, meter: Meter):
        self._policy, self._meter = policy, meter
        self._step = policy.optimizer.step
        policy.optimizer.step = self._observed_step
        self.at_loss = self.peak = self.before_step = self.fp8_copies = self.step_peak = 0

    def update(self, batch: TrainBatch) -> None:
        self._meter.reset()
        self._policy.update(batch, self._loss)

    def _loss(self, inputs):
        from megatron_fp8rl.algo.losses import sft

        self.at_loss = self._meter.allocated()  # the last microbatch counts
        return sft(inputs)

    def _observed_step(self, lr: float) -> float:
        from megatron_fp8rl.trainer.model.weight_cache import clear_weight_caches

        self.peak, self.before_step = self._meter.peak(), self._meter.allocated()
        clear_weight_caches()  # as at the end of a step
        self.fp8_copies = self.before_step - self._meter.allocated()
        self._meter.reset()
        norm = self._step(lr)
        self.step_peak = self._meter.peak()
        return norm


def compare(estimate: Estimate, measured: Mapping[str, int]) -> Row:
    """[predicted, measured] GiB of each part and of the total, and the ratio of the totals."""
    row: Row = {name: [_gib(estimate.part(name).num_bytes), _gib(measured[name])] for name in PARTS}
    total = max(measured["update_peak"], measured["step_peak"]) + measured["communication, CUDA"]
    row["total"] = [_gib(estimate.total_bytes), _gib(total)]
    row["ratio"] = round(estimate.total_bytes / total, 3)
    for name in ("built", "logprobs_peak", "update_peak", "step_peak", "left"):
        row[name] = _gib(measured[name])
    return row


def _gib(num_bytes: int) -> float:
    return round(num_bytes / GIB, 3)


class Memory(runner.Benchmark):
    name, title, about = "memory", "Memory of the trainer, predicted and measured", __doc__
    keys = ("model", "layers", "tokens", "precision", "recompute", "device")

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.choices(parser, "--model", MODELS, _SHAPES)
        parser.add_argument("--layers", type=int, help=f"default by model: {_SHAPES}, with tokens")
        parser.add_argument("--tokens", type=int, help="tokens of a microbatch")
        runner.choices(parser, "--precision", ["bf16", "blockwise", "delayed", "tensorwise"], ["bf16", "blockwise"])
        recompute = ["none", "selective", "full"]
        runner.choices(parser, "--recompute", recompute, recompute)
        parser.add_argument("--all", action="store_true", help="all values of --recompute in BF16 too")

    def settle(self, options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        if options.quick:
            options.layers, options.precision, options.recompute = 1, ["blockwise"], ["none"]
            options.model = options.model if num_gpus() else ["tiny", "tiny_moe"]

    def arms(self, options: argparse.Namespace) -> Iterator[Row]:
        for name in options.model:
            layers, tokens = _SHAPES.get(name, (2, 1024))
            for precision in options.precision:
                for recompute in options.recompute:
                    if precision == "bf16" and recompute != "none" and not options.all:
                        continue
                    cell = Cell(name, options.layers or layers, options.tokens or tokens, precision, recompute)
                    if not num_gpus():
                        estimate = trainer_memory.worst_rank(cell.run_config(), GPUS["h200"], GPUS["h200"].memory_bytes)
                        shown = {part.name: _gib(part.num_bytes) for part in estimate.parts}
                        shown |= {"total": _gib(estimate.total_bytes)}
                        print("PREDICTED", json.dumps(asdict(cell) | shown), flush=True)
                    yield asdict(cell)

    def measure(self, arm: Row, options: argparse.Namespace) -> Iterator[Row]:
        import torch

        cell, started, device = Cell(**arm), time.perf_counter(), device_name()
        capacity = torch.cuda.get_device_properties(0).total_memory
        gpu = next((gpu for name, gpu in GPUS.items() if name in device.lower()), GPUS["h200"])
        cfg = cell.run_config()
        estimate = trainer_memory.worst_rank(cfg, gpu, capacity)
        if estimate.is_tight:
            yield arm | {"error": f"needs {estimate.total_bytes / GIB:.1f} GiB of {capacity / GIB:.1f}"}
            return
        with single_rank(cfg) as parallel:
            parts = compare(estimate, measure(cell, cfg, parallel, Meter()))
        yield arm | parts | {"seconds": round(time.perf_counter() - started, 1)}

    def line(self, row: Row) -> Row:
        parts = {name: "{:.2f} / {:.2f}".format(*row[name]) for name in (*PARTS, "total")}
        ratio = {"predicted : measured": row["ratio"], "logprobs peak": row["logprobs_peak"]}
        return {key: row[key] for key in self.keys[:-1]} | parts | ratio

    def notes(self, rows: Sequence[Row]) -> str:
        return (
            "GiB, predicted / measured, in the second update with two full microbatches on one rank. Random weights. "
            "Selective recompute: `mlp` or `moe`. Total: the allocated peak and other memory of the process, without "
            "fragments of the allocator. Logprobs peak: in the pass before the first update, without Adam's moments."
        )


if __name__ == "__main__":
    sys.exit(runner.main(Memory()))
