"""A sweep: one job for each value of a field, or each combination of values, as one array; and the table of its runs.

    python -m launch CONFIG --job sweep --cluster NAME --over optim.lr 1e-6 3e-6 --over seed 1 2 [--program rl]
        [--at_once 2] [overrides]
    python -m launch.sweep FOLDER      the table of the runs so far; also in FOLDER/sweep.md whenever one ends

``--over config A B`` sweeps over configurations, ``--over checkpoint A B`` with ``--program eval`` over checkpoints. A
value with blanks is several words (``"mlp moe"``). Runs are in ``<run>_sweep/element-<i>``, each with everything that a
run of its own has, so that ``status`` and ``logs`` work on them. Slurm starts this module in the place of the agent: it
picks its element of the array and is the agent of that.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from launch.jobs import Target
from launch.plan import Plan, Request, absolute_run_dir
from launch.spec import SAVED, JobSpec, add_job, read_jobs, spec_file
from megatron_fp8rl import cli

PROGRAMS = ("train", "rl", "sft", "eval")
ELEMENT, TABLE, RECORD = "element-", "sweep.md", "sweep.json"
_LAST = 10  # steps that count as the end of a run

Label = tuple[tuple[str, str], ...]  # fields and values that make an element, in the order of --over


@dataclass(frozen=True, kw_only=True)
class JobArray(JobSpec):
    """Jobs of one shape. Its own fields are those that all have, its folder is the sweep's."""

    agent_module: ClassVar[str] = "launch.sweep"
    local_module: ClassVar[str] = "launch.sweep"
    elements: tuple[JobSpec, ...]
    labels: tuple[Label, ...]  # of each element

    @property
    def launch_dir_in_shell(self) -> str:
        return f'{shlex.quote(f"{self.run_dir}/{ELEMENT}")}"$SLURM_ARRAY_TASK_ID"/launch'

    def element(self, index: int) -> JobSpec:
        """The job of an element, with what the launcher added to all of them."""
        element = self.elements[index]
        return dataclasses.replace(element, env={**element.env, **self.env})

    @classmethod
    def of(cls, values: dict[str, Any]) -> JobArray:
        """The array of a decoded dictionary."""
        whole = JobSpec.of(values)
        elements = tuple(JobSpec.of(element) for element in values["elements"])
        shared = {field.name: getattr(whole, field.name) for field in dataclasses.fields(JobSpec)}
        labels = tuple(tuple((field, value) for field, value in label) for label in values["labels"])
        return cls(**shared, elements=elements, labels=labels)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What the words of a sweep say."""

    axes: tuple[tuple[str, tuple[str, ...]], ...]  # field -> values
    program: str
    at_once: int | None
    rest: tuple[str, ...]  # words of the program itself

    def labels(self) -> list[Label]:
        """Fields and values of every element; the last axis changes fastest."""
        fields = [field for field, _ in self.axes]
        return [tuple(zip(fields, values, strict=True)) for values in itertools.product(*(v for _, v in self.axes))]


def read(target: str, words: Sequence[str]) -> Target:
    """Understand the words behind CONFIG, every element's too. Raises as :func:`launch.jobs.read` does."""
    from launch import jobs

    found = parse(words)
    for label in found.labels():
        _element_target(target, found, label)
    first = jobs.read(found.program, dict(found.labels()[0]).get("config", target), found.rest)
    return Target(cfg=first.cfg, overrides=(), words=tuple(words))


def parse(words: Sequence[str]) -> Sweep:
    """Separate the sweep's own options. Raises cli.UsageError."""
    axes: dict[str, tuple[str, ...]] = {}
    single: dict[str, str] = {}
    rest: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        option = word.lstrip("-").replace("-", "_")
        if option not in ("over", "program", "at_once") or not word.startswith("--"):
            rest.append(word)
            continue
        values = []
        while queue and not queue[0].startswith("--"):
            values.append(queue.pop(0))
        if option == "over":
            if len(values) < 2:
                raise cli.UsageError(f"--over {' '.join(values)}: name a field and its values: --over optim.lr 1e-6 3e-6")
            if values[0] in axes:
                raise cli.UsageError(f"--over {values[0]} occurs twice; give all its values at once")
            axes[values[0].lstrip("-")] = tuple(dict.fromkeys(values[1:]))
        elif len(values) != 1:
            raise cli.UsageError(f"--{option} takes one value, not {len(values)}")
        else:
            single[option] = values[0]
    if not axes:
        raise cli.UsageError("a sweep needs --over FIELD VALUE VALUE ..., once or several times")
    program, at_once = single.get("program", "train"), single.get("at_once")
    if program not in PROGRAMS:
        raise cli.UsageError(f"--program {program!r} cannot be swept. Choose one of {', '.join(PROGRAMS)}")
    if at_once is not None and (not at_once.isdigit() or at_once == "0"):
        raise cli.UsageError(f"--at_once {at_once!r} is no number of jobs; write 1 or more")
    return Sweep(
        axes=tuple(axes.items()),
        program=program,
        at_once=None if at_once is None else int(at_once),
        rest=tuple(rest),
    )


