"""Compares runs: the arms of a study, each over several seeds."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from matplotlib.axes import Axes

from megatron_fp8rl.algo.pass_at_k import difference
from megatron_fp8rl.observe.display import interval_text
from megatron_fp8rl.observe.records import write_json, write_text
from megatron_fp8rl.report.run_data import RunData
from megatron_fp8rl.report.style import CYCLE, finish, moving_average, new_figure, save_png, styled

Runs = dict[str, dict[int, RunData]]  # by arm, then by seed
_LAST = 10  # final steps averaged for the end of a run

# (column, key, how to reduce the run, format)
_COLUMNS = (
    ("held-out start", "eval/pass_rate/mean", "first", "{:.3f}"),
    ("held-out end", "eval/pass_rate/mean", "last", "{:.3f}"),
    (f"reward, last {_LAST}", "reward/score/mean", "end", "{:.3f}"),
    ("mean abs diff", "mismatch/abs_logprob_diff/mean", "mean", "{:.2e}"),
    ("max abs diff", "mismatch/abs_logprob_diff/max", "max", "{:.2e}"),
    ("KL k3", "mismatch/kl_k3/mean", "mean", "{:.2e}"),
    ("ESS", "mismatch/effective_sample_size/mean", "mean", "{:.4f}"),
    ("corrected", "mismatch/fraction_corrected/mean", "mean", "{:.2e}"),
    ("s/step", "time/step/s", "mean", "{:.2f}"),
)


def compare_runs(
    runs: Sequence[tuple[str, int, Path | str]], out_dir: Path | str, evaluated: Path | str | None = None
) -> Path:
    """Write ``study.md``, ``study.png`` and ``study.json`` of (arm, seed, folder) runs; return the path of study.md.

    ``evaluated``: the folder of a run that evaluated the final weights of all of them. Raises FileNotFoundError for a
    missing run.
    """
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    arms: Runs = {}
    for arm, seed, run_dir in runs:
        if not (Path(run_dir) / "metrics.jsonl").exists():
            raise FileNotFoundError(f"{arm}, seed {seed}: {run_dir} has no metrics.jsonl; run it first")
        arms.setdefault(arm, {})[seed] = RunData(Path(run_dir))
    summary = {
        arm: {name: _over_seeds(by_seed, key, how) for name, key, how, _ in _COLUMNS} for arm, by_seed in arms.items()
    }
    if evaluated is not None:
        for arm, estimates in _paired(arms, RunData(Path(evaluated))).items():
            summary[arm] |= estimates
    write_json(out_dir / "study.json", summary)
    with styled():
        save_png(_draw(arms), out_dir / "study.png")
    write_text(out_dir / "study.md", _markdown(arms, summary))
    return out_dir / "study.md"


def _reduce(run: RunData, key: str, how: str) -> float | None:
    values = run.values(key)
    if not values or how in ("first", "last"):
        return values[0 if how == "first" else -1] if values else None
    return max(values) if how == "max" else statistics.fmean(values[-_LAST:] if how == "end" else values)


def _over_seeds(by_seed: dict[int, RunData], key: str, how: str) -> dict[str, float | int] | None:
    values = [value for run in by_seed.values() if (value := _reduce(run, key, how)) is not None]
    if not values:
        return None
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "std": spread, "num_seeds": len(values)}


def _markdown(arms: Runs, summary: dict) -> str:
    names = [name for name, *_ in _COLUMNS]
    lines = [
        "# Precision study",
        "",
        "Arms are rollout precision/training precision. Mean ± standard deviation over seeds; mismatch over all steps.",
        "",
        f"| arm | seeds | {' | '.join(names)} |",
        f"|---|---|{'---|' * len(names)}",
    ]
    for arm, row in summary.items():
        cells = []
        for name, _, _, form in _COLUMNS:
            cell = row[name]
            values = [cell["mean"], cell["std"]][: 1 + (cell["num_seeds"] > 1)] if cell else []
            cells.append(" ± ".join(form.format(value) if value else "0" for value in values) or "–")
        lines.append(f"| {arm} | {len(arms[arm])} | {' | '.join(cells)} |")
    if any("difference" in row for row in summary.values()):
        lines += ["", *_evaluation_table(summary)]
    failed = [
        f"- {arm}, seed {seed}: {run.failure['error']} in step {run.failure['step']}: {run.failure['message']}"
        for arm, by_seed in arms.items()
        for seed, run in by_seed.items()
        if run.failure
    ]
    if failed:
        lines += ["", "Runs that failed, counted up to their failure:", "", *failed]
    lines += ["", "![reward and mismatch of all arms](study.png)", ""]
    return "\n".join(lines)


def _paired(arms: Runs, evaluated: RunData) -> dict[str, dict[str, dict[str, float]]]:
    """By arm: held-out accuracy of the final weights, and its difference from the first arm, question by question."""
    folders = {arm: [(run.run_dir / "hf").absolute() for run in runs.values()] for arm, runs in arms.items()}
    rates = {arm: [evaluated.pass_rates.get(folder, {}) for folder in by_seed] for arm, by_seed in folders.items()}
    problems = sorted(set.intersection(*(set(rows) for by_seed in rates.values() for rows in by_seed)))
    if not problems:
        return {}
    return against_first(
        {arm: [[rows[problem] for problem in problems] for rows in runs] for arm, runs in rates.items()}
    )


def against_first(tables: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """By arm: the mean of its rates [seeds, problems], and the difference from the first arm, problem by problem; both
    as {"value", "low", "high"}."""
    first = next(iter(tables.values()))
    zero = [[0.0] * len(first[0])]
    return {
        arm: {"accuracy": asdict(difference(zero, table)), "difference": asdict(difference(first, table))}
        for arm, table in tables.items()
    }


def _evaluation_table(summary: dict) -> list[str]:
    first = next(iter(summary))
    return [
        "Accuracy of the final weights on the same held-out problems, in BF16. 95 % intervals draw seeds and problems.",
        "",
        f"| arm | accuracy | difference from {first} |",
        "|---|---|---|",
        *(
            f"| {arm} | {interval_text(row['accuracy'])} | {'' if arm == first else interval_text(row['difference'])} |"
            for arm, row in summary.items()
        ),
    ]


# (key, title, width of the moving average) of the curves of a study's plot
_CURVES = (
    ("reward/score/mean", "Reward (5-step average)", 5),
    ("eval/pass_rate/mean", "Held-out pass rate", 1),
    ("mismatch/abs_logprob_diff/mean", "Mismatch: mean |old − rollout|, nats", 1),
    ("mismatch/kl_k3/mean", "KL (k3) of trainer and engine, nats", 1),
    ("mismatch/effective_sample_size/mean", "Effective sample size, fraction of tokens", 1),
    ("mismatch/fraction_corrected/mean", "Fraction of tokens whose weight was capped or dropped", 1),
    ("loss/entropy/mean", "Entropy, nats", 1),
    ("rollout/length/mean", "Completion length, tokens", 1),
)


def _draw(arms: Runs):
    """Curves: mean over seeds, with a band from lowest to highest. Below: each seed at the end, and their mean."""
    figure = new_figure(15.0, 20.0)
    axes = figure.subplots(5, 2).flatten()
    colors = _colors(arms)
    for panel, (key, title, smooth) in zip(axes, _CURVES, strict=False):
        values = [value for by_seed in arms.values() for run in by_seed.values() for value in run.values(key)]
        if key.startswith("mismatch/") and min(values, default=0) > 0 and max(values) > 10 * min(values):
            panel.set_yscale("log")
        for arm, by_seed in arms.items():
            _band(panel, by_seed, key, colors[arm], arm, "--" if arm.endswith("uncorrected") else "-", smooth=smooth)
        finish(panel, title, legend=False)
    axes[0].legend(loc="best")
    _dots(axes[8], arms, "eval/pass_rate/mean", "last")
    finish(axes[8], "Held-out pass rate at the end: each seed, and their mean", x="pass rate", legend=False)
    _dots(axes[9], arms, "mismatch/kl_k3/mean", "mean")
    finish(axes[9], "KL (k3), mean over steps: each seed, and their mean", x="nats", legend=False)
    return figure


def _colors(arms: Runs) -> dict[str, str]:
    """A color for each precision, which is the first word of an arm's name."""
    precisions = dict.fromkeys(arm.partition(" ")[0] for arm in arms)
    by_precision = dict(zip(precisions, CYCLE * len(precisions), strict=False))
    return {arm: by_precision[arm.partition(" ")[0]] for arm in arms}


