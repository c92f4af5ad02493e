"""``python -m launch status|logs|cancel RUN``: show or cancel a run from any machine that sees its folder.

Exit status: 0, 1 if the run has failed, 2 for invalid arguments. Interrupting these commands does not affect the run.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launch import run_state
from launch.outcome import read_outcome
from launch.peers import CANCEL
from launch.run_state import JobState
from launch.spec import ELEMENT, SWEEP, JobSpec, attempt_dir, launch_dir
from megatron_fp8rl.runtime.stop import ChangeFlag

_POLL_S = 0.5
_QUIET_S = 3.0  # after the end of a job, until its last lines are written
_CANCEL_POLL_S = 2.0
_CANCEL_REPORT_S = 10.0  # between progress lines
_CANCEL_END_S = 30.0  # for the agents to end all roles, after the time to save
_WORKING = ("RUNNING", run_state.UNKNOWN)
NOT_WAITING = "no longer waiting; jobs that were asked to save still save and end"
_LOG_NAME = re.compile(r"(?P<role>.+?)(?:\.node(?P<node>\d+))?\.log")


class WatchError(ValueError):
    """The run, role or job does not exist."""


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    try:
        root = Path()
        if options.cluster is not None:
            from launch import cluster as clusters  # imports the doctor's tables, which other calls do not need

            root = Path(clusters.load(options.cluster).run_root or "")
        return max(options.function(run, options) for run in _runs(find_run(options.run, root), argv[0]))
    except ValueError as error:  # WatchError, ClusterError
        print(f"python -m launch {argv[0]}: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, BrokenPipeError):
        sys.stdout = None  # closed by the reader: do not flush at exit
        return 0


def find_run(name: str, root: Path = Path()) -> Path:
    """The folder of a run: a path, or a name below ``runs/``, relative to ``root`` or here. Raises WatchError."""
    for path in (Path(name), root / name, root / "runs" / name):
        if path.is_dir():
            return path.resolve()
    known = sorted(path.parents[1].name for path in (root / "runs").glob("*/launch/jobs.jsonl"))
    here = f" Runs in {root / 'runs'}/: {', '.join(known)}." if known else ""
    problem = f"{name!r} is not the folder of a run, and {root / 'runs' / name} does not exist"
    raise WatchError(f"{problem}. Give the output_dir of the run.{here}")


def _runs(folder: Path, command: str) -> list[Path]:
    if not (folder / SWEEP).exists():
        return [folder]
    runs = [path.parent for path in folder.glob(f"{ELEMENT}*/launch")]
    if command == "logs" or not runs:
        raise WatchError(f"{folder} is a sweep: name one of its runs, such as {folder / f'{ELEMENT}0'}")
    return sorted(runs, key=lambda run: int(run.name.split("-")[1]))


def status(run_dir: Path, options: argparse.Namespace) -> int:
    """Print the state of the run; return 1 if its newest job has failed."""
    jobs = _jobs(run_dir)
    print("\n".join(run_state.describe(run_dir, jobs)))
    newest = next((job for job in reversed(jobs) if job.attempts), jobs[-1])
    return int(newest.is_over and newest.state != "COMPLETED")


def cancel(run_dir: Path, options: argparse.Namespace) -> int:
    """Cancel all active jobs of the run. Running jobs save first, unless ``--now``: agents read the file ``cancel``,
    the trainer ends its step and saves, and the job ends without another attempt."""
    active = [job for job in _jobs(run_dir) if not job.is_over]
    if not active:
        print("no job runs or waits")
        return 0
    asked = {job.job_id: folder for job in active if (folder := _active_attempt(run_dir, job))}
    for folder in asked.values():
        (folder / CANCEL).touch()
        ChangeFlag.mark(folder)
    saving = [] if options.now else [job for job in active if job.job_id in asked]
    failed = False
    for job in reversed(active):  # dependent jobs first, so that they do not start
        if job not in saving:
            failed |= _end(job)
    for job in saving:
        print(f"job {job.job_id} is asked to save and to end; it was {job.state}", flush=True)
    try:
        return int(_await_ends(run_dir, saving) or failed)
    except KeyboardInterrupt:
        print(NOT_WAITING, flush=True)
        return 0


def _active_attempt(run_dir: Path, job: JobState) -> Path | None:
    """The folder of the job's attempt whose agents run; None without one."""
    if job.state not in _WORKING or not job.attempts:
        return None
    path = attempt_dir(run_dir, job.job_id, job.attempts[-1])
    return path if any(path.glob("node-*.json")) and not (path / "outcome.json").exists() else None