def plan_sweep(request: Request) -> Plan:
    """The array, or every reason of every element, each said once with the elements that have it."""
    from launch import jobs

    assert request.cfg is not None
    sweep = parse(request.words)
    folder = f"{absolute_run_dir(request.cfg, request.cluster).rstrip('/')}_sweep"
    labels = sweep.labels()
    specs: list[JobSpec] = []
    problems: dict[str, list[int]] = {}
    warnings: dict[str, list[int]] = {}
    for index, label in enumerate(labels):
        target = _element_target(request.config_name, sweep, label)
        run_dir = f"{folder}/{ELEMENT}{index}"
        cfg = dataclasses.replace(target.cfg, output_dir=run_dir.replace("{", "{{").replace("}", "}}"))
        element = dataclasses.replace(
            request,
            job=sweep.program,
            config_name=dict(label).get("config", request.config_name),
            cfg=cfg,
            overrides=target.overrides,
            words=target.words,
        )
        planned = jobs.plan(element)
        specs += [] if planned.spec is None else [planned.spec]
        for said, found in ((problems, planned.problems), (warnings, planned.warnings)):
            for text in found:
                said.setdefault(text.replace(run_dir, f"{folder}/{ELEMENT}*"), []).append(index)
    sizes = {spec.nodes for spec in specs}
    if len(sizes) > 1:
        problems["the elements of an array have to take the same number of nodes, and these take "
                 + ", ".join(f"{n} ({_where([i for i, s in enumerate(specs) if s.nodes == n], labels)})" for n in sorted(sizes))
                 + ". Use --nodes, or one sweep for each."] = list(range(len(labels)))  # fmt: skip
    if problems:
        return Plan(spec=None, problems=_said(problems, labels), warnings=_said(warnings, labels))
    shared = {field.name: getattr(specs[0], field.name) for field in dataclasses.fields(JobSpec)}
    array = JobArray(
        **{**shared, "name": f"{request.cfg.name}_sweep", "run_dir": folder}, elements=tuple(specs), labels=tuple(labels)
    )
    limit = "" if sweep.at_once is None else f"%{sweep.at_once}"
    return Plan(spec=array, warnings=_said(warnings, labels), array=f"0-{len(specs) - 1}{limit}")


def run(array: JobArray, environment: Mapping[str, str] = os.environ) -> int:
    """Be the agent of one element on this node. The first node keeps the sweep's table."""
    from launch.agent import Agent
    from launch.peers import Place

    index = int(environment["SLURM_ARRAY_TASK_ID"])
    place = Place.from_environment(environment)
    if place.node:
        return Agent(array.element(index), place).run()
    _begin(array, index, place.job)
    try:
        return Agent(array.element(index), place).run()
    finally:
        _keep_table(array)


def run_here(array: JobArray) -> int:
    """All elements on this machine, one after another; one that was asked to end is the last. The first failure's status."""
    from launch.local import supervise
    from launch.outcome import CANCELLED

    failed = 0
    for index in range(len(array.elements)):
        _begin(array, index, f"local-{os.getpid()}")
        status = supervise(array.element(index), read_jobs(array.element(index).run_dir)[-1]["spec"])
        _keep_table(array)
        failed = failed or status
        if status in (CANCELLED, SAVED):
            break
    return failed


def _begin(array: JobArray, index: int, job: str) -> None:
    """Note what the sweep is, and in the element's folder which job it is."""
    folder, element = Path(array.run_dir), array.element(index)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / RECORD, json.dumps({"labels": array.labels, "name": array.name}, indent=2) + "\n")
    if all(known["job_id"] != job for known in read_jobs(element.run_dir)):
        sweep = next(iter(reversed(read_jobs(array.run_dir))), {})
        own = {"job_id": job, "name": element.name, "nodes": element.nodes, "array": None}
        own["spec"] = element.save(spec_file(element.run_dir, job))
        add_job(element.run_dir, {"cluster": "", "kind": "slurm", "submitted_at": time.time(), **sweep, **own})


def _keep_table(array: JobArray) -> None:
    try:
        write_table(array.run_dir)
    except Exception as error:  # the runs matter more than their table
        print(f"launch.sweep: no table of {array.run_dir}: {type(error).__name__}: {error}", flush=True)


def write_table(folder: str | Path) -> str:
    """The table of a sweep's runs as they are now, in Markdown; also left in its folder.

    Raises FileNotFoundError when the folder holds no sweep, or none of which an element has begun.
    """
    folder = Path(folder)
    record = folder / RECORD
    if not record.exists():
        raise FileNotFoundError(f"{folder} holds no {RECORD}: no element of a sweep has begun there")
    labels = json.loads(record.read_text())["labels"]
    rows = [{"run": f"{ELEMENT}{i}", **dict(label), **_row(folder / f"{ELEMENT}{i}")} for i, label in enumerate(labels)]
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


@lru_cache(maxsize=4096)  # the words are read to be refused at once, and again for the plan
def _element_target(target: str, sweep: Sweep, label: Label) -> Target:
    from launch import jobs

    words = [*sweep.rest]
    for field, value in label:
        words += [] if field == "config" else [f"--{field}", *shlex.split(value)]
    return jobs.read(sweep.program, dict(label).get("config", target), words)


def _said(found: Mapping[str, list[int]], labels: Sequence[Label]) -> tuple[str, ...]:
    return tuple(
        text if len(where) == len(labels) else f"{_where(where, labels)}: {text}" for text, where in found.items()
    )


def _where(indices: Sequence[int], labels: Sequence[Label]) -> str:
    shown = "; ".join(" ".join(f"{field}={value}" for field, value in labels[i]) for i in indices[:3])
    return f"elements {', '.join(map(str, indices))} ({shown}{'; ...' if len(indices) > 3 else ''})"


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: the file of an array under Slurm, or the folder of a sweep."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m launch.sweep FOLDER", file=sys.stderr)
        return 2
    try:
        if os.path.isdir(arguments[0]):
            print(write_table(arguments[0]), end="")
            return 0
        array = JobArray.load(arguments[0])
    except (ValueError, OSError) as error:
        print(f"launch.sweep: {error}", file=sys.stderr)
        return 2
    return run(array) if "SLURM_ARRAY_TASK_ID" in os.environ else run_here(array)


if __name__ == "__main__":
    sys.exit(main())
