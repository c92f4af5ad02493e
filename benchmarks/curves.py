"""Whole runs from one warm start in several precisions: rewards, log-probability differences and times.

    python -m benchmarks.curves                                  small_qwen3_moe_4_layers: BF16, FP8 and exact
    python -m benchmarks.curves --config tiny_qwen3_moe --arm fp8/fp8 exact --seeds 1 2 -- --num_steps 40
    python -m benchmarks.curves --resume                         the runs that the last invocation did not finish

Runs ``python -m megatron_fp8rl study CONFIG``; options after ``--`` are fields of that configuration. A row is one
finished run. ``study`` writes a table and a plot into its folder.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import runner
from benchmarks.process_tree import run_logged
from benchmarks.record import Row
from megatron_fp8rl import cli
from megatron_fp8rl.config import ConfigError
from megatron_fp8rl.observe.metrics import PHASES
from megatron_fp8rl.report import study
from megatron_fp8rl.report.run_data import RunData

_LAST = 10  # the mean reward of so many first and last steps


def row_of(run: RunData) -> Row:
    """The row of a run from its metrics. Log-probability differences are over all steps, in nats."""
    steps = [step for step in run.records if step["step"] > 0]
    held_out = run.values("eval/pass_rate/mean")

    def values(key: str) -> list[float]:
        return [step[key] for step in steps if step.get(key) is not None]

    def median(key: str) -> float:
        return statistics.median(values(key)[1:] or values(key) or [0.0])

    rewards = values("reward/score/mean")
    return {
        "num_steps": len(steps),
        "held_out": [held_out[0], held_out[-1]] if held_out else None,
        "reward": [statistics.fmean(rewards[:_LAST]), statistics.fmean(rewards[-_LAST:])],
        "mean_d": statistics.fmean(values("mismatch/abs_logprob_diff/mean")),
        "max_d": max(values("mismatch/abs_logprob_diff/max")),
        "sampled_tokens": int(sum(values("rollout/num_tokens/sum"))),
        "median_step_s": median("time/step/s"),
        "phases_s": {phase: value for phase in PHASES if (value := median(f"time/{phase}/s"))},
    }


class Curves(runner.Benchmark):
    name, title, about = "curves", "Whole runs from one warm start", __doc__
    keys = ("config", "fields", "arm", "seed", "device", "run")
    limit_s = 3600.0  # for all runs

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--config", default="small_qwen3_moe_4_layers")
        runner.choices(parser, "--arm", study.PRECISIONS, ["bf16/bf16", "fp8/fp8", "exact"])
        parser.add_argument("--seeds", nargs="+", type=int, default=[1])
        parser.add_argument("--at-once", type=int, default=1, help="concurrent runs on the same GPUs")
        parser.add_argument("--resume", action="store_true", help="keep finished runs, and run the rest")
        parser.add_argument("fields", nargs="*", help="fields of the configuration, after --")

    def settle(self, options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        if options.quick:
            options.config, options.arm = "tiny_qwen3_moe", ["fp8/fp8", "exact"]
            options.fields = [*options.fields, "--num_steps", "3", "--warm_start.steps", "20"]
        try:
            planned(options)
        except ConfigError as error:
            parser.error(f"{options.config}: {error}")

    def arms(self, options: argparse.Namespace) -> list[Row]:
        return [{"config": options.config, "fields": options.fields}]

    def gpus(self, arm: Row) -> int:
        return 0  # the configuration decides

    def rows_of(self, arm: Row, options: argparse.Namespace, log: Path) -> Iterator[Row]:
        folder, runs = planned(options)
        if not options.resume:
            shutil.rmtree(folder, ignore_errors=True)
        missing = [run for run in runs if not run.is_done]
        command = [sys.executable, "-m", "megatron_fp8rl", "study", options.config, *study_args(options)]
        run_logged(command, log, options.run_limit_s)
        for run in missing:
            row = arm | {"arm": run.arm, "seed": run.seed, "at_once": options.at_once}
            run_log = folder / f"{run.run_dir.name}.log"
            failure = {"error": runner.failure_in(run_log if run_log.exists() else log, options.run_limit_s)}
            yield row | (row_of(RunData(run.run_dir)) if run.is_done else failure)

    def is_wrong(self, row: Row) -> bool:
        return row["arm"] == "exact" and row["max_d"] > 0

    def line(self, row: Row) -> Row:
        return {
            "configuration": " ".join([row["config"], *row["fields"]]),
            "rollout/training": row["arm"],
            "seed": row["seed"],
            "steps": row["num_steps"],
            "held-out pass rate": " to ".join(f"{value:.3f}" for value in row["held_out"] or ()),
            f"reward, first and last {_LAST}": ", ".join(f"{value:.3f}" for value in row["reward"]),
            "mean d": f"{row['mean_d']:.1e}",
            "largest d": f"{row['max_d']:.1e}",
            "tokens": row["sampled_tokens"],
            "side by side": row["at_once"],
            "step s": round(row["median_step_s"], 2),
            "rollouts s": round(row["phases_s"].get("rollouts", 0.0), 2),
            "update s": round(row["phases_s"].get("update", 0.0), 2),
        }

    def notes(self, rows: Sequence[Row]) -> str:
        return (
            "All runs of a letter start from the same weights and see the same prompts. d: |log-probability of the "
            "trainer - of the engine| of a sampled token, in nats, over all steps. Seconds: medians over the steps "
            "after the first. Concurrent runs slow each other down."
        )


def study_args(options: argparse.Namespace) -> list[str]:
    seeds = [str(seed) for seed in options.seeds]
    chosen = ["--seeds", *seeds, "--arms", *options.arm, "--corrected_only", "--at_once", str(options.at_once)]
    return [*_fields(options), *chosen]


def planned(options: argparse.Namespace) -> tuple[Path, list[study.StudyRun]]:
    """(folder, runs) of the study. Raises ConfigError for an invalid configuration."""
    cfg = cli.parse_overrides(cli.load_config(options.config), _fields(options))
    asked = study.StudyOptions(seeds=tuple(options.seeds), arms=tuple(options.arm), corrected_only=True)
    return study.study_folder(cfg), study.plan_runs(cfg, (), asked)


def _fields(options: argparse.Namespace) -> list[str]:
    return [*options.fields, "--output_dir", str((options.folder / "run").resolve()), "--observe.display", "plain"]


if __name__ == "__main__":
    sys.exit(runner.main(Curves()))
