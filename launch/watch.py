"""``python -m launch status|logs|cancel RUN``: look after a run that was launched, from any machine that sees its folder.

In: a run's folder. Out: how it stands; its logs by role, node and rank, the first error before everything else; or its
end. Exit status: 0, 1 when the run has failed, 2 for a mistake. Nothing here keeps a run alive or ends one by accident.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launch import run_state
from launch.peers import CANCEL
from launch.run_state import JobState
from launch.spec import attempt_dir

_POLL_S = 0.5
_QUIET_S = 3.0  # after the end of a job, until its last lines have come
_LOG_NAME = re.compile(r"(?P<role>.+?)(?:\.node(?P<node>\d+))?\.log")


class WatchError(ValueError):
    """There is no such run, role or job."""


def main(argv: Sequence[str]) -> int:
    """Entry point; the exit status."""
    options = _parser().parse_args(argv)
    try:
        run_dir = find_run(options.run)
        return options.function(run_dir, options)
    except WatchError as error:
        print(f"python -m launch {argv[0]}: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, BrokenPipeError):
        sys.stdout = None  # nobody reads it: do not flush at exit
        return 0


def find_run(name: str) -> Path:
    """The folder of a run: a path, or a name below ``runs/``. Raises WatchError."""
    for path in (Path(name), Path("runs", name)):
        if path.is_dir():
            return path.resolve()
    known = sorted(path.parents[1].name for path in Path("runs").glob("*/launch/jobs.jsonl"))
    here = f" In runs/ there are {', '.join(known)}." if known else ""
    raise WatchError(f"{name!r} is no folder of a run. Give the output_dir of the run.{here}")


def status(run_dir: Path, options: argparse.Namespace) -> int:
    """Show how the run stands; 1 when its newest job has failed."""
    jobs = _jobs(run_dir)
    print("\n".join(run_state.describe(run_dir, jobs)))
    newest = next((one for one in reversed(jobs) if one.attempts), jobs[-1])
    return int(newest.is_over and newest.state != "COMPLETED")


def cancel(run_dir: Path, options: argparse.Namespace) -> int:
    """End all jobs of the run that are not over, for good; the trainer saves if it is given the time."""
    waiting = [one for one in _jobs(run_dir) if not one.is_over]
    if not waiting:
        print("nothing runs or waits")
        return 0
    failed = False
    for one in waiting:
        for attempt in one.attempts[-1:]:
            (attempt_dir(run_dir, one.job_id, attempt) / CANCEL).touch()  # agents then do not ask for another attempt
        if one.job["kind"] == "slurm":
            failed |= os.spawnlp(os.P_WAIT, "scancel", "scancel", one.job_id) != 0
        elif (pid := run_state.supervisor(one.job)) is not None:
            os.kill(pid, signal.SIGTERM)
        print(f"job {one.job_id} is asked to end; it was {one.state}")
    return int(failed)


def logs(run_dir: Path, options: argparse.Namespace) -> int:
    """Print the end of the chosen logs, or follow them until the job is over."""
    jobs = _jobs(run_dir)
    error = run_state.first_error_file(run_dir, jobs)
    if error is not None and options.role is None and options.node is None and options.rank is None:
        print(f"=== first error, from {error}\n{error.read_text(errors='replace').rstrip()}\n")
    views = _views(run_dir, jobs, options)
    if not views and not options.follow:
        raise WatchError(_nothing_chosen(run_dir, jobs, options))
    for view in views:
        view.show_last(options.lines, is_merged=len(views) > 1)
    if options.follow:
        _follow(run_dir, options, views)
    return 0


@dataclass
class _View:
    """One log file, as far as it was shown."""

    path: Path
    title: str  # role and node
    rank: int | None  # show its lines alone
    offset: int = 0
    rest: bytes = field(default=b"", repr=False)  # a line that has no end yet

    def show_last(self, count: int, *, is_merged: bool) -> None:
        lines = deque(self._new_lines(), maxlen=count)
        if is_merged and lines:
            print(f"=== {self.title}: {self.path}")
        for line in lines:
            print(line)
        if is_merged and lines:
            print()

    def show_new(self, *, is_merged: bool) -> bool:
        """Whether there was anything. In the merged view each line begins with its role and node."""
        lines = self._new_lines()
        for line in lines:
            print(f"[{self.title}] {line}" if is_merged else line, flush=True)
        return bool(lines)

    def _new_lines(self) -> list[str]:
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                new = file.read()
        except OSError:
            return []
        self.offset += len(new)
        *whole, self.rest = (self.rest + new).split(b"\n")
        lines = [line.decode(errors="replace") for line in whole]
        if self.rank is None:
            return lines
        mark = f"[rank {self.rank}] "
        return [line.removeprefix(mark) for line in lines if line.startswith((mark, "=== "))]


def _follow(run_dir: Path, options: argparse.Namespace, views: list[_View]) -> None:
    shown = {view.path for view in views}
    quiet_since = time.monotonic()
    next_look = 0.0
    jobs: list[JobState] = []
    while True:
        if any([view.show_new(is_merged=len(views) > 1) for view in views]):
            quiet_since = time.monotonic()
        if time.monotonic() > next_look:  # Slurm is asked seldom, the files often
            next_look = time.monotonic() + 10 * _POLL_S
            jobs = _jobs(run_dir)
            new = [view for view in _views(run_dir, jobs, options) if view.path not in shown]
            views += new
            shown |= {view.path for view in new}
        if all(one.is_over for one in jobs) and time.monotonic() > quiet_since + _QUIET_S:
            print(f"=== {', '.join(f'job {one.job_id}: {one.state}' for one in jobs[-1:])}")
            return
        time.sleep(_POLL_S)


def _views(run_dir: Path, jobs: list[JobState], options: argparse.Namespace) -> list[_View]:
    """The logs that were asked for. The job's own output is the role "job"."""
    found = []
    for path in sorted((run_dir / "logs").glob("*.log")):
        match = _LOG_NAME.fullmatch(path.name)
        node = None if match["node"] is None else int(match["node"])
        if options.role not in (None, match["role"]) or options.node not in (None, node):
            continue
        if options.rank is not None and options.role is None and match["role"] != "trainer":
            continue
        found.append(_View(path, match["role"] if node is None else f"{match['role']}.node{node}", options.rank))
    if options.role in (None, "job") and options.node is None and options.rank is None:
        found += [_View(path, "job", None) for path in _job_logs(jobs[-1])]
    return found


