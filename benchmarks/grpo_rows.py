"""What is kept of a whole GRPO run, in one row, and what docs/measured.md shows of such rows.

In: a run's folder, finished or not. Out: a row with its numbers and its curves; Markdown and a plot made of rows alone,
on any machine.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.record import Row
from benchmarks.whole_runs import engine_of
from megatron_fp8rl.observe.metrics import PHASES
from megatron_fp8rl.report.run_data import RunData

KEYS = ("config", "layout", "precision", "seed", "warm_start")
_WARM_STEPS = 2  # at the start: kernels compile and allocators grow
_ENDS = 5  # steps that count as a run's start and end
NOTES = (
    "Same problems and seeds within a configuration, and the same weights to start from where the letter of the warm "
    "start is the same; s/step is the sum of its phases' medians, without evaluations and checkpoints. colocated: one GPU "
    "for both ends; sleep: the same, taking turns in memory; separate: 2 GPUs for the trainer, 2 for one engine. Steps: "
    "those that a run has finished, of those that were wanted. KV tokens: the context that the engine's cache holds, from "
    "its log; how much memory it may take differs between the layouts. Largest: of any token of any step. fp8_invariant: "
    "a batch-invariant engine, whose attention and linears the trainer's forward pass has too. Where no compiled kernels "
    "were kept, an FP8 engine waits for DeepGEMM's in most of its first ten steps, which medians of 15 steps contain; the "
    "fastest rollouts are those of a step without.\n\n![Reward and mismatch of all runs](../grpo_h200.png)"
)
_EQUAL = 1e-8  # nats; below float32's rounding of a log-probability
_CURVES = {
    "reward": "reward/score/mean",
    "abs_logprob_diff": "mismatch/abs_logprob_diff/mean",
    "abs_logprob_diff_max": "mismatch/abs_logprob_diff/max",
    "length": "rollout/length/mean",
    "step_s": "time/step/s",
}


def median(run: RunData, key: str) -> float | None:
    """Over the steps behind the first ones; None where the run has no such number."""
    values = [value for step, value in zip(*run.series(key), strict=True) if step > _WARM_STEPS]
    return statistics.median(values) if values else None


def phase_seconds(run: RunData) -> dict[str, float]:
    """Median seconds of each phase of a step, in the order of the loop."""
    found = {phase: median(run, f"time/{phase}/s") for phase in PHASES}
    # What happens every few steps only is no part of the usual one.
    return {phase: seconds for phase, seconds in found.items() if seconds and phase not in ("checkpoint", "evaluate")}


def numbers(run: RunData) -> Row:
    """The numbers of one run, and its curves."""
    rewards = run.values("reward/score/mean")
    engine = engine_of(run)
    phases = phase_seconds(run)
    return {
        "steps": len(rewards),
        "is_done": run.is_done,
        "reward_start": statistics.fmean(rewards[:_ENDS]) if rewards else None,
        "reward_end": statistics.fmean(rewards[-_ENDS:]) if rewards else None,
        "held_out_start": run.first("eval/pass_rate/mean"),
        "held_out_end": run.last("eval/pass_rate/mean") if len(run.values("eval/pass_rate/mean")) > 1 else None,
        "abs_logprob_diff": run.mean("mismatch/abs_logprob_diff/mean"),
        "abs_logprob_diff_max": max(run.values("mismatch/abs_logprob_diff/max"), default=None),
        "kl_k3": run.mean("mismatch/kl_k3/mean"),
        "step_s": sum(phases.values()),
        "phases_s": phases,
        "rollout_tokens_per_s": median(run, "rollout/tokens_per_s/mean"),
        "train_tokens_per_s": median(run, "train/tokens_per_s/mean"),
        "publish_pause_s": median(run, "publish/pause/s"),
        "kv_tokens": engine.get("kv_tokens"),
        "kernels": engine.get("kernels", []),
        "curves": curves(run),
    }


def warm_start_name(folder: Path) -> str | None:
    """A name that no other training has: its record, which contains times, hashed. None without one."""
    record_of_steps = folder / "metrics.jsonl"
    if not record_of_steps.exists():
        return None
    return hashlib.sha256(record_of_steps.read_bytes()).hexdigest()[:12]


def warm_starts(rows: Sequence[Row]) -> list[str]:
    """A letter for each row: those of one configuration with the same letter started from the same weights."""
    names: dict[str, list[str | None]] = {}
    for row in rows:
        of_config = names.setdefault(row["config"], [])
        if row.get("warm_start") not in of_config:
            of_config.append(row.get("warm_start"))
    return [string.ascii_uppercase[names[row["config"]].index(row.get("warm_start")) % 26] for row in rows]


def curves(run: RunData) -> dict[str, Any]:
    """By step: what was learned, how far the ends disagree, seconds of phases; None where a step has no number."""
    steps = [record for record in run.records if record["step"] > 0]
    found = {"step": [step["step"] for step in steps]}
    found |= {name: [_brief(step.get(key)) for step in steps] for name, key in _CURVES.items()}
    seconds = {phase: [_brief(step.get(f"time/{phase}/s")) for step in steps] for phase in PHASES}
    return found | {"phases_s": {phase: values for phase, values in seconds.items() if any(values)}}


def _brief(value: float | None) -> float | None:
    """Four digits, which no plot resolves."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def tables(rows: Sequence[Row]) -> str:
    """Markdown: what was learned and how fast, then the seconds of a step by phase."""
    learned, seconds = [], []
    for row, start in zip(rows, warm_starts(rows), strict=True):
        text = f"{row['config']}, {row['layout']}, {row['precision']}, seed {row['seed']}"
        head = {"run": row.get("run", "-"), "arm": text, "warm start": start}
        rewards, held_out = (
            f"{_shown(row[f'{name}_start'], '.3f')} to {_shown(row[f'{name}_end'], '.3f')}"
            for name in ("reward", "held_out")
        )
        learned.append(
            head
            | {
                "steps": f"{row['steps']}" + (f" of {row['num_steps']}" if row["steps"] < row["num_steps"] else ""),
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
        fastest = min(filter(None, row["curves"]["phases_s"].get("rollouts", ())), default=None)
        shown = {"fastest rollouts": _shown(fastest, ".3f")}
        seconds.append(head | {"s/step": f"{row['step_s']:.2f}"} | phases | shown)
    return record.table(learned) + "\n\nSeconds of a step by phase (medians):\n\n" + record.table(seconds)


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Reward and mismatch of all runs, a colour for each arm."""
    from megatron_fp8rl.report.style import CYCLE, finish, new_figure, styled

    starts = zip(rows, warm_starts(rows), strict=True)
    labels = [f"{row['config']} {row['layout']} {row['precision']}, start {start}" for row, start in starts]
    colors = {label: CYCLE[i % len(CYCLE)] for i, label in enumerate(dict.fromkeys(labels))}
    with styled():
        figure = new_figure(15.0, 5.0)
        reward, mismatch = figure.subplots(1, 2)
        mismatch.set_yscale("symlog", linthresh=_EQUAL)  # a log scale would hide steps without any difference
        for row, label in zip(rows, labels, strict=True):
            _curve(reward, row, "reward", {"color": colors[label], "label": label})
            _curve(mismatch, row, "abs_logprob_diff", {"color": colors[label], "label": label})
        finish(reward, "Reward")
        finish(mismatch, "Mean |old - rollout|", y=f"nats, log scale above {_EQUAL:.0e}", legend=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=110)


def _curve(axis: Any, row: Row, name: str, how: dict[str, Any]) -> None:
    """One line of a row over its steps, without those that have no number."""
    from megatron_fp8rl.report.style import curve

    points = [(s, v) for s, v in zip(row["curves"]["step"], row["curves"][name], strict=True) if v is not None]
    curve(axis, [step for step, _ in points], [value for _, value in points], **how)