def _end(job: JobState) -> bool:
    """End a job at once; returns whether that failed. Raises WatchError if Slurm is missing or does not answer."""
    print(f"job {job.job_id} is asked to end at once; it was {job.state}", flush=True)
    if job.job["kind"] == "slurm":
        try:
            return subprocess.run(["scancel", job.job_id], timeout=60, stdin=subprocess.DEVNULL).returncode != 0
        except (OSError, subprocess.TimeoutExpired) as error:
            raise WatchError(f"job {job.job_id} cannot be ended from here: {error}. Use a login node") from error
    if (pid := run_state.supervisor(job.job)) is not None:
        os.kill(pid, signal.SIGTERM)
    return False


def _await_ends(run_dir: Path, saving: list[JobState]) -> bool:
    """Wait for jobs that were asked to save, and end those that exceed their time; returns whether that failed."""
    failed = False
    began = last_report = time.monotonic()
    limits = {job.job_id: JobSpec.load(job.job["spec"]).save_signal_s + _CANCEL_END_S for job in saving}
    while limits:
        for job in [job for job in _jobs(run_dir) if job.job_id in limits]:
            waited_s = time.monotonic() - began
            if job.is_over:
                last = read_outcome(run_dir, job.job_id, job.attempts[-1]) if job.attempts else None
                print(f"job {job.job_id}: {job.state}{f' ({last.reason})' if last else ''}", flush=True)
            elif job.state not in (*_WORKING, "COMPLETING"):
                failed |= _end(job)  # queued for another attempt
            elif waited_s > limits[job.job_id]:
                print(f"job {job.job_id} has not ended within {waited_s:.0f} s", flush=True)
                failed |= _end(job)
            else:
                continue
            del limits[job.job_id]
        if limits and time.monotonic() > last_report + _CANCEL_REPORT_S:
            last_report = time.monotonic()
            most_s = max(limits.values()) - (last_report - began)
            print(f"job {', '.join(limits)} is saving or ending, for at most {most_s:.0f} s more", flush=True)
        if limits:
            time.sleep(_CANCEL_POLL_S)
    return failed


def logs(run_dir: Path, options: argparse.Namespace) -> int:
    """Print the end of the selected logs, or follow them until the job has ended."""
    jobs = _jobs(run_dir)
    error = run_state.first_error_file(run_dir, jobs)
    if error is not None and options.role is None and options.node is None and options.rank is None:
        print(f"=== first error, from {error}\n{error.read_text(errors='replace').rstrip()}\n")
    views = _views(run_dir, jobs, options)
    if not views and not options.follow:
        raise WatchError(_no_logs_message(run_dir, jobs, options))
    shown = [view.show_last(options.lines, is_merged=len(views) > 1) for view in views]
    if options.rank is not None and not any(shown) and not options.follow:
        paths = ", ".join(str(view.path) for view in views)
        raise WatchError(f"--rank {options.rank} has written nothing. Logs: {paths}")
    if options.follow:
        _follow(run_dir, options, views)
    return 0


@dataclass
class _View:
    """A log file and the position up to which it was shown."""

    path: Path
    title: str  # role and node
    rank: int | None  # show only the lines of this rank
    offset: int = 0
    rest: bytes = field(default=b"", repr=False)  # the last, incomplete line

    def show_last(self, count: int, *, is_merged: bool) -> bool:
        """Print the last lines; returns whether the process itself has written any (headers are from agents)."""
        new = self._new_lines()
        lines = new[-count:] if count else []
        if is_merged and lines:
            lines = [f"=== {self.title}: {self.path}", *lines, ""]
        for line in lines:
            print(line)
        return any(not line.startswith("=== ") for line in new)

    def show_new(self, *, is_merged: bool) -> bool:
        """Print new lines, with role and node if merged; returns whether there were any."""
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
    next_query = 0.0
    jobs: list[JobState] = []
    while True:
        if any([view.show_new(is_merged=len(views) > 1) for view in views]):
            quiet_since = time.monotonic()
        if time.monotonic() > next_query:  # query Slurm less often than the files
            next_query = time.monotonic() + 10 * _POLL_S
            jobs = _jobs(run_dir)
            new = [view for view in _views(run_dir, jobs, options) if view.path not in shown]
            views += new
            shown |= {view.path for view in new}
            quiet_since = time.monotonic() if new else quiet_since  # show new files even if the job has ended
        is_over = all(job.is_over or job.state == run_state.UNKNOWN for job in jobs)
        if is_over and time.monotonic() > quiet_since + _QUIET_S:
            print(f"=== job {jobs[-1].job_id}: {jobs[-1].state}")
            return
        time.sleep(_POLL_S)


