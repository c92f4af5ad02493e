"""``python -m launch status|logs|cancel RUN``: look after a run from any machine that sees its folder.

In: a run's folder. Out: how it stands; its logs by role, node and rank, the first error before everything else; or its
end. Exit status: 0, 1 when the run has failed, 2 for a mistake. Nothing here keeps a run alive or ends one by accident.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
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
_QUIET_S = 3.0  # after the end of a job, until its last lines have come
_CANCEL_POLL_S = 2.0
_CANCEL_WORD_S = 10.0  # between lines that say how long it takes
_CANCEL_END_S = 30.0  # for the agents to end what is left, once the time to save is over
_WORKING = ("RUNNING", run_state.UNKNOWN)
NOT_WAITING = "not waiting any longer; what was asked to save still does, and ends then"
_LOG_NAME = re.compile(r"(?P<role>.+?)(?:\.node(?P<node>\d+))?\.log")


class WatchError(ValueError):
    """There is no such run, role or job."""


def main(argv: Sequence[str]) -> int:
    """Entry point; the exit status."""
    options = _parser().parse_args(argv)
    try:
        root = Path()
        if options.cluster is not None:
            from launch import cluster as clusters  # with the doctor's tables; a login node does without

            root = Path(clusters.load(options.cluster).run_root or "")
        return max(options.function(run, options) for run in _runs(find_run(options.run, root), argv[0]))
    except ValueError as error:  # of a run, a cluster's file
        print(f"python -m launch {argv[0]}: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, BrokenPipeError):
        sys.stdout = None  # nobody reads it: do not flush at exit
        return 0


def find_run(name: str, root: Path = Path()) -> Path:
    """The folder of a run: a path, or a name below ``runs/``; both begin at ``root`` or here. Raises WatchError."""
    for path in (Path(name), root / name, root / "runs" / name):
        if path.is_dir():
            return path.resolve()
    known = sorted(path.parents[1].name for path in (root / "runs").glob("*/launch/jobs.jsonl"))
    here = f" In {root / 'runs'}/ there are {', '.join(known)}." if known else ""
    raise WatchError(f"{name!r} is not the folder of a run. Give the output_dir of the run.{here}")


def _runs(folder: Path, command: str) -> list[Path]:
    """The run of a folder, or the runs of a sweep."""
    if not (folder / SWEEP).exists():
        return [folder]
    runs = sorted(
        (path.parent for path in folder.glob(f"{ELEMENT}*/launch")), key=lambda run: int(run.name.split("-")[1])
    )
    if command == "logs" or not runs:
        raise WatchError(f"{folder} is a sweep: name one of its runs, as {folder / f'{ELEMENT}0'}")
    return runs


def status(run_dir: Path, options: argparse.Namespace) -> int:
    """Show how the run stands; 1 when its newest job has failed."""
    jobs = _jobs(run_dir)
    print("\n".join(run_state.describe(run_dir, jobs)))
    newest = next((one for one in reversed(jobs) if one.attempts), jobs[-1])
    return int(newest.is_over and newest.state != "COMPLETED")


def cancel(run_dir: Path, options: argparse.Namespace) -> int:
    """End all jobs of the run that are not over, for good. Those that run may save first, unless ``--now``.

    Agents read the file ``cancel``: the trainer ends its step and saves, they end the job, and ask for no other
    attempt.
    """
    waiting = [one for one in _jobs(run_dir) if not one.is_over]
    if not waiting:
        print("nothing runs or waits")
        return 0
    asked = {one.job_id: folders for one in waiting if (folders := _at_work(run_dir, one))}
    for folder in (folder for folders in asked.values() for folder in folders):
        (folder / CANCEL).touch()
        ChangeFlag.mark(folder)
    saving = [] if options.now else [one for one in waiting if one.job_id in asked]
    failed = False
    for one in reversed(waiting):  # those that wait for another first: they must not start when it ends
        if one not in saving:
            failed |= _end(one)
    for one in saving:
        print(f"job {one.job_id} is asked to save and to end; it was {one.state}", flush=True)
    try:
        return int(_await_ends(run_dir, saving) or failed)
    except KeyboardInterrupt:
        print(NOT_WAITING, flush=True)
        return 0


def _at_work(run_dir: Path, one: JobState) -> list[Path]:
    """The folder of the attempt of this job whose agents are there to be asked."""
    if one.state not in _WORKING:
        return []
    folders = [attempt_dir(run_dir, one.job_id, attempt) for attempt in one.attempts[-1:]]
    return [path for path in folders if any(path.glob("node-*.json")) and not (path / "outcome.json").exists()]


def _end(one: JobState) -> bool:
    """End a job at once; whether that failed."""
    print(f"job {one.job_id} is asked to end at once; it was {one.state}", flush=True)
    if one.job["kind"] == "slurm":
        return _scancel(one.job_id)
    if (pid := run_state.supervisor(one.job)) is not None:
        os.kill(pid, signal.SIGTERM)
    return False


def _scancel(*args: str) -> bool:
    """Whether Slurm failed to do it. Raises WatchError where there is no Slurm, or no answer."""
    try:
        return subprocess.run(["scancel", *args], timeout=60, stdin=subprocess.DEVNULL).returncode != 0
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WatchError(f"job {args[-1]} cannot be ended from here: {error}. Use a login node") from error


def _await_ends(run_dir: Path, saving: list[JobState]) -> bool:
    """Wait for jobs that were asked to save, and end those that do not in their time; whether that failed."""
    failed = False
    began = last_word = time.monotonic()
    limits = {one.job_id: JobSpec.load(one.job["spec"]).save_signal_s + _CANCEL_END_S for one in saving}
    while limits:
        for one in [one for one in _jobs(run_dir) if one.job_id in limits]:
            waited_s = time.monotonic() - began
            if one.is_over:
                print(f"job {one.job_id}: {one.state}{_last_words(run_dir, one)}", flush=True)
            elif one.state not in (*_WORKING, "COMPLETING"):
                failed |= _end(one)  # it waits for another attempt
            elif waited_s > limits[one.job_id]:
                print(f"job {one.job_id} has not ended within {waited_s:.0f} s", flush=True)
                failed |= _end(one)
            else:
                continue
            del limits[one.job_id]
        if limits and time.monotonic() > last_word + _CANCEL_WORD_S:
            last_word = time.monotonic()
            most_s = max(limits.values()) - (last_word - began)
            print(f"job {', '.join(limits)} is saving or ending, for at most {most_s:.0f} s more", flush=True)
        if limits:
            time.sleep(_CANCEL_POLL_S)
    return failed


def _last_words(run_dir: Path, one: JobState) -> str:
    last = read_outcome(run_dir, one.job_id, one.attempts[-1]) if one.attempts else None
    return "" if last is None else f" ({last.reason})"


def logs(run_dir: Path, options: argparse.Namespace) -> int:
    """Print the end of the chosen logs, or follow them until the job is over."""
    jobs = _jobs(run_dir)
    error = run_state.first_error_file(run_dir, jobs)
    if error is not None and options.role is None and options.node is None and options.rank is None:
        print(f"=== first error, from {error}\n{error.read_text(errors='replace').rstrip()}\n")
    views = _views(run_dir, jobs, options)
    if not views and not options.follow:
        raise WatchError(_nothing_chosen(run_dir, jobs, options))
    shown = [view.show_last(options.lines, is_merged=len(views) > 1) for view in views]
    if options.rank is not None and not any(shown) and not options.follow:
        paths = ", ".join(str(view.path) for view in views)
        raise WatchError(f"--rank {options.rank} has written nothing. Logs: {paths}")
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

    def show_last(self, count: int, *, is_merged: bool) -> bool:
        """Whether the process itself has written anything: headers are the agents'."""
        found = self._new_lines()
        lines = deque(found, maxlen=count)
        if is_merged and lines:
            print(f"=== {self.title}: {self.path}")
        for line in lines:
            print(line)
        if is_merged and lines:
            print()
        return any(not line.startswith("=== ") for line in found)

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
            quiet_since = time.monotonic() if new else quiet_since  # they are shown first, also when the job is over
        is_over = all(one.is_over or one.state == run_state.UNKNOWN for one in jobs)
        if is_over and time.monotonic() > quiet_since + _QUIET_S:
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
        found += [_View(path, "job", None) for path in _job_logs(run_dir, jobs[-1])]
    return found


