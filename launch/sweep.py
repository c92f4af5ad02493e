"""A sweep: the same job once for each value of a field, or each combination of values; and the table of its runs.

    python -m launch CONFIG --cluster NAME --over optim.lr 1e-6 3e-6 --over seed 1 2 [--job rl] [overrides]
    python -m launch.sweep FOLDER      the table of the runs so far; also in FOLDER/sweep.md

``--over config A B`` sweeps over configurations, ``--over checkpoint A B`` with ``--job eval`` over checkpoints. A value
with blanks is several args (``"mlp moe"``). Runs are in ``<run>_sweep/element-<i>``, and each is a job of its own.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.spec import ELEMENT, SWEEP

JOBS = ("train", "rl", "sft", "eval")
TABLE = "sweep.md"
_LAST = 10  # steps that count as the end of a run

Axes = tuple[tuple[str, tuple[str, ...]], ...]  # fields and their values
Label = tuple[tuple[str, str], ...]  # fields and values that make a run, in the order of --over


def labels(axes: Axes) -> list[Label]:
    """Fields and values of every run; the last axis changes fastest."""
    fields = [field for field, _ in axes]
    return [tuple(zip(fields, values, strict=True)) for values in itertools.product(*(values for _, values in axes))]


def overrides(label: Label, folder: str, index: int) -> list[str]:
    """The overrides of one run: its values, and its own folder."""
    args = [word for field, value in label if field != "config" for word in (f"--{field}", *shlex.split(value))]
    run_dir = f"{folder}/{ELEMENT}{index}"
    return [*args, "--output_dir", run_dir.replace("{", "{{").replace("}", "}}")]


def format_label(label: Label) -> str:
    """``optim.lr=1e-6 seed=2``."""
    return " ".join(f"{field}={value}" for field, value in label)


def note(folder: str | Path, axes: Axes) -> None:
    """Write what the sweep is into its folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    _write(Path(folder) / SWEEP, json.dumps({"labels": labels(axes)}, indent=2) + "\n")


def write_table(folder: str | Path) -> str:
    """The table of a sweep's runs as they are now, in Markdown; also left in its folder.

    Raises FileNotFoundError when the folder holds no sweep.
    """
    folder = Path(folder)
    record = folder / SWEEP
    if not record.exists():
        raise FileNotFoundError(f"{folder} holds no {SWEEP}: it is not the folder of a sweep")
    found = json.loads(record.read_text())["labels"]
    rows = [{"run": f"{ELEMENT}{i}", **dict(label), **_row(folder / f"{ELEMENT}{i}")} for i, label in enumerate(found)]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, ["---"] * len(columns), *([str(row.get(key, "")) for key in columns] for row in rows)]
    text = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines) + "\n"
    _write(folder / TABLE, text)
    return text


def _row(run_dir: Path) -> dict[str, str]:
    """What one run has come to: its state, and its numbers as far as there are any."""
    from megatron_fp8rl.observe.display import interval_text
    from megatron_fp8rl.report.run_data import RunData

    run = RunData(run_dir)
    found = {"state": _state(run)}
    for one in run.evaluations:
        for name, estimate in [("accuracy", one["overall"]["accuracy"]), *_largest(one["overall"]["pass_at"])]:
            found[name] = interval_text(estimate)
    numbers = {
        "held-out start": run.first("eval/pass_rate/mean"),
        "held-out end": run.last("eval/pass_rate/mean"),
        f"reward, last {_LAST}": run.mean("reward/score/mean", last=_LAST),
        "mean abs diff": run.mean("mismatch/abs_logprob_diff/mean"),
        "s/step": run.mean("time/step/s"),
    }
    if not run.records:
        numbers = {"expected pass rate": run.warm_start.last("sft/expected_pass_rate/mean")}
    return found | {name: f"{value:.3g}" for name, value in numbers.items() if value is not None}


def _largest(pass_at: dict[str, Any]) -> list[tuple[str, Any]]:
    k = max(map(int, pass_at))
    return [] if k == 1 else [(f"pass@{k}", pass_at[str(k)])]


def _state(run: Any) -> str:
    """finished, failed with the first words of why, the step that a run is at, or not begun."""
    errors = sorted(run.run_dir.glob("launch/*/first_error.txt"), key=lambda path: path.stat().st_mtime)
    if run.failure:
        return f"failed: {run.failure['error']}"
    if run.is_done or run.evaluations or (not run.records and run.warm_start.is_done):
        return "finished"
    if errors:
        return f"failed: see {ELEMENT}{errors[-1].relative_to(run.run_dir.parent).as_posix().removeprefix(ELEMENT)}"
    if run.records:
        return f"step {run.records[-1]['step']} of {run.config.get('num_steps', '?')}"
    return "begun" if run.run_dir.exists() else "not begun"


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: show the table of a sweep's folder."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m launch.sweep FOLDER", file=sys.stderr)
        return 2
    try:
        print(write_table(arguments[0]), end="")
    except (ValueError, OSError) as error:
        print(f"launch.sweep: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
