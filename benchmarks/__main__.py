"""All that needs a GPU, tests and benchmarks, in the order of their worth: side by side, within a time, and resumable.

    python -m benchmarks --list
    python -m benchmarks --budget-s 560 --archive measured.tar.gz
    python -m benchmarks --only 'four_gpus.*' --budget-s 560

Jobs of one GPU each use all GPUs at once. What passed is not run again, what failed runs last, and what the time did
not suffice for goes on where it stopped: unpack the archive in the repository to go on with it on another machine.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from benchmarks.job_logs import Outcome
from benchmarks.job_runner import END_S, JobRunner, States
from benchmarks.jobs import JOBS, Job
from benchmarks.results import FOLDER

ROOT = Path(__file__).parents[1]
MAX_SUMMARY = 11_000  # characters: of a long output often the end alone is seen
_MAX_LOG_BYTES = 4 << 20  # a longer log is left out of an archive


def matching(jobs: Sequence[Job], patterns: Iterable[str]) -> set[str]:
    """Names that match. Raises ValueError for a pattern that matches none."""
    found: set[str] = set()
    for pattern in patterns:
        names = {job.name for job in jobs if fnmatchcase(job.name, pattern)}
        if not names:
            raise ValueError(f"no job is called {pattern!r}; names: {', '.join(job.name for job in jobs)}")
        found |= names
    return found


def queue(jobs: Sequence[Job], states: States, again: Sequence[str]) -> list[Job]:
    """What is to be run, in order: what has failed comes last, unless ``again`` names it or has the word "failed"."""
    failed = [job for job in jobs if states.status(job) == "failed"]
    patterns = [pattern for pattern in again if pattern != "failed"]
    anew = matching(jobs, patterns) | ({job.name for job in failed} if len(patterns) < len(again) else set())
    last = [job for job in failed if job.name not in anew]
    first = [job for job in jobs if job not in last and (job.name in anew or states.status(job) != "passed")]
    return first + last


def visible_gpus() -> tuple[list[str], str, float]:
    """(GPUs as CUDA_VISIBLE_DEVICES names them, their model, GiB of the smallest); none where nvidia-smi finds none."""
    query = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return [], "", 0.0
    found = [tuple(part.strip() for part in line.split(",")) for line in lines if line.count(",") == 3]
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        wanted = [name.strip() for name in given.split(",") if name.strip()]
        chosen = [gpu for name in wanted for gpu in found if name == gpu[0] or gpu[1].startswith(name)]
        found, names = chosen, wanted[: len(chosen)]
    else:
        names = [gpu[0] for gpu in found]
    model = " and ".join(dict.fromkeys(gpu[2] for gpu in found))
    return names, model, min((float(gpu[3]) / 1024 for gpu in found), default=0.0)


def summary(runner: JobRunner, before: Sequence[str], device: str, seconds: float) -> str:
    """A line for each job of this call, then where the failed ones failed, in MAX_SUMMARY characters."""
    order = ("failed", "cut", "part", "passed")
    outcomes = sorted(runner.outcomes, key=lambda outcome: order.index(outcome.status))
    counts = Counter(outcome.status for outcome in outcomes)
    said = ", ".join(f"{counts[status]} {status}" for status in order if counts[status]) or "nothing was run"
    lines = [f"benchmarks: {said}, {len(runner.left_out)} not started; {seconds:.0f} s on {device}"]
    width = max((len(outcome.name) for outcome in outcomes), default=0)
    lines += [f"{o.status:7s} {o.name:{width}s} {o.seconds:5.0f} s  {o.note[:110]}" for o in outcomes]
    for why in dict.fromkeys(why.split(",")[0] for why in runner.left_out.values()):
        names = [name for name, one in runner.left_out.items() if one.split(",")[0] == why]
        lines.append(f"not started, {why}: {', '.join(names)}")
    lines += [f"passed before: {', '.join(before)}"] if before else []
    table = "\n".join(lines)[:MAX_SUMMARY]
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    share = (MAX_SUMMARY - len(table)) // max(1, len(failed))
    return table + "".join(_failure(outcome, share) for outcome in failed)


def _failure(outcome: Outcome, max_characters: int) -> str:
    """Its most telling lines, as many as fit."""
    text = f"\n\nFAILED {outcome.name}"
    for line in outcome.lines:
        if len(text) + len(line) + 1 <= max_characters:
            text += f"\n{line}"
    return text if len(text) <= max_characters else ""


def write_archive(path: Path, root: Path) -> None:
    """Logs, states and results of jobs, with what they wrote under docs, by their places in the repository."""
    files = [*(root / "docs").glob("measured*"), *(root / "docs").glob("*.png")]
    for pattern in ("*.log", "*.json", "*.jsonl", "summary.txt"):
        found = (root / FOLDER).rglob(pattern)
        files += [file for file in found if file.is_file() and file.stat().st_size <= _MAX_LOG_BYTES]
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz", compresslevel=3) as archive:
        for file in files:
            archive.add(file, arcname=str(file.relative_to(root)))


def parse(argv: Sequence[str] | None, jobs: Sequence[Job]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.split("\n")[0])
    parser.add_argument("--list", action="store_true", help="show the jobs, and start none")
    parser.add_argument("--budget-s", type=float, help=f"seconds for everything, the last {END_S:.0f} for the summary")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="jobs, or patterns such as 'gpu.*', in order")
    parser.add_argument("--skip", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--again", nargs="+", default=[], metavar="NAME", help="run it though it passed; or: failed")
    parser.add_argument("--gpus", type=int, help="use so many of the visible GPUs; default: all")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier calls ran")
    parser.add_argument("--archive", type=Path, help="a .tar.gz of logs, states, results and docs/measured*")
    options = parser.parse_args(argv)
    try:
        names = matching(jobs, options.only or ["*"]) - matching(jobs, options.skip)
        matching(jobs, [pattern for pattern in options.again if pattern != "failed"])
    except ValueError as error:
        parser.error(str(error))
    if options.budget_s is not None and options.budget_s <= END_S:
        parser.error(f"--budget-s {options.budget_s:g}: give more than {END_S:.0f} s, which the end takes")
    if options.gpus is not None and options.gpus < 1:
        parser.error(f"--gpus {options.gpus}: give at least 1")
    asked = options.only or ["*"]  # in this order
    options.jobs = sorted(
        (job for job in jobs if job.name in names),
        key=lambda job: next(place for place, pattern in enumerate(asked) if fnmatchcase(job.name, pattern)),
    )
    options.archive = options.archive and options.archive.resolve()
    return options


def show(jobs: Sequence[Job], states: States) -> None:
    for job in jobs:
        state = states.status(job) or "-"
        print(f"{job.name:28s} {job.num_gpus} GPU {job.seconds:4.0f} s, limit {job.limit_s:4.0f} s  {state:7s}", end="")
        print(" ".join(["python", *job.command()[1:]]))


def main(argv: Sequence[str] | None = None, jobs: Sequence[Job] = JOBS) -> int:
    options = parse(argv, jobs)
    os.chdir(ROOT)
    gpus, device, gib = visible_gpus()
    states = States(FOLDER / "jobs.json", device)
    if options.list:
        show(options.jobs, states)
        return 0
    if options.gpus is not None and options.gpus > len(gpus):
        print(f"--gpus {options.gpus}: {len(gpus)} are visible here; leave it out", file=sys.stderr)
        return 2
    gpus = gpus[: options.gpus]
    if not gpus:
        print("python -m benchmarks needs a GPU that nvidia-smi lists and CUDA_VISIBLE_DEVICES allows", file=sys.stderr)
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "jobs.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another python -m benchmarks runs here: it holds {lock.name}", file=sys.stderr)
            return 2
        return run(options, gpus, states, device=f"{len(gpus)} {device}", gpu_gib=gib)


def run(options: argparse.Namespace, gpus: Sequence[str], states: States, *, device: str, gpu_gib: float) -> int:
    """Run, report and archive; 1 when a job failed, else 0. SIGTERM and SIGINT end it as the end of its budget does."""
    started = time.monotonic()
    if options.fresh:
        states.forget()
    jobs = queue(options.jobs, states, options.again)
    before = [job.name for job in options.jobs if job not in jobs]
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: signals.append(number))
    runner = JobRunner(gpus, states, FOLDER / "logs", budget_s=options.budget_s, is_stopped=lambda: bool(signals))
    small = [job for job in jobs if job.min_gpu_gib > gpu_gib]
    runner.left_out = {job.name: f"needs GPUs of {job.min_gpu_gib:.0f} GiB" for job in small}
    try:
        runner.run([job for job in jobs if job not in small])
    finally:
        text = summary(runner, before, device, time.monotonic() - started)
        (FOLDER / "summary.txt").write_text(text + "\n", encoding="utf-8")
        if options.archive:
            write_archive(options.archive, ROOT)
        print(text, flush=True)
    return int(any(outcome.status == "failed" for outcome in runner.outcomes))


if __name__ == "__main__":
    sys.exit(main())
