"""Whole GRPO runs side by side: what is learned, where the seconds go, how fast engines sample, in BF16 and in FP8.

    python -m benchmarks.grpo --config small_qwen3 --precision bf16 fp8 --layout colocated sleep
    python -m benchmarks.grpo --config small_qwen3_moe --precision bf16 fp8 --layout separate
    python -m benchmarks.grpo --config small_qwen3_8_layers --precision fp8_invariant

Every run is a process of ``python -m megatron_fp8rl rl`` with the same warm start, seed and problems; runs that have
finished are not repeated, interrupted ones go on from their last checkpoint. The table and the plot are made of all
runs under ``--folder``, so that several invocations add up. ``fp8_invariant`` has the engine's bits in the trainer: a
batch-invariant engine, and its attention and linears in the trainer's forward pass.

    colocated   one GPU for trainer and engine, which both keep their memory
    sleep       the same; the engine frees its memory while the trainer works, and the trainer its optimizer and
                gradients while the engine samples
    separate    two trainer ranks (tensor parallel, or expert parallel for a mixture of experts) on two GPUs, one engine
                of tensor parallel degree 2 on two others
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.results import FOLDER, failure_in, locked, num_gpus, run_logged
from benchmarks.rollout_speed import read_log
from megatron_fp8rl.cli import config_functions
from megatron_fp8rl.observe.metrics import PHASES
from megatron_fp8rl.observe.run_data import RunData

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
_WARM_STEPS = 2  # at the start: kernels compile and allocators grow
_ENDS = 5  # steps that count as a run's start and end
_EQUAL = 1e-8  # nats; below float32's rounding of a log-probability


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
        "--observe.display", "plain", "--checkpoint.every_steps", "20", "--checkpoint.keep", "1",
        "--checkpoint.export_hf", "False",
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


def run_all(options: argparse.Namespace) -> None:
    """Run what is missing, as far as the budget goes. A run that fails is reported, and the next one starts."""
    started = time.monotonic()
    for run in plan_runs(options):
        left_s = options.budget_s - (time.monotonic() - started)
        if run.data.is_done and not options.warm_start:
            continue
        if num_gpus() and num_gpus() < gpus_of(run.layout):
            print(f"SKIPPED {run.config} {run.name}: needs {gpus_of(run.layout)} GPUs, {num_gpus()} are here")
            continue
        if left_s < options.run_s:
            print(f"SKIPPED {run.config} {run.name}: {left_s:.0f} s are left; run the same command again")
            continue
        if not warm_start(run, options, started) or options.warm_start:
            continue
        left_s = options.budget_s - (time.monotonic() - started)
        print(f"{time.monotonic() - started:5.0f} s  {run.config} {run.name} starts", flush=True)
        log = run.run_dir.with_suffix(".log")
        began = time.monotonic()
        ended_well = run_logged(command(run, options), log, max(left_s - 20, 1.0))
        if not (ended_well or RunData(run.run_dir).is_done):
            print(f"FAILED {run.config} {run.name}: {failure_in(log, left_s)}", flush=True)
        print("RESULT", json.dumps(summary(run) | {"wall_s": round(time.monotonic() - began, 1)}), flush=True)


def warm_start(run: Run, options: argparse.Namespace, started: float) -> bool:
    """Have the checkpoint that all runs of a configuration start from, by this program or another; whether it is there."""
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
    said = f"{steps} steps, pass rate {_shown(rate, '.3f')}"
    print(f"{time.monotonic() - started:5.0f} s  the warm start of {run.config} is there: {said}", flush=True)
    return True


def found_runs(folder: Path) -> list[Run]:
    """All runs under the folder that have written numbers, in the order of configuration, layout, precision, seed."""
    found = []
    for path in folder.glob("*/*-seed*/metrics.jsonl"):
        precision, layout, seed = path.parent.name.split("-")
        found.append(Run(path.parents[1].name, precision, layout, int(seed.removeprefix("seed")), folder))
    return sorted(found, key=lambda run: (run.config, run.layout, run.precision, run.seed))


def median(run: RunData, key: str) -> float | None:
    """Over the steps behind the first ones; None where the run has no such number."""
    values = [value for step, value in zip(*run.series(key), strict=True) if step > _WARM_STEPS]
    return statistics.median(values) if values else None


def phase_seconds(run: RunData) -> dict[str, float]:
    """Median seconds of each phase of a step, in the order of the loop."""
    found = {phase: median(run, f"time/{phase}/s") for phase in PHASES}
    # What happens every few steps only is no part of the usual one.
    return {phase: seconds for phase, seconds in found.items() if seconds and phase not in ("checkpoint", "evaluate")}


def summary(run: Run) -> dict[str, Any]:
    """The numbers of one run."""
    data = run.data
    rewards = data.values("reward/score/mean")
    log = run.run_dir / "logs" / "rollout-0.log"
    engine = read_log(log.read_text(encoding="utf-8", errors="replace")) if log.exists() else {}
    return {
        "config": run.config,
        "layout": run.layout,
        "precision": run.precision,
        "seed": run.seed,
        "steps": len(rewards),
        "is_done": data.is_done,
        "reward_start": statistics.fmean(rewards[:_ENDS]) if rewards else None,
        "reward_end": statistics.fmean(rewards[-_ENDS:]) if rewards else None,
        "held_out_start": data.first("eval/pass_rate/mean"),
        "held_out_end": data.last("eval/pass_rate/mean"),
        "abs_logprob_diff": data.mean("mismatch/abs_logprob_diff/mean"),
        "abs_logprob_diff_max": max(data.values("mismatch/abs_logprob_diff/max"), default=None),
        "kl_k3": data.mean("mismatch/kl_k3/mean"),
        "step_s": sum(phase_seconds(data).values()),
        "phases_s": phase_seconds(data),
        "rollout_tokens_per_s": median(data, "rollout/tokens_per_s/mean"),
        "train_tokens_per_s": median(data, "train/tokens_per_s/mean"),
        "publish_pause_s": median(data, "publish/pause/s"),
        "kv_tokens": engine.get("kv_tokens"),
        "kernels": engine.get("kernels", []),
    }


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: what was learned and how fast, then the seconds of a step by phase."""
    learned, seconds = [], []
    for row in rows:
        head = {"run": f"{row['config']}, {row['layout']}, {row['precision']}, seed {row['seed']}"}
        rewards, held_out = (
            f"{_shown(row[f'{name}_start'], '.3f')} to {_shown(row[f'{name}_end'], '.3f')}"
            for name in ("reward", "held_out")
        )
        learned.append(
            head
            | {
                "steps": row["steps"],
                f"reward, first {_ENDS} to last {_ENDS} steps": rewards,
                "held-out pass rate": held_out,
                "mean abs(old - rollout)": _shown(row["abs_logprob_diff"], ".1e"),
                "largest": _shown(row["abs_logprob_diff_max"], ".1e"),
                "KL (k3)": _shown(row["kl_k3"], ".1e"),
                "sampled tokens/s": _shown(row["rollout_tokens_per_s"], ",.0f"),
                "trained tokens/s": _shown(row["train_tokens_per_s"], ",.0f"),
                "KV tokens": _shown(row["kv_tokens"], ",d"),
                "pause, s": _shown(row["publish_pause_s"], ".3f"),
            }
        )
        phases = {phase: f"{value:.3f}" for phase, value in row["phases_s"].items()}
        seconds.append(head | {"s/step": f"{row['step_s']:.2f}"} | phases)
    return record.table(learned) + "\n\nSeconds of a step by phase (medians):\n\n" + record.table(seconds)


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def draw(runs: Sequence[Run], path: Path) -> None:
    """Reward, mismatch, seconds by phase and tokens per second of all runs."""
    from megatron_fp8rl.observe.style import CYCLE, curve, finish, new_figure, styled

    labels = {run: f"{run.config} {run.layout} {run.precision}" for run in runs}
    kinds = list(dict.fromkeys(labels.values()))
    colors = {kind: CYCLE[i % len(CYCLE)] for i, kind in enumerate(kinds)}
    with styled():
        figure = new_figure(15.0, 9.0)
        (reward, mismatch), (phases, speed) = figure.subplots(2, 2)
        mismatch.set_yscale("symlog", linthresh=_EQUAL)  # a log scale would hide steps without any difference
        named: set[str] = set()
        for run in runs:
            label = labels[run]
            how = {"color": colors[label], "label": "" if label in named else label}
            named.add(label)
            curve(reward, *run.data.series("reward/score/mean"), **how)
            curve(mismatch, *run.data.series("mismatch/abs_logprob_diff/mean"), **how)
        finish(reward, "Reward")
        finish(mismatch, "Mean |old - rollout|", y=f"nats, log scale above {_EQUAL:.0e}", legend=False)
        first = {kind: next(run for run in runs if labels[run] == kind) for kind in kinds}
        lefts = dict.fromkeys(kinds, 0.0)
        for phase, color in zip(PHASES, (*CYCLE, "#9BD3C0"), strict=False):
            widths = [phase_seconds(first[kind].data).get(phase, 0.0) for kind in kinds]
            if any(widths):
                phases.barh(kinds, widths, left=[lefts[kind] for kind in kinds], color=color, label=phase)
                lefts = {kind: lefts[kind] + width for kind, width in zip(kinds, widths, strict=True)}
        phases.invert_yaxis()
        finish(phases, "Seconds of a step by phase", x="s")
        sampled = [median(first[kind].data, "rollout/tokens_per_s/mean") or 0.0 for kind in kinds]
        speed.barh(kinds, sampled, color=[colors[kind] for kind in kinds])
        speed.invert_yaxis()
        finish(speed, "Sampled tokens per second", x="tokens/s", legend=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=110)


def write_section(folder: Path, plot: Path) -> None:
    runs = found_runs(folder)
    rows = [summary(run) for run in runs]
    draw(runs, plot)
    notes = (
        "Same warm start, problems and seeds within a configuration; s/step is the sum of its phases' medians, without "
        "evaluations and checkpoints. colocated: one GPU for both ends; sleep: the same, "
        "taking turns in memory; separate: 2 GPUs for the trainer, 2 for one engine. KV tokens: the context that the "
        "engine's cache holds, from its log; how much memory it may take differs between the layouts. Largest: of any "
        "token of any step. fp8_invariant: a batch-invariant engine, whose attention and linears the trainer's forward "
        "pass has too.\n\n"
        f"![Reward, mismatch, seconds by phase and speed of all runs]({plot.name})"
    )
    record.section("grpo", "GRPO from start to end", tables(rows), notes=notes, path=plot.parent / "measured.md")


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


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    run_all(options)
    if found_runs(options.folder) and not options.warm_start:
        with record.turn(options.plot.parent / "measured.md"):
            write_section(options.folder, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
