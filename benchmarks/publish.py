"""How long engines stand still while weights arrive, next to a plain copy of the same bytes in the same run.

    python -m benchmarks.publish --model qwen3_8b --layout colocated 1+1 tp2+tp2 --transport ipc nccl
    python -m benchmarks.publish --model qwen3_30b_a3b --layout tp2ep2+ep2 pp2+tp2 --transport ipc

A layout is the trainer's degrees, a plus and the engine's on GPUs behind the trainer's; "colocated" is both on one GPU.
Trainer ranks hold parameters alone, drawn on the GPU (light_policy.py), so that full models fit beside an engine. Each
publication follows an update that changes every byte, and the engines prove what they hold after each. Every case runs
in its own processes under torchrun; rows of several invocations merge in ``--results``.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import record
from benchmarks.results import (
    FOLDER,
    Results,
    Row,
    device_name,
    failure_in,
    num_gpus,
    on_ranks,
    require_gpus,
    run_logged,
    timed,
)
from megatron_fp8rl.config import ObserveConfig, ParallelConfig, PrecisionConfig, RolloutConfig, RunConfig
from model_configs import qwen3, tiny

if TYPE_CHECKING:
    from megatron_fp8rl.trainer.parallel import Parallel
    from megatron_fp8rl.types import PublishReport

MODELS = {
    "qwen3_8b": qwen3.qwen3_8b,
    "qwen3_30b_a3b": qwen3.qwen3_30b_a3b,
    "tiny": lambda: tiny.tiny_qwen3_moe().model,
}
KEYS = ("model", "layers", "precision", "layout", "transport", "device")
_CHUNK_BYTES = 256 << 20  # of the plain copies
_CASE_DEADLINE_S = 420.0


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    model: str
    layers: int  # 0: all
    precision: str  # bf16 or fp8, at both ends
    layout: str
    transport: str
    rounds: int

    @property
    def name(self) -> str:
        parts = (self.model, self.layers or "all", self.precision, self.layout, self.transport)
        return "-".join(map(str, parts))


def degrees(text: str) -> dict[str, int]:
    """``tp2ep2`` -> {"tp": 2, "ep": 2}; ``1`` -> {}. Raises ValueError for anything else."""
    if not re.fullmatch(r"1|(?:(?:tp|pp|ep)\d+)+", text):
        raise ValueError(f"layout part {text!r}: write 1, or degrees such as tp2, ep2, pp2, tp2ep2")
    return {axis: int(size) for axis, size in re.findall(r"(tp|pp|ep)(\d+)", text)}


def layout(text: str) -> tuple[ParallelConfig, dict]:
    """The trainer's layout and the engine's fields of ``RolloutConfig``."""
    if text == "colocated":
        return ParallelConfig(), {"tensor": 1, "placement": "colocated"}
    trainer, engine = map(degrees, text.split("+"))
    tensor, pipeline, expert = (trainer.get(axis, 1) for axis in ("tp", "pp", "ep"))
    world_size = max(tensor, expert) * pipeline
    parallel = ParallelConfig(world_size=world_size, tensor=tensor, pipeline=pipeline, expert=expert)
    num_workers = max(engine.get("tp", 1), engine.get("ep", 1))
    return parallel, {"tensor": num_workers, "expert": engine.get("ep", 1), "placement": "separate"}


def run_config(case: Case) -> RunConfig:
    model = MODELS[case.model]()
    parallel, engine = layout(case.layout)
    precision = "bf16" if case.precision == "bf16" else "blockwise"
    rollout = RolloutConfig(
        **engine,
        transport=case.transport,
        max_prompt_tokens=128,
        max_completion_tokens=128,
        max_num_sequences=16,
        kv_cache_bytes=1 << 30 if model.vocab_size > 1000 else 64 << 20,
        # A colocated engine leaves room for the trainer's parameters.
        gpu_memory_utilization=0.5 if engine["placement"] == "colocated" else 0.85,
        enforce_eager=True,  # an engine starts sooner, and a publication does not run the model
        update_deadline_s=300.0,
    )
    return RunConfig(
        name="publish",
        model=replace(model, num_layers=case.layers or model.num_layers),
        parallel=parallel,
        precision=PrecisionConfig(trainer=precision, rollout=precision),
        rollout=rollout,
        observe=ObserveConfig(verify_every=1),
        output_dir=str(FOLDER / "publish" / case.name),
    )


def publish_rounds(case: Case) -> Row | None:
    """Collective over the trainer's ranks, under torchrun: the row of a case; None on all ranks but 0."""
    from contextlib import ExitStack

    from megatron_fp8rl.trainer.compat import megatron_on_cpu

    megatron_on_cpu.install()
    from benchmarks.light_policy import light_policy
    from megatron_fp8rl.data.model_dir import write_model_dir
    from megatron_fp8rl.rollout.fleet import Fleet
    from megatron_fp8rl.trainer.parallel import Parallel
    from megatron_fp8rl.weight_sync.publish import WeightExporter

    cfg = run_config(case)
    with ExitStack() as stack:
        parallel = Parallel.init(cfg.parallel)
        stack.callback(parallel.close)
        # Before the engines start, which measure what memory is free.
        policy = light_policy(cfg, parallel)
        _empty_cache()
        parallel.barrier("drawn")
        fleet = None
        started = time.perf_counter()
        if parallel.rank == 0:
            fleet = stack.enter_context(Fleet.start(cfg, write_model_dir(cfg), cfg.run_dir))
        start_s = time.perf_counter() - started
        parallel.barrier("engines")
        exporter = WeightExporter(policy, fleet, cfg)
        stack.callback(exporter.close)
        reports: list[PublishReport] = []
        for version in range(1, case.rounds + 2):
            reports.append(exporter.publish(version))
            policy.update()
            parallel.barrier(f"version {version}")
        senders = {source.rank for transfer in exporter.plan.transfers for source in transfer.sources}
        floor = copy_floor(cfg, parallel, reports[-1].num_bytes, len(senders))
        return _row(case, start_s, reports, floor) if parallel.rank == 0 else None


