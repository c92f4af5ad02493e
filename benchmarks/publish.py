"""Pause of engines during a publication of weights, next to a plain copy of the same bytes.

    python -m benchmarks.publish --model qwen3_8b --layout colocated 1+1 tp2+tp2 --transport ipc nccl
    python -m benchmarks.publish --model qwen3_30b_a3b --layout tp2ep2+ep2 pp2+tp2 --transport ipc

A layout is TRAINER+ENGINE with the degrees of each; the engine's GPUs follow the trainer's. "colocated" is one GPU for
both. Trainer ranks have random parameters only (light_policy.py), so that full models fit beside an engine. An update
before each publication changes every byte. Engines verify each publication.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks import runner
from benchmarks.record import FOLDER, Row
from benchmarks.runner import num_gpus
from benchmarks.timing import timed
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
    from megatron_fp8rl.types import PublishReport

_CHUNK_BYTES = 256 << 20  # chunk of a plain copy


def degrees(text: str) -> dict[str, int]:
    """``tp2ep2`` -> {"tp": 2, "ep": 2}; ``1`` -> {}. Raises ValueError for anything else."""
    if not re.fullmatch(r"1|(?:(?:tp|pp|ep)\d+)+", text):
        raise ValueError(f"layout part {text!r}: write 1, or degrees such as tp2, ep2, pp2, tp2ep2")
    return {axis: int(size) for axis, size in re.findall(r"(tp|pp|ep)(\d+)", text)}


def layout(text: str) -> tuple[ParallelConfig, dict]:
    """(layout of the trainer, fields of ``EngineConfig``)."""
    if text == "colocated":
        return ParallelConfig(), {"tensor": 1, "placement": "colocated"}
    trainer, engine = map(degrees, text.split("+"))
    tensor, pipeline, expert = (trainer.get(axis, 1) for axis in ("tp", "pp", "ep"))
    world_size = max(tensor, expert) * pipeline
    parallel = ParallelConfig(world_size=world_size, tensor=tensor, pipeline=pipeline, expert=expert)
    num_workers = max(engine.get("tp", 1), engine.get("ep", 1))
    return parallel, {"tensor": num_workers, "expert": engine.get("ep", 1), "placement": "separate"}


def run_config(arm: Row) -> RunConfig:
    model = MODELS[arm["model"]]()
    parallel, engine = layout(arm["layout"])
    precision = "bf16" if arm["precision"] == "bf16" else "blockwise"
    engines = EngineConfig(
        **engine,
        max_num_sequences=16,
        kv_cache_bytes=1 << 30 if model.vocab_size > 1000 else 64 << 20,
        # A colocated engine leaves memory for the trainer's parameters.
        gpu_memory_utilization=0.5 if engine["placement"] == "colocated" else 0.85,
        graphs="none",  # starts sooner; publications do not run the model
    )
    return RunConfig(
        name="publish",
        model=replace(model, num_layers=arm["layers"] or model.num_layers),
        parallel=parallel,
        precision=PrecisionConfig(trainer=precision, rollout=precision, exact=False),
        engine=engines,
        sampling=SamplingConfig(max_prompt_tokens=128, max_completion_tokens=128),
        weight_sync=WeightSyncConfig(transport=arm["transport"]),
        output_dir=str(FOLDER / "publish" / "-".join(map(str, arm.values()))),
    )


def summary(start_s: float, reports: Sequence[PublishReport], floor: tuple[str, float]) -> Row:
    """The first publication, which sets up connections and proves the mapping, and medians of the later ones."""
    first, *later = [_seconds(report) for report in reports]
    median = {name: round(statistics.median(seconds[name] for seconds in later), 4) for name in first}
    kind, floor_s = floor
    return {
        "start_s": round(start_s, 1),
        "gb": round(reports[-1].num_bytes / 1e9, 3),
        "num_tensors": reports[-1].num_tensors,
        "first": {name: round(value, 4) for name, value in first.items()},
        "later": median,
        "floor": kind,
        "floor_s": round(floor_s, 5),
        "floor_share_of_pause": round(floor_s / median["pause_s"], 4),
        "gb_per_s_of_pause": round(reports[-1].num_bytes / 1e9 / median["pause_s"], 2),
    }


def _seconds(report: PublishReport) -> dict[str, float]:
    return {"seconds": report.seconds} | {
        field.name: value
        for field in dataclasses.fields(report)
        if field.name.endswith("_s") and isinstance(value := getattr(report, field.name), int | float)
    }


def copy_floor(cfg: RunConfig, parallel: Parallel, num_bytes: int, num_senders: int) -> tuple[str, float]:
    """Collective: (kind of copy, seconds) for the bytes of the busiest GPU, on all trainer ranks at once. Colocated:
    within the GPU. Separate: from a trainer's GPU to an engine's GPU; NCCL between pairs with NCCL and several trainer
    ranks."""
    import torch

    engine = cfg.engine
    num_bytes //= min(num_senders, engine.tensor * engine.num_replicas)
    if parallel.device.type == "cpu":
        kind, chunk = "copy in host memory", _copier(torch.device("cpu"), torch.device("cpu"))
    elif engine.placement == "colocated":
        kind, chunk = "copy within the GPU", _copier(parallel.device, parallel.device)
    elif cfg.weight_sync.transport == "nccl" and parallel.world_size % 2 == 0:
        kind, chunk = "NCCL send and receive between trainer ranks", _nccl_sender(parallel)
    else:
        peer = torch.device("cuda", parallel.world_size + parallel.rank % engine.tensor)
        kind, chunk = "copy to the peer GPU", _copier(parallel.device, peer)
    chunk()  # opens the connection
    parallel.barrier("copies")
    rounds = max(1, round(num_bytes / _CHUNK_BYTES))
    seconds = timed(lambda: [chunk() for _ in range(rounds)]) * num_bytes / (rounds * _CHUNK_BYTES)
    gathered = [seconds]
    if parallel.world_size > 1:
        import torch.distributed as dist

        gathered = [0.0] * parallel.world_size
        dist.all_gather_object(gathered, seconds, group=parallel.control_group)
    return kind, max(gathered)


def _copier(source_device, target_device):
    import torch

    source = torch.ones(_CHUNK_BYTES, dtype=torch.uint8, device=source_device)
    target = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, device=target_device)
    return lambda: target.copy_(source, non_blocking=True)


def _nccl_sender(parallel: Parallel):
    import torch
    import torch.distributed as dist

    data = torch.ones(_CHUNK_BYTES, dtype=torch.uint8, device=parallel.device)
    is_sender = parallel.rank % 2 == 0
    return lambda: dist.send(data, parallel.rank + 1) if is_sender else dist.recv(data, parallel.rank - 1)


class Publish(runner.Benchmark):
    name, title, about = "publish", "Publication of weights", __doc__
    keys = ("model", "layers", "precision", "layout", "transport", "device")

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.choices(parser, "--model", MODELS, ["qwen3_8b"])
        parser.add_argument("--layers", type=int, default=0, help="layers of the model; 0: all")
        parser.add_argument("--layout", nargs="+", default=["colocated"], help="colocated, 1+1, tp2ep2+ep2, ...")
        runner.choices(parser, "--precision", ["fp8", "bf16"], ["fp8"])
        runner.choices(parser, "--transport", ["ipc", "nccl", "gloo"], ["ipc"])
        parser.add_argument("--rounds", type=int, default=4, help="publications after the first")

    def settle(self, options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        if options.quick:
            options.model, options.layers = (["qwen3_8b"], 4) if num_gpus() else (["tiny_moe"], 0)
            options.transport = ["ipc"]

    def arms(self, options: argparse.Namespace) -> Iterator[Row]:
        """All possible combinations: NCCL needs separate GPUs, and expert parallelism needs experts."""
        for model, text, precision, transport in itertools.product(
            options.model, options.layout, options.precision, options.transport
        ):
            if (transport == "nccl" and text == "colocated") or ("ep" in text and not MODELS[model]().is_moe):
                continue
            chosen = {"precision": precision, "layout": text, "transport": transport, "rounds": options.rounds}
            yield {"model": model, "layers": options.layers, **chosen}

    def ranks(self, arm: Row) -> int:
        return layout(arm["layout"])[0].world_size

    def gpus(self, arm: Row) -> int:
        if arm["model"].startswith("tiny") and not num_gpus():
            return 0
        parallel, engine = layout(arm["layout"])
        return parallel.world_size + (engine["tensor"] if engine["placement"] == "separate" else 0)

    def measure(self, arm: Row, options: argparse.Namespace) -> Iterator[Row]:
        """Collective over the trainer's ranks."""
        from megatron_fp8rl.trainer.compat import megatron_on_cpu

        megatron_on_cpu.install()
        from benchmarks.light_policy import publishing
        from megatron_fp8rl.trainer.parallel import Parallel

        cfg = run_config(arm)
        parallel = Parallel.init(cfg.parallel)
        with closing(parallel), publishing(cfg, parallel) as (policy, exporter, _, start_s):
            reports: list[PublishReport] = []
            for version in range(1, arm["rounds"] + 2):
                reports.append(exporter.publish(version))
                policy.update()
                parallel.barrier(f"version {version}")
            senders = {source.rank for transfer in exporter.plan.transfers for source in transfer.sources}
            floor = copy_floor(cfg, parallel, reports[-1].num_bytes, len(senders))
            yield arm | summary(start_s, reports, floor)

    def line(self, row: Row) -> Row:
        later, layers = row["later"], f", {row['layers']} layers" if row["layers"] else ""
        inside = ("pack_s", "send_s", "load_s", "verify_s")
        parts = [f"{name.removesuffix('_s')} {later[name]:.3f}" for name in inside]
        return {
            "model": f"{row['model']}{layers}, {row['precision']}",
            "trainer+engine": row["layout"],
            "transport": row["transport"],
            "GB": f"{row['gb']:.2f}",
            "first publication s": f"{row['first']['seconds']:.2f}",
            "its pause s": f"{row['first']['pause_s']:.2f}",
            "pause s": f"{later['pause_s']:.3f}",
            "publication s": f"{later['seconds']:.3f}",
            "parts of it, s": ", ".join(parts),
            "plain copy s": f"{row['floor_s']:.4f} ({row['floor']})",
            "share": f"{row['floor_share_of_pause']:.1%}",
        }

    def notes(self, rows: Sequence[Row]) -> str:
        return (
            "Pause: from the stop of the engines until they may sample, including verification of every tensor. "
            "First: the publication after an engine's start, with one layer of each kind through vLLM's loaders. "
            "Others: median of the later ones, each after an update that changed every byte. Plain copy: the bytes "
            "of the busiest GPU in the same run, and its share of the pause. Random parameters, idle engines, no "
            "optimizer."
        )


if __name__ == "__main__":
    sys.exit(runner.main(Publish()))
