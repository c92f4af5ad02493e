"""Whether the FP8 bytes of the trainer's products, of our quantizer and of the engine are equal.

    python -m benchmarks.same_bytes --model qwen3_8b --layers 4
    python -m benchmarks.same_bytes --model qwen3_30b_a3b --trainer-layout tp2ep2 --engine-layout tp1 tp2 ep2

Random models in the full width of published ones. For every tensor, independent of the transport:

    definition   kernels/blockwise.py in plain torch, on the whole Hugging Face tensor
    ours         the kernel that the exporter calls, on the whole tensor
    trainer      Transformer Engine's Float8BlockQuantizer on each trainer rank's parameter: fused, sharded
    engine       digests of its kernels' weights after a publication, slice by slice

A tensor that differs is counted under a reason; a reason in UNEXPLAINED is a failure. The column of Transformer Engine
is empty without the package. Every trainer rank compares its share of the tensors.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks import runner
from benchmarks.byte_comparison import TE_SCALES, UNEXPLAINED, Tally, compare, transformer_engine
from benchmarks.record import FOLDER, Row
from benchmarks.runner import num_gpus
from benchmarks.training import MODELS
from megatron_fp8rl.config import (
    EngineConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    SamplingConfig,
    WeightSyncConfig,
)

if TYPE_CHECKING:
    from megatron_fp8rl.trainer.parallel import Parallel

TRAINERS = {
    "single": ParallelConfig(),
    "tp2": ParallelConfig(world_size=2, tensor=2),
    "ep2": ParallelConfig(world_size=2, expert=2),
    "ep4": ParallelConfig(world_size=4, expert=4),
    "tp2ep2": ParallelConfig(world_size=2, tensor=2, expert=2),
    "pp2": ParallelConfig(world_size=2, pipeline=2),
}
ENGINES = {"tp1": (1, 1), "tp2": (2, 1), "ep2": (2, 2)}  # tensor, expert


def run_config(arm: Row, placement: str) -> RunConfig:
    model = MODELS[arm["model"]]()
    tensor, expert = ENGINES[arm["engine"]]
    colocated = placement == "colocated"
    return RunConfig(
        name="same_bytes",
        model=replace(model, num_layers=arm["layers"] or model.num_layers),
        parallel=TRAINERS[arm["trainer"]],
        precision=PrecisionConfig(trainer="blockwise", rollout="blockwise", scales=arm["scales"], exact=False),
        engine=EngineConfig(
            tensor=tensor,
            expert=expert,
            placement=placement,
            graphs="none",
            max_num_sequences=8,
            kv_cache_bytes=1 << 30 if model.vocab_size > 1000 else 64 << 20,
            gpu_memory_utilization=0.45 if colocated else 0.85,
        ),
        weight_sync=WeightSyncConfig(transport=arm["transport"]),
        sampling=SamplingConfig(max_prompt_tokens=128, max_completion_tokens=128),
        output_dir=str(FOLDER / "same_bytes" / "-".join(map(str, arm.values()))),
    )


def run_case(cfg: RunConfig, parallel: Parallel) -> tuple[Tally, float]:
    """Collective: publish a random model and compare; (sum over ranks, seconds of the publication)."""
    import torch.distributed as dist

    from benchmarks.light_policy import publishing

    reports, seconds = None, 0.0
    with publishing(cfg, parallel) as (policy, exporter, fleet, _):
        for version in (1, 2):  # the first uses vLLM's loaders, the second writes into the engine's tensors
            seconds = exporter.publish(version).seconds
        if fleet is not None:
            reports = [fleet.sync(c.weight_digests(), cfg.engine.update_s) for c in fleet.clients]
        reports = parallel.broadcast_object(reports)
    del policy, exporter
    te = transformer_engine(cfg.precision.scales, parallel.device)
    tallies = [compare(cfg, reports, parallel.rank, parallel.device, te)] * parallel.world_size
    if parallel.world_size > 1:
        dist.all_gather_object(tallies, tallies[0], group=parallel.control_group)
    total = Tally()
    for tally in tallies:
        total.add(tally)
    return total, seconds


def row_of(cfg: RunConfig, total: Tally, has_te: bool) -> Row:
    """Counts of a case, and for each reason the number of exceptions and the first names."""
    return {
        "tensors": total.tensors,
        "equal_in_engine": total.equal_in_engine,
        "fp8_tensors": total.fp8,
        "fp8_gb": round(total.fp8_bytes / 1e9, 3),
        "equal_to_definition": total.equal_to_definition,
        "equal_to_te": total.equal_to_te if has_te else None,
        "scales_unlike_te": total.scales_unlike_te / max(total.fp8_bytes, 1),
        "bytes_unlike_te": total.bytes_unlike_te / max(total.fp8_bytes, 1),
        "exceptions": {reason: [len(names), *sorted(names)[:3]] for reason, names in total.exceptions.items()},
        "num_layers": cfg.model.num_layers,
    }


def reasons(rows: Sequence[Row]) -> list[str]:
    return sorted({reason for row in rows for reason in row["exceptions"]})


def placement_of(arm: Row, options: argparse.Namespace) -> str:
    return options.placement or ("separate" if TRAINERS[arm["trainer"]].world_size > 1 else "colocated")


class SameBytes(runner.Benchmark):
    name, title, about = "same_bytes", "The same FP8 bytes at both ends", __doc__
    keys = ("model", "layers", "scales", "trainer", "engine", "transport", "device")

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--model", choices=MODELS, default="qwen3_8b")
        parser.add_argument("--layers", type=int, default=0, help="only the first N layers; 0: all")
        runner.choices(parser, "--scales", ["pow2", "fp32"], ["pow2"])
        parser.add_argument("--trainer-layout", choices=TRAINERS, default="single", help="default: one rank")
        runner.choices(parser, "--engine-layout", ENGINES, ["tp1"])
        parser.add_argument(
            "--placement", choices=["colocated", "separate"], help="default: separate with several ranks"
        )
        parser.add_argument("--transport", default="auto", choices=["auto", "gloo", "ipc", "nccl"])

    def settle(self, options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        if options.quick:
            options.layers = 2
            options.model = options.model if num_gpus() else "tiny_moe"
        self._options = options

    def arms(self, options: argparse.Namespace) -> Iterator[Row]:
        base = {"model": options.model, "layers": options.layers, "trainer": options.trainer_layout}
        for engine, scales in itertools.product(options.engine_layout, options.scales):
            yield base | {"engine": engine, "scales": scales, "transport": options.transport}

    def ranks(self, arm: Row) -> int:
        return TRAINERS[arm["trainer"]].world_size

    def gpus(self, arm: Row) -> int:
        if arm["model"].startswith("tiny") and not num_gpus():
            return 0
        trainer, workers = self.ranks(arm), ENGINES[arm["engine"]][0]
        return max(trainer, workers) if placement_of(arm, self._options) == "colocated" else trainer + workers

    def is_wrong(self, row: Row) -> bool:
        return not UNEXPLAINED.isdisjoint(row["exceptions"])

    def measure(self, arm: Row, options: argparse.Namespace) -> Iterator[Row]:
        from megatron_fp8rl.trainer.compat import megatron_on_cpu

        megatron_on_cpu.install()
        from megatron_fp8rl.trainer.parallel import Parallel

        started, parallel = time.monotonic(), Parallel.init(TRAINERS[arm["trainer"]])
        try:
            cfg = run_config(arm, placement_of(arm, options))
            total, publish_s = run_case(cfg, parallel)
            has_te = transformer_engine(arm["scales"], parallel.device) is not None
            seconds = {"publish_s": round(publish_s, 3), "seconds": round(time.monotonic() - started, 1)}
            yield arm | row_of(cfg, total, has_te) | seconds
        finally:
            parallel.close()

    def order(self, rows: Sequence[Row]) -> Sequence[Row]:
        return sorted(rows, key=lambda row: [str(row[key]) for key in self.keys])

    def table(self, rows: Sequence[Row]) -> str:
        self._numbers = {reason: f"({i})" for i, reason in enumerate(reasons(rows), 1)}
        return super().table(rows)

    def line(self, row: Row) -> Row:
        exceptions = [f"{names[0]:,} {self._numbers[reason]}" for reason, names in row["exceptions"].items()]
        return {
            "model": f"{row['model']}, {row['num_layers']} layers",
            "scales": row["scales"],
            "trainer": row["trainer"],
            "engine": row["engine"],
            "tensors": row["tensors"],
            "same in engine": row["equal_in_engine"],
            "FP8 tensors": row["fp8_tensors"],
            "same as definition": row["equal_to_definition"],
            "same as Transformer Engine": row["equal_to_te"],
            "exceptions": ", ".join(exceptions) or "none",
        }

    def notes(self, rows: Sequence[Row]) -> str:
        notes = [
            "Every tensor is compared whole or by slices of ranks: E4M3 bytes and scales of FP8 tensors, BF16 of the "
            "others. The engine reports digests after its second publication."
        ]
        for number, reason in enumerate(reasons(rows), 1):
            row = next(row for row in rows if reason in row["exceptions"])
            notes.append(f"({number}) {reason}. For example {row['exceptions'][reason][1]}.")
            if reason == TE_SCALES:
                share = f"{row['scales_unlike_te']:.1%} of elements lie in blocks whose scale differs"
                notes.append(f"There {share}, and {row['bytes_unlike_te']:.3%} of bytes differ.")
        return "\n\n".join(notes)


if __name__ == "__main__":
    sys.exit(runner.main(SameBytes()))