def _job_logs(run_dir: Path, newest: JobState) -> list[Path]:
    """Output of the batch script and of the agents; below the run's folder if that was moved since."""
    job = newest.job
    if job["kind"] == "local":
        return [path for path in [Path(job.get("script") or "")] if path.is_file()]
    folder = Path(job.get("folder") or "/nonexistent")
    folder = folder if folder.is_dir() else launch_dir(run_dir) / "jobs"
    names = (f"sbatch-{newest.job_id}.out", f"agents-{newest.job_id}-*.out")
    return [path for name in names for path in sorted(folder.rglob(name))] if folder.is_dir() else []


def _nothing_chosen(run_dir: Path, jobs: list[JobState], options: argparse.Namespace) -> str:
    everything = argparse.Namespace(role=None, node=None, rank=None)
    there = ", ".join(dict.fromkeys(view.title for view in _views(run_dir, jobs, everything)))
    chosen = [f"{name} {value}" for name in ("role", "node", "rank") if (value := getattr(options, name)) is not None]
    if not there:
        return f"job {jobs[-1].job_id} is {jobs[-1].state}, and has written nothing"
    return f"there is no log of {', '.join(chosen)}. There are: {there}"


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
        ("status", status, "state of jobs, roles and nodes; step, reward, seconds per step; where the report is"),
        ("logs", logs, "the first error, then the logs"),
        ("cancel", cancel, "end all jobs of the run"),
    ):
        command = commands.add_parser(name, help=summary, description=summary)
        command.set_defaults(function=function)
        command.add_argument("run", metavar="RUN", help="the run's folder, or its name below runs/")
        command.add_argument("--cluster", metavar="NAME", help="RUN begins at its run_root")
        if name == "cancel":
            command.add_argument("--now", action="store_true", help="do not wait for the trainer to save")
        if name == "logs":
            command.add_argument("--role", help='trainer, rollout-0, ..., or "job" for the batch script and the agents')
            command.add_argument("--node", type=int, help="index of the node in the job")
            command.add_argument("--rank", type=int, help="of the trainer")
            command.add_argument("--lines", type=_count, default=40, help="of the end of each log (default 40)")
            command.add_argument("--follow", "-f", action="store_true", help="until the job is over")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