def _views(run_dir: Path, jobs: list[JobState], options: argparse.Namespace) -> list[_View]:
    """The selected logs. The role "job" is the output of the batch script and the agents."""
    views = []
    for path in sorted((run_dir / "logs").glob("*.log")):
        match = _LOG_NAME.fullmatch(path.name)
        node = None if match["node"] is None else int(match["node"])
        if options.role not in (None, match["role"]) or options.node not in (None, node):
            continue
        if options.rank is not None and options.role is None and match["role"] != "trainer":
            continue
        views.append(_View(path, match["role"] if node is None else f"{match['role']}.node{node}", options.rank))
    if options.role in (None, "job") and options.node is None and options.rank is None:
        views += [_View(path, "job", None) for path in _job_logs(run_dir, jobs[-1])]
    return views


def _job_logs(run_dir: Path, newest: JobState) -> list[Path]:
    """Output of the batch script and the agents. If the run's folder was moved, searches its new path."""
    job = newest.job
    if job["kind"] == "local":
        return [path for path in [Path(job.get("script") or "")] if path.is_file()]
    folder = Path(job.get("folder") or "/nonexistent")
    folder = folder if folder.is_dir() else launch_dir(run_dir) / "jobs"
    names = (f"sbatch-{newest.job_id}.out", f"agents-{newest.job_id}-*.out")
    return [path for name in names for path in sorted(folder.rglob(name))] if folder.is_dir() else []


def _no_logs_message(run_dir: Path, jobs: list[JobState], options: argparse.Namespace) -> str:
    everything = argparse.Namespace(role=None, node=None, rank=None)
    titles = ", ".join(dict.fromkeys(view.title for view in _views(run_dir, jobs, everything)))
    chosen = [f"{name} {value}" for name in ("role", "node", "rank") if (value := getattr(options, name)) is not None]
    if not titles:
        return f"job {jobs[-1].job_id} is {jobs[-1].state}, and has written nothing"
    return f"there is no log of {', '.join(chosen)}. Logs: {titles}"


def _jobs(run_dir: Path) -> list[JobState]:
    jobs = run_state.job_states(run_dir)
    if not jobs:
        raise WatchError(f"{run_dir} was not launched: it has no launch/jobs.jsonl")
    return jobs


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of lines")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m launch")
    commands = parser.add_subparsers(required=True)
    for name, function, summary in (
        ("status", status, "show jobs, roles and nodes; step, reward, seconds per step; path of the report"),
        ("logs", logs, "show the first error, then the logs"),
        ("cancel", cancel, "end all jobs of the run"),
    ):
        command = commands.add_parser(name, help=summary, description=summary)
        command.set_defaults(function=function)
        command.add_argument("run", metavar="RUN", help="the run's folder, or its name below runs/")
        command.add_argument("--cluster", metavar="NAME", help="RUN is relative to the cluster's run_root")
        if name == "cancel":
            command.add_argument("--now", action="store_true", help="do not wait for the trainer to save")
        if name == "logs":
            command.add_argument("--role", help='trainer, rollout-0, ..., or "job" for the batch script and the agents')
            command.add_argument("--node", type=int, help="index of the node in the job")
            command.add_argument("--rank", type=int, help="trainer rank")
            command.add_argument("--lines", type=_count, default=40, help="lines from the end of each log (default 40)")
            command.add_argument("--follow", "-f", action="store_true", help="follow until the job has ended")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
