"""Compare the arithmetic of ``plan`` with the runs that were measured, phase by phase.

    python -m benchmarks.planner.against_runs

The rates of ``preflight/rates.toml`` are fitted to some of these rows; their errors are errors of the fit, not of a
prediction.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from megatron_fp8rl.config import (
    EngineConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    SamplingConfig,
)
from megatron_fp8rl.preflight.memory import gpu_in
from megatron_fp8rl.preflight.step_time import Lengths, Network, Rates, StepTime, step_time
from model_configs import dense, qwen3

FOLDER = Path(__file__).parents[1] / "results"
_PHASES = ("rollouts", "update", "publish")
_OLDER = tuple("ABCDEFGH")  # ledger runs of older code: only their publications count
# Ledger runs whose updates do not count: GPUs waited for the host, or (U) updates were slower for an unknown reason.
_STALLED = ("K", "L", "O", "U")


Row = dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    run: str
    phase: str
    predicted: float
    measured: float
    bf16: str = ""  # the BF16 run of the same invocation, if there is one

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def rows(name: str) -> list[Row]:
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


def ledger_config(row: Row, models: dict[tuple[str, int], ModelConfig]) -> tuple[RunConfig, Lengths] | None:
    """The configuration of a ledger row with engines of one GPU; None for an unknown model or an exact run."""
    model = models.get((row["model"]["family"], row["model"]["hidden_size"]))
    if model is None or row["arm"].startswith("exact"):
        return None
    parallel, placement = ParallelConfig(**row["layout"]["trainer"]), row["layout"]["placement"]
    model = replace(model, num_layers=row["layers"])
    in_fp8, sequences = row["arm"] != "bf16", int(row["sequences"])
    mean = row["sampled_tokens"] / sequences
    name = "blockwise" if in_fp8 else "bf16"
    precision = PrecisionConfig(trainer=name, rollout=name, exact=False)
    cfg = RunConfig(
        name=row["arm"],
        model=model,
        parallel=parallel,
        precision=precision,
        optim=OptimConfig(
            recompute=row["layout"]["recompute"],
            offload=tuple(row["layout"]["offload"]),
            max_tokens_per_microbatch=row["layout"]["microbatch"],
        ),
        engine=EngineConfig(
            placement=placement,
            sleep_level=row["layout"]["sleep"],
            num_replicas=row["gpus"] - parallel.world_size * (placement == "separate"),
            kv_cache_dtype="fp8" if row["arm"] == "fp8_kv" else "auto",
        ),
        sampling=SamplingConfig(
            prompts_per_step=sequences,
            completions_per_prompt=1,
            max_prompt_tokens=512,
            max_completion_tokens=row["completion_tokens"],
        ),
    )
    return cfg, Lengths(prompt=row["prompt_tokens"], mean=mean, longest=row["completion_tokens"])


@functools.cache
def comparisons() -> tuple[Comparison, ...]:
    """Every phase of every measured run of a known configuration and present code."""
    return tuple(_comparisons())


def models() -> dict[tuple[str, int], ModelConfig]:
    """The models of the ledger's shapes by family and width, at full depth."""
    shapes = (dense.qwen3_0_6b(), dense.qwen3_1_7b(), dense.qwen3_4b(), qwen3.qwen3_8b(), qwen3.qwen3_30b_a3b())
    return {(model.family, model.hidden_size): model for model in shapes}


def _comparisons() -> Iterator[Comparison]:
    for row in rows("ledger"):
        known = ledger_config(row, models())
        if known is None:
            continue
        cfg, lengths = known
        gpu = gpu_in(row["device"])
        predicted: StepTime = step_time(
            cfg, lengths, Rates.of(gpu.name), Network(), memory_bytes=gpu.memory_bytes, gpus=row["gpus"]
        )
        name, bf16 = (
            f"ledger {row['run']}, {gpu.name.upper()}: {row['shape']} {arm}, {row['layers']} layers"
            for arm in (row["arm"], "bf16")
        )
        phases = _PHASES
        if row["run"] in _OLDER:
            phases = ("publish",)
        elif row["run"] in _STALLED:
            phases = "rollouts", "publish"
        for phase in phases:
            if phase != "publish" or cfg.engine.placement == "separate":  # colocated weights stay on the GPU
                yield Comparison(name, phase, getattr(predicted, phase), median(row["phases_s"][phase]))
        if phases == _PHASES:
            yield Comparison(name, "step", predicted.step, median(row["step_s"]), bf16)


def steps() -> list[Comparison]:
    return [row for row in comparisons() if row.phase == "step"]


def ratios() -> list[tuple[str, float, float]]:
    """(run and arm, predicted, measured) ratio of BF16 to each other arm of the same invocation."""
    by_run = {row.run: row for row in steps()}
    pairs = [(by_run[row.bf16], row) for row in by_run.values() if row.bf16 in by_run and row.bf16 != row.run]
    return [(row.run, bf16.predicted / row.predicted, bf16.measured / row.measured) for bf16, row in pairs]


def report() -> list[str]:
    """A table of all phases, the errors by phase, and the ratios of BF16 to other precisions."""
    rows = comparisons()
    lines = ["this arithmetic against measured runs: predicted, measured, error"]
    for row in rows:
        lines.append(f"  {row.run:<64} {row.phase:<13}{row.predicted:9.3f} s{row.measured:9.3f} s {row.error:+7.1%}")
    for phase in (*_PHASES, "step"):
        errors = [abs(row.error) for row in rows if row.phase == phase]
        if errors:
            lines.append(f"  {phase}: median {median(errors):.1%}, largest {max(errors):.1%}, of {len(errors)} runs")
    lines += [f"  {run}: BF16 takes {x:.2f} times as long, measured {y:.2f}" for run, x, y in ratios()]
    return lines


if __name__ == "__main__":
    print("\n".join(report()))
