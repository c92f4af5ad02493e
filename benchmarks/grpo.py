"""Whole GRPO runs side by side: what is learned, where the seconds go, how fast engines sample, in BF16 and in FP8.

    python -m benchmarks.grpo --config small_qwen3 --precision bf16 fp8 --layout colocated sleep
    python -m benchmarks.grpo --config small_qwen3_moe --precision bf16 fp8 --layout separate
    python -m benchmarks.grpo --config small_qwen3_8_layers --precision fp8_invariant
    python -m benchmarks.grpo --table         # the section and the picture again, on any machine

Every run is a process of ``python -m megatron_fp8rl rl`` with the same warm start, seed and problems, and leaves a row
with its curves; the table and the picture are made of all rows. A run that is killed at ``--run-limit-s`` leaves a row of
the steps so far. ``fp8_invariant`` has the engine's bits in the trainer: a batch-invariant engine, and its attention and
linears in the trainer's forward pass.

    colocated   one GPU for trainer and engine, which both keep their memory
    sleep       the same; the engine frees its memory while the trainer works, and the trainer its optimizer and
                gradients while the engine samples
    separate    two trainer ranks (tensor parallel, or expert parallel for a mixture of experts) on two GPUs, one engine
                of tensor parallel degree 2 on two others
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import grpo_rows, runner
from benchmarks.process_tree import run_logged
from benchmarks.record import Row
from benchmarks.whole_runs import follow
from megatron_fp8rl.cli import config_functions
from megatron_fp8rl.report.run_data import RunData

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


def command(arm: Row, run_dir: Path, warm_start: Path, options: argparse.Namespace) -> list[str]:
    """The process of one run."""
    is_moe = config_functions()[arm["config"]]().model.is_moe
    return [
        sys.executable, "-m", "megatron_fp8rl", "rl", arm["config"],
        "--model.hf_path", str(warm_start), "--data.sft_steps", "0", "--seed", str(arm["seed"]), "--output_dir", str(run_dir),
        *(["--num_steps", str(options.steps)] if options.steps else []),
        "--observe.display", "plain", "--observe.tensorboard", "False", "--observe.record_rollouts", "False",
        "--checkpoint.every_steps", "0", "--checkpoint.export_hf", "False",
        *PRECISIONS[arm["precision"]], *layout_overrides(arm["layout"], is_moe=is_moe), *options.overrides,
    ]  # fmt: skip


def warm_start(config: str, options: argparse.Namespace) -> Path:
    """The checkpoint that all runs of a configuration start from, whatever their seeds; made where it is missing.

    Raises RuntimeError with the first error of its log.
    """
    found, log = options.folder / config / "warm_start" / "hf", options.folder / f"{config}-warm-start.log"
    steps = ["--data.sft_steps", str(options.sft_steps)] if options.sft_steps else []
    words = [
        sys.executable, "-m", "megatron_fp8rl", "sft", config, "--output_dir", str(options.folder / config),
        "--observe.display", "plain", *steps, *options.overrides,
    ]  # fmt: skip
    if not found.exists() and not run_logged(words, log, options.run_limit_s):
        raise RuntimeError(f"the warm start: {runner.failure_in(log, options.run_limit_s)}")
    return found


class Grpo(runner.Benchmark):
    name, title, keys, about = "grpo", "GRPO from start to end", grpo_rows.KEYS, __doc__
    picture = "grpo_h200.png"
    limit_s = 1800.0

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.choices(parser, "--config", sorted(config_functions()), ["small_qwen3"])
        runner.choices(parser, "--precision", PRECISIONS, ["bf16", "fp8"])
        runner.choices(parser, "--layout", ["colocated", "sleep", "separate"], ["colocated"])
        parser.add_argument("--seed", nargs="+", type=int, default=[1])
        parser.add_argument("--steps", type=int, default=0, help="of reinforcement learning; 0: the configuration's")
        parser.add_argument("--sft-steps", type=int, default=0, help="of the warm start; 0: the configuration's")
        parser.add_argument("overrides", nargs="*", help="after --: fields of every run, e.g. -- --optim.lr 2e-5")

    def settle(self, options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        if options.quick:
            options.config, options.steps, options.sft_steps = ["tiny_qwen3_moe"], 4, 30

    def arms(self, options: argparse.Namespace) -> Iterator[Row]:
        """Seeds outermost, so that what is cut short still compares everything once."""
        for seed, config, layout, precision in itertools.product(
            options.seed, options.config, options.layout, options.precision
        ):
            yield {"config": config, "layout": layout, "precision": precision, "seed": seed}

    def gpus(self, arm: Row) -> int:
        return gpus_of(arm["layout"]) if runner.num_gpus() else 0

    def rows_of(self, arm: Row, options: argparse.Namespace, log: Path) -> Iterator[Row]:
        name = "{precision}-{layout}-seed{seed}".format(**arm)
        run_dir, wanted = options.folder / arm["config"] / name, options.steps or config_functions()[arm["config"]]().num_steps
        try:
            start = warm_start(arm["config"], options)
        except RuntimeError as error:
            yield arm | {"error": str(error)}
            return
        shutil.rmtree(run_dir, ignore_errors=True)
        follow(name, command(arm, run_dir, start, options), run_dir, log, options.run_limit_s)
        found = grpo_rows.numbers(RunData(run_dir))
        if found["steps"]:
            yield arm | {"warm_start": grpo_rows.warm_start_name(start.parent), "num_steps": wanted} | found
        if not found["is_done"]:
            yield arm | {"error": f"{found['steps']} of {wanted} steps: {runner.failure_in(log, options.run_limit_s)}"}

    def table(self, rows: Sequence[Row]) -> str:
        return grpo_rows.tables(self.order(rows))

    def order(self, rows: Sequence[Row]) -> Sequence[Row]:
        return sorted(rows, key=lambda row: [str(row.get(key)) for key in self.keys])

    def notes(self, rows: Sequence[Row]) -> str:
        return grpo_rows.NOTES

    def draw(self, rows: Sequence[Row], path: Path) -> None:
        grpo_rows.draw(self.order(rows), path)


if __name__ == "__main__":
    sys.exit(runner.main(Grpo()))
