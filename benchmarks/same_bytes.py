"""Are the FP8 bytes that the trainer multiplies by, those that we quantize and those that the engine holds the same?

    python -m benchmarks.same_bytes --model qwen3_8b --layers 4
    python -m benchmarks.same_bytes --model qwen3_30b_a3b --trainer-layout tp2ep2 --engine-layout tp1 tp2 ep2

Random models in the full width of the published ones. For every tensor, without looking at what was sent:

    definition   kernels/blockwise.py in plain torch, on the whole Hugging Face tensor
    ours         the kernel that the exporter calls, on the whole tensor
    trainer      Transformer Engine's Float8BlockQuantizer on each trainer rank's own parameter: fused, sharded
    engine       digests of what its kernels hold after a publication from all trainer ranks, slice by slice

A tensor of which two differ is counted under a reason; "unexplained" must not occur. Without Transformer Engine that
column stays empty. Every trainer rank compares its share of the tensors; the command starts all ranks.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import record
from benchmarks.byte_comparison import TE_SCALES, Tally, compare, transformer_engine
from benchmarks.results import FOLDER, Results, Row, num_gpus, on_ranks, require_gpus
from megatron_fp8rl.config import ParallelConfig, PrecisionConfig, RolloutConfig, RunConfig
from model_configs import qwen3, tiny

if TYPE_CHECKING:
    from megatron_fp8rl.trainer.parallel import Parallel

MODELS = {
    "qwen3_8b": qwen3.qwen3_8b,
    "qwen3_30b_a3b": qwen3.qwen3_30b_a3b,
    "tiny": lambda: tiny.tiny_qwen3().model,
    "tiny_moe": lambda: tiny.tiny_qwen3_moe().model,
}
TRAINERS = {
    "single": ParallelConfig(),
    "tp2": ParallelConfig(world_size=2, tensor=2),
    "ep2": ParallelConfig(world_size=2, expert=2),
    "ep4": ParallelConfig(world_size=4, expert=4),
    "tp2ep2": ParallelConfig(world_size=2, tensor=2, expert=2),
    "pp2": ParallelConfig(world_size=2, pipeline=2),
}
ENGINES = {"tp1": (1, 1), "tp2": (2, 1), "ep2": (2, 2)}  # tensor, expert
KEYS = ("model", "layers", "scales", "trainer", "engine", "transport", "device")

def run_config(options: argparse.Namespace, engine: str, scales: str) -> RunConfig:
    model = MODELS[options.model]()
    tensor, expert = ENGINES[engine]
    colocated = options.placement == "colocated"
    return RunConfig(
        name="same_bytes",
        model=replace(model, num_layers=options.layers or model.num_layers),
        parallel=TRAINERS[options.trainer_layout],
        precision=PrecisionConfig(trainer="blockwise", rollout="blockwise", scales=scales),
        rollout=RolloutConfig(
            tensor=tensor,
            expert=expert,
            placement=options.placement,
            transport=options.transport,
            torch_compile=False,
            enforce_eager=True,  # nothing is sampled
            max_prompt_tokens=128,
            max_completion_tokens=128,
            max_num_sequences=8,
            kv_cache_bytes=1 << 30 if model.vocab_size > 1000 else 64 << 20,
            # A colocated engine finds the trainer's parameters on the GPU when it starts.
            gpu_memory_utilization=0.45 if colocated else 0.85,
        ),
        output_dir=str(FOLDER / "same_bytes" / f"{options.model}-{options.trainer_layout}-{engine}-{scales}"),
    )


def run_case(cfg: RunConfig, parallel: Parallel) -> tuple[Tally, float]:
    """Collective: publish a random model and compare; returns the sum over ranks and the publication's seconds."""
    import torch.distributed as dist

    from benchmarks.light_policy import light_policy
    from megatron_fp8rl.data.model_dir import write_model_dir
    from megatron_fp8rl.rollout.fleet import Fleet
    from megatron_fp8rl.weight_sync.publish import WeightExporter

    held, seconds = None, 0.0
    with ExitStack() as stack:
        policy = light_policy(cfg, parallel)
        parallel.barrier("drawn")
        fleet = None
        if parallel.rank == 0:
            fleet = stack.enter_context(Fleet.start(cfg, write_model_dir(cfg), cfg.run_dir))
        parallel.barrier("engines")
        exporter = WeightExporter(policy, fleet, cfg)
        stack.callback(exporter.close)
        for version in (1, 2):  # the first one goes through vLLM's loaders, later ones straight into its tensors
            seconds = exporter.publish(version).seconds
        if fleet is not None:
            held = [fleet.sync(c.weight_digests(), cfg.rollout.update_deadline_s) for c in fleet.clients]
        held = parallel.broadcast_object(held)
    del policy, exporter
    te = transformer_engine(cfg.precision.scales, parallel.device)
    own = compare(cfg, held, parallel.rank, parallel.device, te)
    every: list[Tally] = [own] * parallel.world_size
    if parallel.world_size > 1:
        dist.all_gather_object(every, own, group=parallel.control_group)
    total = Tally()
    for tally in every:
        total.add(tally)
    return total, seconds


def row_of(cfg: RunConfig, total: Tally, has_te: bool) -> Row:
    """Numbers of one case, and of every exception its reason, how many and the first names."""
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