def _job_logs(newest: JobState) -> list[Path]:
    """Output of the batch script and of the agents."""
    job = newest.job
    if job["kind"] == "local":
        return [path for path in [Path(job.get("script") or "")] if path.is_file()]
    folder = Path(job.get("folder") or job.get("experiment") or "/nonexistent")
    names = (f"sbatch-{newest.job_id}.out", f"log-agents_{newest.job_id}_*.out")
    return [path for name in names for path in sorted(folder.rglob(name))] if folder.is_dir() else []


def _nothing_chosen(run_dir: Path, jobs: list[JobState], options: argparse.Namespace) -> str:
    everything = argparse.Namespace(role=None, node=None, rank=None)
    there = ", ".join(view.title for view in _views(run_dir, jobs, everything)) or "none yet"
    return f"no log of role {options.role}, node {options.node}, rank {options.rank}. There are: {there}"


def _jobs(run_dir: Path) -> list[JobState]:
    jobs = run_state.job_states(run_dir)
    if not jobs:
        raise WatchError(f"{run_dir} was not launched: it has no launch/jobs.jsonl")
    return jobs


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m launch")
    commands = parser.add_subparsers(required=True)
    for name, function, summary in (
        ("status", status, "state of jobs, roles and nodes; step, reward, seconds per step; where the report is"),
        ("logs", logs, "the first error, then the logs"),
        ("cancel", cancel, "end all jobs of the run"),
    ):
        command = commands.add_parser(name, help=summary, description=summary)
        command.set_defaults(function=function)
        command.add_argument("run", metavar="RUN", help="the run's folder, or its name below runs/")
        if name == "logs":
            command.add_argument("--role", help='trainer, rollout-0, ..., or "job" for the batch script and the agents')
            command.add_argument("--node", type=int, help="index of the node in the job")
            command.add_argument("--rank", type=int, help="of the trainer")
            command.add_argument("--lines", type=int, default=40, help="of the end of each log (default 40)")
            command.add_argument("--follow", "-f", action="store_true", help="until the job is over")
    return parser
