"""The study of docs/accuracy.md: a row for each run and the evaluation of its final weights, tables and a picture.

    python -m benchmarks.accuracy --runs FOLDER --evaluation FOLDER --commit HASH    add the runs of FOLDER/ARM_SEED
    python -m benchmarks.accuracy                                                    write tables and picture again

``--evaluation`` is the folder of the ``eval`` command that evaluated all ``FOLDER/ARM_SEED/hf``. A row has the curves
in means of STEPS steps, and the passed completions of each held-out problem, so that arms are compared by problem
whenever runs are added.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import record
from benchmarks.record import Row
from megatron_fp8rl.observe.display import interval_text
from megatron_fp8rl.report import style
from megatron_fp8rl.report.compare import against_first
from megatron_fp8rl.report.run_data import RunData

ROWS, PAGE = record.KEPT / "accuracy.jsonl", record.ROOT / "docs" / "accuracy.md"
PICTURE = PAGE.with_suffix(".png")
STEPS = 5  # in each point of a curve
COMPLETIONS = 4  # of a problem, in the evaluation
# Arm of the protocol -> (name, color)
ARMS = {
    "bf16": ("BF16", style.BLUE),
    "fp8_rollouts_off": ("FP8 rollouts, BF16 trainer, uncorrected", style.YELLOW),
    "fp8_rollouts": ("FP8 rollouts, BF16 trainer", style.ORANGE),
    "fp8": ("FP8", style.GREEN),
    "fp8_cal": ("FP8, measured bounds", style.PURPLE),
    "fp8_mask": ("FP8, sequence mask", style.SKY),
    "fp8_kv": ("FP8, FP8 cache", style.GREY),
    "exact": ("exact, BF16 cache", "#6B5B95"),
    "exact_kv": ("exact, FP8 cache", style.RED),
}
CURVES = {
    "reward": "reward/score/mean",
    "d": "mismatch/abs_logprob_diff/mean",
    "kl": "mismatch/kl_k3/mean",
    "ess": "mismatch/effective_sample_size/mean",
    "corrected": "mismatch/fraction_corrected/mean",
    "entropy": "loss/entropy/mean",
    "length": "rollout/length/mean",
}


def row_of(folder: Path, evaluation: RunData, commit: str) -> Row:
    """The row of the run in a folder named ARM_SEED. Raises KeyError if its final weights were not evaluated."""
    run, (arm, _, seed) = RunData(folder), folder.name.rpartition("_")
    versions = json.loads((folder / "versions.json").read_text(encoding="utf-8"))
    rates = evaluation.pass_rates[(folder / "hf").absolute()]
    started = datetime.datetime.fromtimestamp(versions["started_unix_s"], datetime.UTC)
    held_out = run.series("eval/pass_rate/mean")
    curves = {name: run.series(key)[1] for name, key in CURVES.items()}
    return {
        "arm": arm,
        "seed": int(seed),
        "steps": len(curves["d"]),
        "held_out": dict(zip(map(str, held_out[0]), (round(value, 4) for value in held_out[1]), strict=True)),
        "max_d": max(run.series("mismatch/abs_logprob_diff/max")[1]),
        "curves": {name: _means(values) for name, values in curves.items()},
        "passed": "".join(str(round(rates[name] * COMPLETIONS)) for name in sorted(rates)),
        "stamp": {
            "date": started.date().isoformat(),
            "commit": commit,
            "gpu": versions["gpus"][0],
            "cores": versions["num_cpus"],
            "packages": versions["packages"],
        },
    }


def _means(values: Sequence[float]) -> list[float]:
    parts = (values[start : start + STEPS] for start in range(0, len(values) - STEPS + 1, STEPS))
    return [float(f"{statistics.fmean(part):.4g}") for part in parts]


def by_arm(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {arm: found for arm in ARMS if (found := [row for row in rows if row["arm"] == arm])}


def differences(arms: Mapping[str, Sequence[Row]]) -> dict[str, dict[str, dict[str, float]]]:
    """By arm: accuracy of the final weights, and its difference from the first arm, problem by problem."""
    return against_first(
        {arm: [[int(digit) / COMPLETIONS for digit in row["passed"]] for row in rows] for arm, rows in arms.items()}
    )


def section(rows: Sequence[Row]) -> str:
    """Markdown of all rows: a table of the arms, and the runs."""
    arms = by_arm(rows)
    estimates, lines = differences(arms), []
    for arm, runs in arms.items():

        def mean(name: str, runs: Sequence[Row] = runs) -> float:
            return statistics.fmean(value for row in runs for value in row["curves"][name])

        lines.append(
            {
                "arm": ARMS[arm][0],
                "seeds": ", ".join(str(row["seed"]) for row in runs),
                "accuracy": interval_text(estimates[arm]["accuracy"]),
                "minus BF16": "" if arm == next(iter(arms)) else interval_text(estimates[arm]["difference"]),
                "mean d": f"{mean('d'):.3f}",
                "largest d": f"{max(row['max_d'] for row in runs):.1f}",
                "KL (k3)": f"{mean('kl'):.4f}",
                "effective sample size": f"{mean('ess'):.3f}",
                "capped or dropped": f"{mean('corrected'):.2%}",
            }
        )
    stamps = sorted({(row["stamp"]["date"], row["stamp"]["commit"], row["stamp"]["gpu"]) for row in rows})
    measured = "; ".join(f"{date}, commit {commit}, {gpu}" for date, commit, gpu in stamps)
    return f"{record.table(lines)}\n\nMeasured: {measured}. 95 % intervals draw seeds and questions."


def draw(rows: Sequence[Row]) -> None:
    """Write the picture: held-out accuracy, rewards, mean d and KL by step; a band spans the seeds."""
    with style.styled():
        figure = style.new_figure(10.0, 6.4)
        axes = figure.subplots(2, 2).flatten()
        for arm, runs in by_arm(rows).items():
            name, color = ARMS[arm]
            held_out = [{int(step): value for step, value in row["held_out"].items()} for row in runs]
            steps = sorted(held_out[0])
            _band(axes[0], steps, [[run[step] for step in steps] for run in held_out], color, name)
            for panel, curve in zip(axes[1:], ("reward", "d", "kl"), strict=True):
                values = [row["curves"][curve] for row in runs]
                _band(panel, [STEPS * (i + 1) for i in range(len(values[0]))], values, color, name)
        style.finish(axes[0], "Accuracy on 512 held-out questions", legend=True)
        style.finish(axes[1], f"Reward, mean of {STEPS} steps", legend=False)
        style.finish(axes[2], "d: |log-probability of trainer - of engine|, nats", legend=False)
        style.finish(axes[3], "KL of trainer and engine (k3), nats", legend=False)
        style.save_png(figure, PICTURE)


def _band(axes, steps: Sequence[int], runs: Sequence[Sequence[float]], color: str, name: str) -> None:
    columns = list(zip(*runs, strict=True))
    axes.plot(steps, [statistics.fmean(column) for column in columns], color=color, label=name)
    axes.fill_between(steps, [min(c) for c in columns], [max(c) for c in columns], color=color, alpha=0.15, linewidth=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="folder with a folder ARM_SEED for each run")
    parser.add_argument("--evaluation", type=Path, help="folder of the eval command that evaluated their weights")
    parser.add_argument("--commit", help="of the code that ran")
    options = parser.parse_args()
    rows = {(row["arm"], row["seed"]): row for row in _rows()}
    if options.runs is not None:
        if options.evaluation is None or options.commit is None:
            parser.error("--runs needs --evaluation and --commit")
        evaluation = RunData(options.evaluation)
        for folder in sorted(path for path in options.runs.iterdir() if (path / "done.json").exists()):
            if folder.name.rpartition("_")[0] not in ARMS:
                parser.error(f"--runs: {folder.name} is not ARM_SEED of {', '.join(ARMS)}")
            row = row_of(folder, evaluation, options.commit)
            rows[row["arm"], row["seed"]] = row
        ROWS.write_text("".join(json.dumps(row) + "\n" for _, row in sorted(rows.items())), encoding="utf-8")
    record.replace("accuracy", section([*rows.values()]), PAGE)
    draw([*rows.values()])
    return 0


def _rows() -> list[Row]:
    return [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()] if ROWS.exists() else []


if __name__ == "__main__":
    raise SystemExit(main())