def table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as docs/measured.md shows them; reasons are numbered, see :func:`reasons`."""
    numbers = {reason: f"({i})" for i, reason in enumerate(reasons(rows), 1)}
    return [
        {
            "model": f"{row['model']}, {row['num_layers']} layers",
            "scales": row["scales"],
            "trainer": row["trainer"],
            "engine": row["engine"],
            "tensors": row["tensors"],
            "same in engine": row["equal_in_engine"],
            "FP8 tensors": row["fp8_tensors"],
            "same as definition": row["equal_to_definition"],
            "same as Transformer Engine": row["equal_to_te"],
            "exceptions": ", ".join(f"{found[0]:,} {numbers[why]}" for why, found in row["exceptions"].items()) or "none",
        }
        for row in sorted(rows, key=lambda row: [str(row[key]) for key in KEYS])
    ]


def reasons(rows: Sequence[Row]) -> list[str]:
    return sorted({reason for row in rows for reason in row["exceptions"]})


def write_section(rows: Sequence[Row]) -> None:
    notes = [
        "Every tensor is compared whole, or slice by slice where ranks hold slices: E4M3 bytes and scales of FP8 "
        "tensors, BF16 of the others. The engine is asked after its second publication, without what was sent."
    ]
    for number, reason in enumerate(reasons(rows), 1):
        row = next(row for row in rows if reason in row["exceptions"])
        example = row["exceptions"][reason][1]
        notes.append(f"({number}) {reason}. For example {example}.")
        if reason == TE_SCALES:
            share = f"{row['scales_unlike_te']:.1%} of elements lie in blocks whose scale differs"
            notes.append(f"There, {share}, and {row['bytes_unlike_te']:.3%} of bytes differ.")
    record.section("same_bytes", "The same FP8 bytes at both ends", table(rows), notes="\n\n".join(notes))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.same_bytes", description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="qwen3_8b")
    parser.add_argument("--layers", type=int, default=0, help="only the first N layers; 0: all")
    parser.add_argument("--scales", nargs="+", choices=["pow2", "fp32"], default=["pow2"])
    parser.add_argument("--trainer-layout", choices=TRAINERS, default="single", help="default: one rank")
    parser.add_argument("--engine-layout", nargs="+", choices=ENGINES, default=["tp1"])
    parser.add_argument("--placement", choices=["colocated", "separate"], help="default: separate when ranks are several")
    parser.add_argument("--transport", default="auto", choices=["auto", "gloo", "ipc", "nccl"])
    parser.add_argument("--quick", action="store_true", help="2 layers")
    parser.add_argument("--budget-s", type=float, default=570.0, help="start no engine that may not end before")
    parser.add_argument("--case-s", type=float, default=120.0, help="what one case may take")
    parser.add_argument("--results", type=Path, default=FOLDER / "same_bytes.jsonl")
    options = parser.parse_args(argv)
    options.layers = min(options.layers, 2) or 2 if options.quick else options.layers
    several = TRAINERS[options.trainer_layout].world_size > 1
    options.placement = options.placement or ("separate" if several else "colocated")
    return options


def num_gpus_needed(options: argparse.Namespace, engine: str) -> int:
    trainer, workers = TRAINERS[options.trainer_layout].world_size, ENGINES[engine][0]
    return max(trainer, workers) if options.placement == "colocated" else trainer + workers


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    world_size = TRAINERS[options.trainer_layout].world_size
    if world_size > 1 and "RANK" not in os.environ:
        command, environment = on_ranks(world_size, "benchmarks.same_bytes", *(sys.argv[1:] if argv is None else argv))
        return subprocess.run(command, env=os.environ | environment).returncode
    on_cpu = options.model.startswith("tiny") and num_gpus() == 0
    if not on_cpu:
        needed = max(num_gpus_needed(options, engine) for engine in options.engine_layout)
        require_gpus(needed, "benchmarks.same_bytes with these layouts")
    else:
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # before Megatron-Core is imported
    import torch

    from megatron_fp8rl.trainer.compat import megatron_on_cpu

    megatron_on_cpu.install()
    from megatron_fp8rl.trainer.parallel import Parallel

    started = time.monotonic()
    parallel = Parallel.init(TRAINERS[options.trainer_layout])
    results = Results(options.results, KEYS)
    device = torch.cuda.get_device_name() if not on_cpu else "cpu"
    is_wrong = False
    try:
        for engine, scales in itertools.product(options.engine_layout, options.scales):
            if parallel.broadcast_object(time.monotonic() - started) > options.budget_s - options.case_s:
                print(f"SKIPPED {engine} {scales}: {options.budget_s:.0f} s are nearly over", flush=True)
                continue
            cfg = run_config(options, engine, scales)
            case_started = time.monotonic()
            total, publish_s = run_case(cfg, parallel)
            if parallel.rank != 0:
                continue
            has_te = transformer_engine(scales, parallel.device) is not None
            chosen = {"model": options.model, "layers": options.layers, "scales": scales, "engine": engine}
            chosen |= {"trainer": options.trainer_layout, "transport": options.transport, "device": device}
            seconds = {"publish_s": round(publish_s, 3), "seconds": round(time.monotonic() - case_started, 1)}
            results.add(chosen | row_of(cfg, total, has_te) | seconds)
            is_wrong |= any(reason.startswith("unexplained") for reason in total.exceptions)
    finally:
        parallel.close()
    if parallel.rank == 0 and not on_cpu:
        with record.turn():
            write_section(results.rows())
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
