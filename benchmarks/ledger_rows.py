"""A run of the ledger as a row, and the table of rows. Steps after the first LEFT_OUT count."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.power import PowerMeter
from benchmarks.record import Row
from benchmarks.runner import device_name
from benchmarks.whole_runs import first_engine
from megatron_fp8rl.config import ModelConfig, RunConfig
from megatron_fp8rl.observe.metrics import PHASES, START_PHASES
from megatron_fp8rl.precision import parameters
from megatron_fp8rl.report.run_data import RunData

KEYS = ("run", "shape", "layers", "arm", "completion_tokens", "fields", "device", "round")
LEFT_OUT = 2  # first steps, in which kernels compile and allocators grow
# Dense BF16 FLOP/s from data sheets, by a part of the name that the driver reports.
_PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "B200": 2250e12, "A100": 312e12}


@dataclass(frozen=True)
class Job:
    name: str  # of the shape; "user" for a user's model
    arm: str
    cfg: RunConfig
    command: tuple[str, ...]


def flops(model: ModelConfig, lengths: Sequence[float]) -> float:
    """Operations of one forward pass over sequences of these lengths, without recomputation. Two for each weight and
    token, and causal attention, as in the appendix of the PaLM paper."""
    counted = parameters.count(model)
    inputs = 0 if model.tie_embeddings else counted.embedding // 2  # lookups are no operations
    of_weights = 2.0 * (counted.active - inputs) * sum(lengths)
    width = model.num_attention_heads * model.head_dim
    return of_weights + 2.0 * model.num_layers * width * sum(length**2 for length in lengths)


def row_of(job: Job, power: PowerMeter, last: int) -> Row | None:
    """The row of a run up to step ``last``; None if no step counts."""
    run = RunData(Path(job.cfg.run_dir))
    if not (steps := [step for step in run.records if LEFT_OUT < step["step"] <= last]):
        return None
    cfg = job.cfg
    colocated = cfg.engine.placement == "colocated"
    gpus = cfg.parallel.world_size + (0 if colocated else cfg.engine.num_replicas * cfg.engine.ranks)
    engine = first_engine(run)
    phases = {phase: spread([step.get(f"time/{phase}/s", 0.0) for step in steps]) for phase in PHASES}
    phases = {phase: seconds for phase, seconds in phases.items() if seconds[0]}
    sampled = _median(steps, "rollout/num_tokens/sum")
    prompt = _median(steps, "rollout/prompt_length/mean")
    length = prompt + _median(steps, "rollout/length/mean")
    count = _median(steps, "rollout/num_completions/sum")
    forward = flops(cfg.model, [length] * int(count))
    peak = next((value for word, value in _PEAK_FLOPS.items() if word in device_name()), None)
    update_s, step_s = phases["update"][0], spread([step["time/step/s"] for step in steps])
    per_gpu = 3 * forward / update_s / cfg.parallel.world_size
    first, second = ([step.get("time/update/s") for step in run.records if step["step"] == n] for n in (1, 2))
    return {
        "shape": job.name,
        "layers": cfg.model.num_layers,
        "arm": job.arm,
        "model": {name: getattr(cfg.model, name) for name in ("family", "hidden_size", "num_experts", "vocab_size")},
        "billions": parameters.count(cfg.model).total / 1e9,
        "gpus": gpus,
        "prompt_tokens": prompt,
        "completion_tokens": cfg.sampling.max_completion_tokens,
        "sequences": count,
        "sampled_tokens": sampled,
        "sampled_tokens_per_s": _median_or_none(steps, "rollout/tokens_per_s/mean"),
        "acceptance": _median_or_none(steps, "speculation/acceptance/mean"),  # None: no drafts
        "tokens_per_engine_step": _median_or_none(steps, "speculation/tokens_per_step/mean"),
        "step_s": step_s,
        "phases_s": phases,
        "steps": len(steps),
        "tokens_per_s_gpu": sampled / step_s[0] / max(gpus, 1),
        "update_tflops_gpu": per_gpu / 1e12,
        "mfu_bf16": per_gpu / peak if peak else None,  # share of the dense BF16 rate; the FP8 rate is twice that
        "power": power.between(LEFT_OUT, steps[-1]["step"]),
        "memory_gib": {
            f"{phase}_{kind}": max(step.get(f"memory/{phase}_{kind}/max", 0.0) for step in steps) / 2**30
            for phase, kind in (("train", "allocated"), ("train", "device"), ("rollout", "device"))
        },
        "start_s": _start(run),
        "first_update_s": first_update(run),
        "slowest_update_s": max(step.get("time/update/s") or 0.0 for step in run.records if 1 < step["step"] <= last),
        "compile_s": {  # summed over processes
            "to_step_0": _seconds(run, "compile", 0, 0),
            "after_step_0": _seconds(run, "compile", 1, last),
        },
        "first_updates_s": [*first, *second],
        "mismatch": {
            "mean": run.mean("mismatch/abs_logprob_diff/mean"),
            "max": max(run.values("mismatch/abs_logprob_diff/max"), default=None),
        },
        "publish_s": _median(steps, "publish/total/s"),
        "proven_tensors": _median(steps, "publish/num_tensors/sum"),
        "kv_tokens": engine.get("kv_tokens"),
        "kernels": engine.get("kernels", []),
        "layout": {
            "trainer": {name: value for name, value in vars(cfg.parallel).items() if value not in (1, False, None)},
            "placement": cfg.engine.placement,
            "sleep": cfg.engine.sleep_level,
            "offload": cfg.optim.offload,
            "recompute": cfg.optim.recompute,
            "microbatch": cfg.optim.max_tokens_per_microbatch,
        },
    }


def spread(values: Sequence[float]) -> list[float]:
    """[median, smallest, largest]."""
    return [round(value, 4) for value in (statistics.median(values), min(values), max(values))]


def _median(steps: Sequence[Row], key: str) -> float:
    return statistics.median(step[key] for step in steps if step.get(key) is not None)


def _median_or_none(steps: Sequence[Row], key: str) -> float | None:
    known = [step[key] for step in steps if step.get(key) is not None]
    return statistics.median(known) if known else None


def _start(run: RunData) -> dict[str, float]:
    """Seconds from the command to the record of step 0, by part."""
    zero: dict[str, Any] = next((step for step in run.records if step["step"] == 0), {})
    parts = {phase: zero.get(f"time/{phase}/s") for phase in START_PHASES}
    return {phase.removeprefix("start_"): round(seconds, 2) for phase, seconds in parts.items() if seconds}


def first_update(run: RunData) -> dict[str, float]:
    """Seconds from the command to the first trained token, by phase; empty if the run has not measured them."""
    total = _seconds(run, "first_update", 0, 1)
    if not total:
        return {}
    phases = {
        "imports": _seconds(run, "start_command", 0, 0) + _seconds(run, "start_imports", 0, 0),
        "weights": _seconds(run, "start_model", 0, 0),
        "engines": _seconds(run, "start_engines", 0, 0),
        "rollouts": _seconds(run, "rollouts", 1, 1),
        "update": _seconds(run, "update", 1, 1),
    }
    rounded = {phase: round(seconds, 2) for phase, seconds in phases.items()}
    return {"total": round(total, 2), **rounded, "other": round(total - sum(phases.values()), 2)}


def _seconds(run: RunData, span: str, first: int, last: int) -> float:
    """The sum of a span over the steps ``first`` to ``last``."""
    return sum(step.get(f"time/{span}/s") or 0.0 for step in run.records if first <= step["step"] <= last)


def table(rows: Sequence[Row]) -> str:
    """Markdown: a line for each arm of each run. Ratios compare with the fastest BF16 arm of the same run."""
    lines = []
    for (run, shape, layers, length), arms in _by_arm(rows).items():
        step_s = {arm: statistics.median(row["step_s"][0] for row in repeats) for arm, repeats in arms.items()}
        base_s = min((seconds for arm, seconds in step_s.items() if arm[0] == "bf16"), default=None)
        with_drafts = any(row.get("acceptance") is not None for repeats in arms.values() for row in repeats)
        with_starts = all(row.get("first_update_s") for repeats in arms.values() for row in repeats)
        for arm, repeats in arms.items():
            first, step = repeats[0], step_s[arm]
            drafts = {}
            if with_drafts:
                drafts = {
                    "sampled tokens/s": _rounded([row["sampled_tokens_per_s"] for row in repeats]),
                    "accepted drafts": _percent([row["acceptance"] for row in repeats]),
                }
            starts = {}
            if with_starts:
                starts = {
                    "to first update": _rounded([row["first_update_s"].get("total") for row in repeats]),
                    "slowest update": round(max(row["slowest_update_s"] for row in repeats), 2),
                    "compiling after step 0": _rounded([row["compile_s"]["after_step_0"] for row in repeats]),
                }
            seconds = {
                phase: statistics.median(row["phases_s"].get(phase, [0.0])[0] for row in repeats)
                for phase in ("rollouts", "old_logprobs", "update", "publish", "colocated")
            }
            lows, highs = [row["step_s"][1] for row in repeats], [row["step_s"][2] for row in repeats]
            lines.append(
                {
                    "run": run,
                    "shape": f"{shape}, {layers} layers, {first['billions']:.1f} B, {first['gpus']} GPUs, "
                    f"{first['sequences']:.0f} x {length:,}",
                    "arm": " ".join(arm),
                    **{phase.replace("_", " "): round(value, 2) for phase, value in seconds.items()},
                    "step": round(step, 2),
                    "range": f"{min(lows):.2f} to {max(highs):.2f}",
                    "bf16 : arm": round(base_s / step, 2) if base_s and arm[0] != "bf16" else None,
                    "tokens/s/GPU": round(statistics.median(row["tokens_per_s_gpu"] for row in repeats)),
                    "update, share of dense BF16 rate": _percent([row["mfu_bf16"] for row in repeats]),
                    "W": _rounded([row["power"].get("watts") for row in repeats]),
                    "GiB": _rounded([row["power"].get("gib") for row in repeats]),
                    "start to step 0": round(statistics.median(sum(row["start_s"].values()) for row in repeats)),
                    "mean d": record.nats(first["mismatch"]["mean"]),
                    **starts,
                    **drafts,
                }
            )
    return record.table(lines)


def history(rows: Sequence[Row], shape: str, layers: int, reasons: Mapping[str, str]) -> str:
    """Markdown: a line for each run of a shape with BF16, in the order of ``rows``; ratios are of median steps."""
    lines = []
    for (run, *key), arms in _by_arm(rows).items():
        step_s = {arm[0]: statistics.median(row["step_s"][0] for row in repeats) for arm, repeats in arms.items()}
        if key != [shape, layers, 1024] or "bf16" not in step_s:
            continue
        stamp = next(iter(arms.values()))[0]["stamp"]
        line = {"run": run, "date": stamp["date"], "commit": stamp["commit"], "bf16 s": step_s["bf16"]}
        for arm in ("fp8_kv", "exact_kv"):
            line |= {f"{arm} s": step_s.get(arm), f"bf16 : {arm}": _ratio(step_s["bf16"], step_s.get(arm))}
        lines.append(line | {"note": reasons.get(run)})
    return record.table(lines)


def _ratio(base_s: float, seconds: float | None) -> float | None:
    return round(base_s / seconds, 2) if seconds else None


def _by_arm(rows: Sequence[Row]) -> dict[tuple, dict[str, list[Row]]]:
    groups: dict[tuple, dict[str, list[Row]]] = {}
    for row in rows:
        key = row["run"], row["shape"], row["layers"], row["completion_tokens"]
        arm = row["arm"], *row.get("fields", ())
        groups.setdefault(key, {}).setdefault(arm, []).append(row)
    return groups


def _rounded(values: Sequence[float | None]) -> int | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known)) if known else None


def _percent(values: Sequence[float | None]) -> str | None:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.0%}" if known else None
