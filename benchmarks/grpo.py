"""Whole GRPO runs side by side: what is learned, where the seconds go, how fast engines sample, in BF16 and in FP8.

    python -m benchmarks.grpo --config small_qwen3 --precision bf16 fp8 --layout colocated sleep
    python -m benchmarks.grpo --config small_qwen3_moe --precision bf16 fp8 --layout separate
    python -m benchmarks.grpo --config small_qwen3_8_layers --precision fp8_invariant
    python -m benchmarks.grpo --table         # the section and the plot again, on any machine

Every run is a process of ``python -m megatron_fp8rl rl`` with the same warm start, seed and problems, and leaves a row
with its curves; the table and the plot are made of all rows. A run is asked to stop STOP_S before the budget ends, as a
user would ask it: it finishes its step and saves, its row has the steps so far, and the same command goes on there.
Complete runs are not repeated without ``--again``. ``fp8_invariant`` has the engine's bits in the trainer: a
batch-invariant engine, and its attention and linears in the trainer's forward pass.

    colocated   one GPU for trainer and engine, which both keep their memory
    sleep       the same; the engine frees its memory while the trainer works, and the trainer its optimizer and
                gradients while the engine samples
    separate    two trainer ranks (tensor parallel, or expert parallel for a mixture of experts) on two GPUs, one engine
                of tensor parallel degree 2 on two others
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import record
from benchmarks.grpo_rows import KEYS, draw, num_steps_of, numbers, section, warm_start_name
from benchmarks.results import FOLDER, Results, Row, device_name, failure_in, locked, num_gpus, run_logged
from benchmarks.whole_runs import follow
from megatron_fp8rl.cli import config_functions
from megatron_fp8rl.report.run_data import RunData
from megatron_fp8rl.stop import SAVED

PRECISIONS = {
    "bf16": ("--precision.trainer", "bf16", "--precision.rollout", "bf16"),
    "fp8": ("--precision.trainer", "blockwise", "--precision.rollout", "blockwise"),
    "fp8_kv": (
        "--precision.trainer", "blockwise", "--precision.rollout", "blockwise", "--rollout.kv_cache_dtype", "fp8",
    ),
    "fp8_invariant": (
        "--precision.trainer", "blockwise", "--precision.rollout", "blockwise", "--precision.attention", "engine",
        "--precision.linears", "deep_gemm", "--rollout.batch_invariant", "True",
    ),
}  # fmt: skip
_LOG_LINES = 15  # of a failed run


@dataclass(frozen=True)
class Run:
    """One run of the table."""

    config: str
    precision: str
    layout: str
    seed: int
    folder: Path  # of all runs

    @property
    def name(self) -> str:
        return f"{self.precision}-{self.layout}-seed{self.seed}"

    @property
    def run_dir(self) -> Path:
        return self.folder / self.config / self.name

    @property
    def data(self) -> RunData:
        return RunData(self.run_dir)


def layout_overrides(layout: str, *, is_moe: bool) -> list[str]:
    """Command-line words that place trainer and engine."""
    if layout == "colocated":
        return ["--rollout.placement", "colocated"]
    if layout == "sleep":
        return [
            "--rollout.placement", "colocated", "--rollout.sleep_level", "1",
            "--rollout.gpu_memory_utilization", "0.6", "--optim.offload", "gradients", "optimizer",
        ]  # fmt: skip
    return [
        "--rollout.placement", "separate", "--parallel.world_size", "2",
        "--parallel.expert" if is_moe else "--parallel.tensor", "2",
        "--rollout.tensor", "2", "--rollout.gpu_memory_utilization", "0.85",
    ]  # fmt: skip


def gpus_of(layout: str) -> int:
    return 4 if layout == "separate" else 1


def plan_runs(options: argparse.Namespace) -> Iterator[Run]:
    """Seeds outermost, so that what is cut short still compares everything once."""
    for seed, config, layout, precision in itertools.product(
        options.seed, options.config, options.layout, options.precision
    ):
        yield Run(config, precision, layout, seed, options.folder)


def command(run: Run, options: argparse.Namespace) -> list[str]:
    """The process of one run."""
    is_moe = config_functions()[run.config]().model.is_moe
    steps = ["--num_steps", str(options.steps)] if options.steps else []
    return [
        sys.executable, "-m", "megatron_fp8rl", "rl", run.config,
        "--model.hf_path", str(warm_start_dir(run)), "--data.sft_steps", "0",
        "--seed", str(run.seed), "--output_dir", str(run.run_dir), *steps,
        "--observe.display", "plain", "--observe.tensorboard", "False", "--observe.record_rollouts", "False",
        "--checkpoint.every_steps", "20", "--checkpoint.keep", "1", "--checkpoint.export_hf", "False",
        *PRECISIONS[run.precision], *layout_overrides(run.layout, is_moe=is_moe), *options.overrides,
    ]  # fmt: skip


def warm_start_dir(run: Run) -> Path:
    return run.folder / run.config / "warm_start" / "hf"


def warm_start_command(run: Run, options: argparse.Namespace) -> list[str]:
    """One for all runs of a configuration, whatever their seeds."""
    steps = ["--data.sft_steps", str(options.sft_steps)] if options.sft_steps else []
    return [
        sys.executable, "-m", "megatron_fp8rl", "sft", run.config, "--output_dir", str(run.folder / run.config),
        "--observe.display", "plain", *steps, *options.overrides,
    ]  # fmt: skip


def run_all(options: argparse.Namespace, results: Results) -> None:
    """Run what is missing, as far as the budget goes. A run that fails is reported, and the next one starts."""
    started = time.monotonic()
    for run in plan_runs(options):
        left_s = options.budget_s - (time.monotonic() - started)
        if not options.warm_start and is_there(run, options, results):
            continue
        if not options.warm_start and num_gpus() and num_gpus() < gpus_of(run.layout):
            print(f"SKIPPED {run.config} {run.name}: needs {gpus_of(run.layout)} GPUs, {num_gpus()} are here")
            continue
        if left_s < options.run_s:
            print(f"SKIPPED {run.config} {run.name}: {left_s:.0f} s are left; run the same command again")
            continue
        if not warm_start(run, options, started) or options.warm_start:
            continue
        if options.again:
            shutil.rmtree(run.run_dir, ignore_errors=True)
        left_s = options.budget_s - (time.monotonic() - started)
        print(f"{time.monotonic() - started:5.0f} s  {run.config} {run.name} starts", flush=True)
        try:
            status = follow(
                run.name, command(run, options), run.run_dir, log_of(run), wanted_steps(run, options), left_s
            )
        finally:  # also when this program is asked to end
            keep(run, options, results)
        report_end(run, options, status, left_s)


def wanted_steps(run: Run, options: argparse.Namespace) -> int:
    return options.steps or config_functions()[run.config]().num_steps


def identity(run: Run) -> Row:
    """What tells the run's row from all others."""
    names = {name: getattr(run, name) for name in ("config", "layout", "precision", "seed")}
    return names | {"warm_start": warm_start_name(warm_start_dir(run).parent)}