def _band(
    axes: Axes, by_seed: dict[int, RunData], key: str, color: str, label: str, line: str, smooth: int = 1
) -> None:
    by_step: dict[int, list[float]] = {}
    for run in by_seed.values():
        steps, values = run.series(key)
        for step, value in zip(steps, moving_average(values, smooth), strict=True):
            by_step.setdefault(step, []).append(value)
    steps = sorted(by_step)
    if not steps:
        return
    axes.plot(steps, [statistics.fmean(by_step[s]) for s in steps], color=color, label=label, linestyle=line)
    if len(by_seed) > 1:
        low, high = [min(by_step[s]) for s in steps], [max(by_step[s]) for s in steps]
        axes.fill_between(steps, low, high, color=color, alpha=0.12, linewidth=0)


def _dots(axes: Axes, arms: Runs, key: str, how: str) -> None:
    """Draw one row per arm: a dot per seed and a bar at the mean."""
    colors = _colors(arms)
    for row, (arm, by_seed) in enumerate(arms.items()):
        color = colors[arm]
        values = [value for run in by_seed.values() if (value := _reduce(run, key, how)) is not None]
        if values:
            axes.plot(values, [row] * len(values), "o", color=color, alpha=0.5, markersize=7, markeredgewidth=0)
            axes.plot([statistics.fmean(values)], [row], "|", color=color, markersize=22, markeredgewidth=2.5)
    axes.set_yticks(range(len(arms)), list(arms))
    axes.set_ylim(-0.5, len(arms) - 0.5)
    axes.invert_yaxis()