def _row(case: Case, start_s: float, reports: Sequence[PublishReport], floor: tuple[str, float]) -> Row:
    """First publication, which sets everything up and proves the mapping, and the medians of the later ones."""
    first, *later = [_seconds(report) for report in reports]
    median = {name: round(statistics.median(one[name] for one in later), 4) for name in first}
    kind, floor_s = floor
    return asdict(case) | {
        "device": device_name(),
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
    """All durations of a report: the whole, the pause, and the parts that the exporter tells apart."""
    return {"seconds": report.seconds} | {
        field.name: value
        for field in dataclasses.fields(report)
        if field.name.endswith("_s") and isinstance(value := getattr(report, field.name), int | float)
    }


def copy_floor(cfg: RunConfig, parallel: Parallel, num_bytes: int, num_senders: int) -> tuple[str, float]:
    """Collective: (what was copied, seconds) for the bytes of the busiest GPU, all trainer ranks at once.

    Colocated: within the GPU. Separate: from a trainer's GPU to an engine's over the same link; with transport nccl and
    several trainer ranks, NCCL between pairs of them, for the engines' workers are not in reach.
    """
    import torch

    rollout = cfg.rollout
    num_bytes //= min(num_senders, rollout.tensor * rollout.num_replicas)
    if parallel.device.type == "cpu":
        kind, chunk = "copy in host memory", _copier(torch.device("cpu"), torch.device("cpu"))
    elif rollout.placement == "colocated":
        kind, chunk = "copy within the GPU", _copier(parallel.device, parallel.device)
    elif rollout.transport == "nccl" and parallel.world_size % 2 == 0:
        kind, chunk = "NCCL send and receive between trainer ranks", _nccl_sender(parallel)
    else:
        peer = torch.device("cuda", parallel.world_size + parallel.rank % rollout.tensor)
        kind, chunk = "copy to the peer GPU", _copier(parallel.device, peer)
    chunk()  # opens the way
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


def _empty_cache() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run_case(case: Case) -> Row:
    """The row of a case from processes of its own; with ``error`` when they fail or take too long."""
    world_size = layout(case.layout)[0].world_size
    out = FOLDER / "publish" / f"{case.name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    command, environment = on_ranks(world_size, "benchmarks.publish", "--worker", json.dumps(asdict(case)), str(out))
    log_path = out.with_suffix(".log")
    run_logged(command, log_path, _CASE_DEADLINE_S, **environment)
    if out.exists():
        return json.loads(out.read_text())
    return asdict(case) | {"device": device_name(), "error": failure_in(log_path, _CASE_DEADLINE_S)}


def plan_cases(options: argparse.Namespace) -> Iterator[Case]:
    """All combinations that exist: NCCL needs GPUs of its own at each end, expert parallelism experts."""
    for model, text, precision, transport in itertools.product(
        options.model, options.layout, options.precision, options.transport
    ):
        if (transport == "nccl" and text == "colocated") or ("ep" in text and not MODELS[model]().is_moe):
            continue
        yield Case(model, options.layers, precision, text, transport, options.rounds)


def table(rows: Sequence[Row]) -> list[dict[str, str]]:
    """The rows as docs/measured.md shows them."""
    shown = []
    for row in rows:
        layers = f", {row['layers']} layers" if row["layers"] else ""
        head = {
            "model": f"{row['model']}{layers}, {row['precision']}",
            "trainer+engine": row["layout"],
            "transport": row["transport"],
        }
        names = ("GB", "first pause s", "pause s", "publication s", "parts of it, s", "plain copy s", "share")
        if "error" in row:
            shown.append(head | dict.fromkeys(names, "-") | {"parts of it, s": f"failed: {row['error'][:80]}"})
            continue
        later = row["later"]
        parts = [f"{n.removesuffix('_s')} {v:.3f}" for n, v in later.items() if n not in ("seconds", "pause_s")]
        floor = f"{row['floor_s']:.4f} ({row['floor']})"
        values = (
            f"{row['gb']:.2f}", f"{row['first']['pause_s']:.2f}", f"{later['pause_s']:.3f}", f"{later['seconds']:.3f}",
            ", ".join(parts), floor, f"{row['floor_share_of_pause']:.1%}",
        )  # fmt: skip
        shown.append(head | dict(zip(names, values)))
    return shown


def write_section(rows: Sequence[Row]) -> None:
    notes = (
        "Pause: from the engines' stop to their first token allowed, proof of every tensor included. First: the "
        "publication that an engine starts with, through vLLM's own loaders. Others: median of the later ones, each "
        "after an update that changed every byte. Plain copy: the bytes of the busiest GPU, in the same run; share: of "
        "the pause. Dummy parameters, idle engines, no optimizer in the trainer's memory."
    )
    record.section("publish", "Publication of weights", table(rows), notes=notes)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publish", description=__doc__.split("\n")[0])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["qwen3_8b"])
    parser.add_argument("--layers", type=int, default=0, help="of the model; 0: all")
    parser.add_argument("--layout", nargs="+", default=["colocated"], help="colocated, 1+1, tp2+tp2, tp2ep2+ep2, ...")
    parser.add_argument("--precision", nargs="+", choices=["fp8", "bf16"], default=["fp8"])
    parser.add_argument("--transport", nargs="+", choices=["ipc", "nccl", "gloo"], default=["ipc"])
    parser.add_argument("--rounds", type=int, default=4, help="publications after the first")
    parser.add_argument("--quick", action="store_true", help="4 layers of qwen3_8b on one GPU; tiny on a CPU")
    parser.add_argument("--again", action="store_true", help="measure also what --results has already")
    parser.add_argument("--budget-s", type=float, default=570.0, help="start no case that may not end before")
    parser.add_argument("--case-s", type=float, default=90.0, help="what one case may take")
    parser.add_argument("--results", type=Path, default=FOLDER / "publish.jsonl")
    parser.add_argument("--worker", nargs=2, metavar=("CASE", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.quick:
        on_gpu = num_gpus() > 0
        options.model, options.layers = (["qwen3_8b"], 4) if on_gpu else (["tiny"], 0)
        options.transport = ["ipc"]
    return options


def worker(text: str, out: Path) -> int:
    """What every trainer rank runs."""
    row = publish_rounds(Case(**json.loads(text)))
    if row is not None:
        out.write_text(json.dumps(row))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.worker:
        return worker(options.worker[0], Path(options.worker[1]))
    cases = list(plan_cases(options))
    if options.model != ["tiny"]:
        require_gpus(1, "benchmarks.publish")
    started = time.monotonic()
    results = Results(options.results, KEYS)
    device = device_name()
    for case in cases:
        if not options.again and results.has(asdict(case) | {"device": device}):
            continue
        parallel, engine = layout(case.layout)
        needed = parallel.world_size + (engine["tensor"] if engine["placement"] == "separate" else 0)
        if device != "cpu" and needed > num_gpus():
            print(f"SKIPPED {case.name}: needs {needed} GPUs, {num_gpus()} are here")
        elif time.monotonic() - started > options.budget_s - options.case_s:
            print(f"SKIPPED {case.name}: {options.budget_s:.0f} s are nearly over; run the same command again")
        else:
            results.add(run_case(case))
    if device != "cpu":
        with record.turn():
            write_section(results.rows())
    return 0


if __name__ == "__main__":
    sys.exit(main())
