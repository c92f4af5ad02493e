"""Compare the arithmetic of ``plan`` with the runs that were measured, phase by phase.

    python -m benchmarks.planner.against_runs

In: rows of benchmarks/results. Out: predicted and measured seconds, and the error. The rates of ``preflight/rates.toml`` are
fitted to some of these rows: for those, the error says how well a few numbers fit many, not how well they predict.
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
_OLDER = tuple("ABCDEFGH")  # runs of the ledger of which publications alone are of present code
# Beside another run, with updates in which GPUs waited for the host; and U, whose updates took longer for a reason not proven.
_STALLED = ("K", "L", "O", "U")


Row = dict[str, Any]


@dataclass(frozen=True)
class Compared:
    """One phase of one run."""

    run: str
    phase: str
    predicted: float
    measured: float
    bf16: str = ""  # the BF16 run of the same invocation, if there is one

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def rows(name: str) -> list[Row]:
    """The rows of one file of benchmarks/results."""
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


def of_ledger(row: Row, models: dict[tuple[str, int], ModelConfig]) -> tuple[RunConfig, Lengths] | None:
    """The configuration of a row of the ledger with engines of one GPU; None for a model that is not known here, and for an
    exact run, whose kernels are others."""
    model = models.get((row["model"]["family"], row["model"]["hidden_size"]))
    if model is None or row["arm"] == "exact":
        return None
    parallel, placement = ParallelConfig(**row["layout"]["trainer"]), row["layout"]["placement"]
    model = replace(model, num_layers=row["layers"])
    in_fp8, sequences = row["arm"] != "bf16", int(row["sequences"])
    mean = row["sampled_tokens"] / sequences
    precision = PrecisionConfig() if in_fp8 else PrecisionConfig(trainer="bf16", rollout="bf16")
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
def compared() -> tuple[Compared, ...]:
    """Every phase of every measured run that the arithmetic knows and that present code would repeat."""
    return tuple(_compared())


def models() -> dict[tuple[str, int], ModelConfig]:
    """The models of the ledger's shapes by family and width, at full depth."""
    shapes = (dense.qwen3_0_6b(), dense.qwen3_1_7b(), dense.qwen3_4b(), qwen3.qwen3_8b(), qwen3.qwen3_30b_a3b())
    return {(model.family, model.hidden_size): model for model in shapes}


def _compared() -> Iterator[Compared]:
    for row in rows("ledger"):
        known = of_ledger(row, models())
        if known is None:
            continue
        cfg, lengths = known
        gpu = gpu_in(row["device"])
        found: StepTime = step_time(
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
            if phase != "publish" or cfg.engine.placement == "separate":  # within a GPU weights do not travel
                yield Compared(name, phase, getattr(found, phase), median(row["phases_s"][phase]))
        if phases == _PHASES:
            yield Compared(name, "step", found.step, median(row["step_s"]), bf16)


def steps() -> list[Compared]:
    """Whole steps alone."""
    return [one for one in compared() if one.phase == "step"]


def ratios() -> list[tuple[str, float, float]]:
    """(run and arm, predicted, measured) of every step in BF16 against another arm of the same invocation."""
    found = {one.run: one for one in steps()}
    pairs = [(found[one.bf16], one) for one in found.values() if one.bf16 in found and one.bf16 != one.run]
    return [(one.run, bf16.predicted / one.predicted, bf16.measured / one.measured) for bf16, one in pairs]


def report() -> list[str]:
    """A table of all phases, the errors by phase, and the ratios of BF16 to other precisions."""
    found = compared()
    lines = ["this arithmetic against measured runs: predicted, measured, error"]
    for one in found:
        lines.append(f"  {one.run:<64} {one.phase:<13}{one.predicted:9.3f} s{one.measured:9.3f} s {one.error:+7.1%}")
    for phase in (*_PHASES, "step"):
        errors = [abs(one.error) for one in found if one.phase == phase]
        if errors:
            lines.append(
                f"  {phase}: {median(errors):.1%} in the median, {max(errors):.1%} at most, of {len(errors)} runs"
            )
    lines += [f"  {run}: BF16 takes {one:.2f} times as long, measured {two:.2f}" for run, one, two in ratios()]
    return lines


if __name__ == "__main__":
    print("\n".join(report()))