def row_of(run: Run, results: Results) -> Row | None:
    """What is kept of the run, from the warm start that is here; where there is none, from any, complete ones first."""
    wanted = identity(run)
    if wanted["warm_start"] is None:
        del wanted["warm_start"]
    found = [row for row in results.rows() if wanted.items() <= {name: row.get(name) for name in wanted}.items()]
    return max(found, key=lambda row: row["is_done"], default=None)


def is_there(run: Run, options: argparse.Namespace, results: Results) -> bool:
    """Whether there is a row of the complete run; makes it of the run's folder where only that is left."""
    if options.again:
        return False
    wanted = wanted_steps(run, options)
    row = row_of(run, results)
    if row is not None and row["is_done"] and row["steps"] >= wanted:
        return True
    if run.data.is_done and num_steps_of(run.data) >= wanted:
        keep(run, options, results)
        return True
    return False


def keep(run: Run, options: argparse.Namespace, results: Results) -> None:
    """Add the run's row, unless it has no step, or fewer than the row that is there has of as many wanted ones."""
    data, before = run.data, row_of(run, results)
    wanted, steps = wanted_steps(run, options), num_steps_of(data)
    if not steps:
        return
    if before is not None and before["num_steps"] == wanted and before["steps"] > steps:
        print(f"{run.config} {run.name}: its row of {before['steps']} steps stays; this run has {steps}", flush=True)
        return
    results.add(
        identity(run)
        | {"num_steps": wanted}
        | numbers(data)
        | {
            "device": device_name(),
            "machine": record.machine(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "command": record.command(),
        }
    )


def log_of(run: Run) -> Path:
    return run.run_dir.with_suffix(".log")


def report_end(run: Run, options: argparse.Namespace, status: int | None, left_s: float) -> None:
    """Say whether the run is complete, was stopped in time, or failed, with the end of its log."""
    data, wanted = run.data, wanted_steps(run, options)
    steps = num_steps_of(data)
    if data.is_done:
        print(f"{run.config} {run.name}: all {steps} steps are done", flush=True)
    elif status == SAVED or (status is None and steps):
        print(f"SKIPPED {run.config} {run.name}: {steps} of {wanted} steps, {'and' if status else 'not'} saved; "
              "0 s are left; run the same command again", flush=True)  # fmt: skip
    else:
        print(f"FAILED {run.config} {run.name} after {steps} of {wanted} steps: {failure_in(log_of(run), left_s)}")
        for path in (log_of(run), run.run_dir / "logs" / "rollout-0.log"):
            text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else "no such file"
            lines = [f"  | {line}" for line in text.splitlines()[-_LOG_LINES:]]
            print(f"The end of {path.name}:", *lines, sep="\n", flush=True)


def warm_start(run: Run, options: argparse.Namespace, started: float) -> bool:
    """Have the checkpoint that all runs of a configuration start from, made here or elsewhere; whether it is there."""
    left_s = options.budget_s - (time.monotonic() - started)
    with locked(warm_start_dir(run), deadline_s=max(left_s, 1.0)):
        if not warm_start_dir(run).exists():
            log = run.folder / run.config / "warm_start.log"
            left_s = options.budget_s - (time.monotonic() - started)
            if not run_logged(warm_start_command(run, options), log, max(left_s - 20, 1.0)):
                print(f"FAILED {run.config} warm start: {failure_in(log, left_s)}", flush=True)
                return False
    curve = RunData(warm_start_dir(run).parent)
    steps, rate = len(curve.values("train/loss/mean")), curve.last("sft/expected_pass_rate/mean")
    said = f"{steps} steps, pass rate {'-' if rate is None else f'{rate:.3f}'}"
    print(f"{time.monotonic() - started:5.0f} s  the warm start of {run.config} is there: {said}", flush=True)
    return True


def write_section(rows: Sequence[Row], plot: Path) -> None:
    draw(rows, plot)
    record.replace("grpo", section(rows, plot), path=plot.parent / "measured" / "grpo.md")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grpo", description=__doc__.split("\n")[0])
    parser.add_argument("--config", nargs="+", choices=sorted(config_functions()), default=["small_qwen3"])
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=["bf16", "fp8"])
    parser.add_argument("--layout", nargs="+", choices=["colocated", "sleep", "separate"], default=["colocated"])
    parser.add_argument("--seed", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int, default=0, help="of reinforcement learning; 0: the configuration's")
    parser.add_argument("--sft-steps", type=int, default=0, help="of the warm start; 0: the configuration's")
    parser.add_argument("--warm-start", action="store_true", help="make what all runs start from, and start none")
    parser.add_argument("--quick", action="store_true", help="a few steps of tiny_qwen3_moe, on any machine")
    parser.add_argument("--again", action="store_true", help="run from their start also those that are complete")
    parser.add_argument("--table", action="store_true", help="section and plot of the rows; run nothing")
    parser.add_argument("--budget-s", type=float, default=570.0, help="for all runs of this invocation")
    parser.add_argument("--run-s", type=float, default=120.0, help="start no run with less than this left")
    parser.add_argument("--folder", type=Path, default=FOLDER / "grpo")
    parser.add_argument("--plot", type=Path, default=Path("docs/grpo_h200.png"), help="measured.md lies beside it")
    parser.add_argument("overrides", nargs="*", help="after --: fields of every run, e.g. -- --optim.lr 2e-5")
    options = parser.parse_args(argv)
    if options.quick:
        options.config, options.steps, options.sft_steps = ["tiny_qwen3_moe"], 4, 30
        options.folder = options.folder.with_name("grpo_quick")
        options.plot = options.folder / "grpo.png"
        options.run_s = 60.0
    return options


@contextlib.contextmanager
def _ends_in_order() -> Iterator[None]:
    """A SIGTERM meanwhile is an exception, which lets the row of the present run be kept."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    is_default = options.folder == FOLDER / "grpo"
    results = Results(FOLDER / "grpo.jsonl" if is_default else options.folder / "grpo.jsonl", KEYS)
    try:
        if not options.table:
            with _ends_in_order():
                run_all(options, results)
    finally:
        if not options.warm_start:
            with record.turn(options.plot.parent / "measured" / "grpo.md"):
                if rows := sorted(results.rows(), key=results.key):
                    write_section(rows, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
