"""Sweeps: one job per combination of field values, and the table of their runs.

    python -m launch CONFIG --cluster NAME --over optim.lr 1e-6 3e-6 --over seed 1 2 [--job rl] [overrides]
    python -m launch.sweep FOLDER      print the table of the runs, and write it to FOLDER/sweep.md

``--over config A B`` sweeps over configurations; ``--job eval --over checkpoint A B`` sweeps over checkpoints.
A value with blanks is several arguments (``"mlp moe"``). Each run is a separate job in ``<run>_sweep/element-<i>``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.spec import ELEMENT, SWEEP, TRAINING_JOBS, escape_braces

JOBS = (*TRAINING_JOBS, "eval")
TABLE = "sweep.md"
_LAST = 10  # steps for the reward at the end of a run

Axes = tuple[tuple[str, tuple[str, ...]], ...]  # fields and their values
Label = tuple[tuple[str, str], ...]  # fields and values of one run, in the order of --over


def labels(axes: Axes) -> list[Label]:
    """Labels of all runs; the last axis changes fastest."""
    fields = [field for field, _ in axes]
    return [tuple(zip(fields, values, strict=True)) for values in itertools.product(*(values for _, values in axes))]


def overrides(label: Label, folder: str, index: int) -> list[str]:
    """The overrides of one run: its values and its folder."""
    args = [arg for field, value in label if field != "config" for arg in (f"--{field}", *shlex.split(value))]
    return [*args, "--output_dir", escape_braces(f"{folder}/{ELEMENT}{index}")]


def format_label(label: Label) -> str:
    """``optim.lr=1e-6 seed=2``."""
    return " ".join(f"{field}={value}" for field, value in label)


def note(folder: str | Path, axes: Axes) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    _write(Path(folder) / SWEEP, json.dumps({"labels": labels(axes)}, indent=2) + "\n")


def forget(folder: str | Path) -> None:
    """Remove the note of a sweep that queued nothing, and its folder if it is empty."""
    (Path(folder) / SWEEP).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it has files of earlier jobs
        Path(folder).rmdir()


def write_table(folder: str | Path) -> str:
    """Write the Markdown table of a sweep to its folder and return it. Raises FileNotFoundError without a sweep."""
    folder = Path(folder)
    record = folder / SWEEP
    if not record.exists():
        raise FileNotFoundError(f"{folder} contains no {SWEEP}, so it is not the folder of a sweep")
    runs = enumerate(json.loads(record.read_text())["labels"])
    rows = [{"run": f"{ELEMENT}{i}", **dict(label), **_row(folder / f"{ELEMENT}{i}")} for i, label in runs]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, ["---"] * len(columns), *([str(row.get(key, "")) for key in columns] for row in rows)]
    text = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines) + "\n"
    _write(folder / TABLE, text)
    return text


def _row(run_dir: Path) -> dict[str, str]:
    """The cells of one run: its state, and its numbers if any."""
    from megatron_fp8rl.observe.display import interval_text
    from megatron_fp8rl.report.run_data import RunData

    run = RunData(run_dir)
    cells = {"state": _state(run)}
    for evaluation in run.evaluations:
        accuracy, pass_at = evaluation["overall"]["accuracy"], evaluation["overall"]["pass_at"]
        cells["accuracy"] = "-" if accuracy is None else interval_text(accuracy)
        if (k := max(map(int, pass_at), default=1)) > 1:
            cells[f"pass@{k}"] = interval_text(pass_at[str(k)])
    numbers = {
        "held-out start": run.first("eval/pass_rate/mean"),
        "held-out end": run.last("eval/pass_rate/mean"),
        f"reward, last {_LAST}": run.mean("reward/score/mean", last=_LAST),
        "mean abs diff": run.mean("mismatch/abs_logprob_diff/mean"),
        "s/step": run.mean("time/step/s"),
    }
    if not run.records:
        numbers = {"expected pass rate": run.warm_start.last("sft/expected_pass_rate/mean")}
    return cells | {name: f"{value:.3g}" for name, value in numbers.items() if value is not None}


def _state(run: Any) -> str:
    """finished, failed with the error, the current step, begun, or not begun."""
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
    args = list(sys.argv[1:] if argv is None else argv)
    if len(args) != 1 or args[0].startswith("-"):
        print("usage: python -m launch.sweep FOLDER", file=sys.stderr)
        return 2
    try:
        print(write_table(args[0]), end="")
    except (ValueError, OSError) as error:
        print(f"launch.sweep: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
