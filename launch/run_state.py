"""Reads the state of a launched run from its folder and from Slurm. Uses only the standard library."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.outcome import newest_checkpoint, read_outcome
from launch.slurm import is_over, job_state, slurm_output
from launch.spec import SAVED, JobSpec, attempt_dir, launch_dir, read_jobs

UNKNOWN = "UNKNOWN"
_SLURM_S = 20.0  # deadline of an optional query
_SILENT_S = 30.0  # agents send a heartbeat every 5 s
_TAIL_BYTES = 1 << 20
_MEAN_STEPS = 10
_TRACEBACK_LINES = 6
_MOST_LINES = 40  # of an error that is not a traceback
_FIGURES = (("reward", "reward/score/mean"), ("pass rate", "eval/pass_rate/mean"), ("loss", "train/loss/mean"))


# How an attempt ended whose agents recorded no outcome, by Slurm's state of the job.
_WITHOUT_OUTCOME = {
    "CANCELLED": "cancelled, before its agents could record an outcome",
    "TIMEOUT": "ended by the time limit, before the trainer had saved",
    "NODE_FAIL": "ended, because a node was lost",
    "OUT_OF_MEMORY": "ended, because a node ran out of host memory",
    "PREEMPTED": "ended by another job with a higher priority",
}
_UNKNOWN_END = "ended without an outcome (a node was lost, all processes were killed, or the disk was full)"


@dataclass(frozen=True, kw_only=True)
class JobState:
    """State of one submission of a run."""

    job: dict[str, Any]  # entry of jobs.jsonl
    state: str  # Slurm's state, or RUNNING, COMPLETED, FAILED, CANCELLED from the job's files, or UNKNOWN
    attempts: tuple[int, ...]  # attempts that have a folder, oldest first
    note: str = ""  # source of the state, if not Slurm

    @property
    def job_id(self) -> str:
        return self.job["job_id"]

    @property
    def is_over(self) -> bool:
        return self.state != UNKNOWN and is_over(self.state)


def job_states(run_dir: Path) -> list[JobState]:
    """All jobs of a run, oldest first."""
    states = []
    for job in read_jobs(run_dir):
        attempts = _attempts(run_dir, job["job_id"])
        state, note = _state(run_dir, job, attempts)
        states.append(JobState(job=job, state=state, note=note, attempts=tuple(attempts)))
    return states


def supervisor(job: dict[str, Any]) -> int | None:
    """PID of the supervisor of a local job; None if it has ended or is on another machine."""
    pid = job["job_id"].removeprefix("local-")
    try:
        args = Path("/proc", pid, "cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    return int(pid) if pid.isdigit() and any(arg.startswith(b"launch") for arg in args) else None


def hosts(run_dir: str | Path, job_id: str) -> set[str]:
    """The hosts of all agents of a job so far."""
    names = set()
    for path in launch_dir(run_dir).glob(f"{job_id}.*/node-*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            names.add(json.loads(path.read_text())["host"])
    return names


def has_heartbeat(run_dir: str | Path, job_id: str) -> bool:
    """Whether an agent of the last attempt lives, according to its files."""
    return _state_by_files(Path(run_dir), job_id, _attempts(run_dir, job_id))[0] == "RUNNING"


def no_output_message(run_dir: str | Path, job_id: str) -> str:
    """The message for a job that ended without a file in its run's folder."""
    return (
        f"it wrote nothing into {run_dir}: check that its nodes see this folder and can write to it. "
        f"`sacct -j {job_id} -o State,ExitCode,NodeList` shows where it ran"
    )


def describe(run_dir: Path, jobs: list[JobState]) -> list[str]:
    lines = [_line("run", str(run_dir))]
    for state in jobs[-5:]:
        lines += _job_lines(run_dir, state)
    current = next((state for state in reversed(jobs) if state.attempts), None)
    if current is not None:
        lines += _role_lines(run_dir, current)
    lines += _progress_lines(run_dir)
    has_error = current is not None and current.state not in ("COMPLETED", "CANCELLED")
    if has_error and (path := first_error_file(run_dir, [current])) is not None:
        where, *text = path.read_text(errors="replace").splitlines()
        shown = text[-_TRACEBACK_LINES:] if text[:1] == ["Traceback (most recent call last):"] else text[-_MOST_LINES:]
        lines += [_line("error", f"{path}"), *(_line("", line) for line in [where, *shown])]
    try:
        name = report_name(JobSpec.load(jobs[-1].job["spec"]))
    except ValueError:  # only the owner can read the job's file
        name = "report.html"
    if name is None:
        return lines
    report = run_dir / name
    draw = f": python -m megatron_fp8rl report --run_dir {shlex.quote(str(run_dir))}" if name == "report.html" else ""
    written = "" if report.exists() else f" (not written yet{draw})"
    return [*lines, _line("report", f"{report}{written}")]


def report_name(spec: JobSpec) -> str | None:
    """Name of the report in the run's folder; None for a checkpoint tool."""
    _, program, command, *_ = (*spec.roles[0].command, "", "", "")
    if program == "checkpoint_tools":
        return None
    return "study.md" if command == "study" else "report.html"


def error_file(attempt: Path) -> Path | None:
    """The file with the first error of an attempt's folder; None if it is missing, or empty because of a full disk."""
    path = attempt / "first_error.txt"
    return path if path.exists() and path.stat().st_size else None


def first_error_file(run_dir: Path, jobs: list[JobState]) -> Path | None:
    """The newest error file. The last attempt of a crash loop contains the first error of the loop."""
    for state in reversed(jobs):
        for attempt in reversed(state.attempts):
            if (path := error_file(attempt_dir(run_dir, state.job_id, attempt))) is not None:
                return path
    return None


def _attempts(run_dir: str | Path, job_id: str) -> list[int]:
    """The attempts of a job that have a folder, oldest first."""
    suffixes = (folder.name.rpartition(".")[2] for folder in launch_dir(run_dir).glob(f"{job_id}.*"))
    return sorted(int(suffix) for suffix in suffixes if suffix.isdigit())


def _state(run_dir: Path, job: dict[str, Any], attempts: list[int]) -> tuple[str, str]:
    """(state, its source unless that is Slurm or a local supervisor)."""
    is_slurm = job["kind"] == "slurm"
    if is_slurm and (state := job_state(job["job_id"])) is not None:
        return state, ""
    if not is_slurm and supervisor(job) is not None:
        return "RUNNING", ""
    state, note = _state_by_files(run_dir, job["job_id"], attempts)
    if is_slurm:
        return state, f"Slurm does not answer here, or no longer knows the job; {note}"
    return ("FAILED", "") if state == UNKNOWN else (state, "")  # it ended without an outcome


def _state_by_files(run_dir: Path, job_id: str, attempts: list[int]) -> tuple[str, str]:
    """(state, reason) from the files of the last attempt's agents."""
    if not attempts:
        return UNKNOWN, "no agent has started yet"
    last = read_outcome(run_dir, job_id, attempts[-1])
    if last is not None and last.status != SAVED:
        return {"done": "COMPLETED", "cancelled": "CANCELLED"}.get(last.result, "FAILED"), "its agents wrote this"
    folder = attempt_dir(run_dir, job_id, attempts[-1])
    heartbeat = max((path.stat().st_mtime for path in folder.glob("node-*.json")), default=0.0)
    silent_s = time.time() - heartbeat
    if last is not None:
        return UNKNOWN, f"attempt {last.attempt} has saved, and asked for a restart"
    if silent_s <= _SILENT_S:
        return "RUNNING", f"last heartbeat of an agent {max(0.0, silent_s):.0f} s ago"
    return UNKNOWN, f"no heartbeat of an agent for {silent_s:.0f} s" if heartbeat else "no agent has joined"


def _job_lines(run_dir: Path, state: JobState) -> list[str]:
    job, job_id = state.job, state.job_id
    submitted = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job["submitted_at"]))
    lines = [_line("job", f"{job_id} on {job['cluster']}: {state.state}, {job['nodes']} node(s), queued {submitted}")]
    if state.note:
        lines.append(_line("", state.note))
    if state.state == "PENDING":
        waits = slurm_output("squeue", "-h", "-j", job_id, "-o", "%r, may start %S", deadline_s=_SLURM_S)
        lines += [_line("", f"waits: {waits.strip()}")] if waits and waits.strip() else []
    has_output = (Path(job.get("folder") or "/") / f"sbatch-{job_id}.out").exists()
    is_silent = job["kind"] == "slurm" and not (state.attempts or has_output)
    if is_silent and state.is_over and state.state not in ("COMPLETED", "CANCELLED"):
        lines.append(_line("", no_output_message(run_dir, job_id)))
    for attempt in state.attempts:
        outcome = read_outcome(run_dir, job_id, attempt)
        if outcome is not None:
            text = f"{outcome.result} ({outcome.reason})"
        elif attempt == state.attempts[-1] and not state.is_over:
            text = "in progress"
        else:
            text = _WITHOUT_OUTCOME.get(state.state if attempt == state.attempts[-1] else "", _UNKNOWN_END)
        lines.append(_line("", f"attempt {attempt}: {text}"))
    return lines


def _role_lines(run_dir: Path, job: JobState) -> list[str]:
    folder = attempt_dir(run_dir, job.job_id, job.attempts[-1])
    lines = []
    for path in sorted(folder.glob("role-*.json")):
        role, _, node = path.stem.removeprefix("role-").rpartition(".node")
        part = json.loads(path.read_text())
        try:
            peer = folder / f"node-{node}.json"
            host, silent_s = json.loads(peer.read_text())["host"], time.time() - peer.stat().st_mtime
        except (OSError, ValueError):
            host, silent_s = "?", 0.0
        state = part["state"]
        if state == "running" and job.is_over:
            state = "ended with the job"
        elif state == "running" and silent_s > _SILENT_S:
            state = f"NOT HEARD OF for {silent_s:.0f} s"
        elif state == "ended":
            state = f"ended with status {part['status']}"
        restarts = f", restarted {part['incarnation']} time(s)" if part["incarnation"] else ""
        lines.append(_line(role, f"node {node} ({host}): {state}{restarts}"))
    return lines


def _progress_lines(run_dir: Path) -> list[str]:
    lines = []
    for title, folder in (("warm start", run_dir / "warm_start"), ("step", run_dir)):
        steps = _last_steps(folder / "metrics.jsonl")
        if not steps:
            continue
        last = steps[-1]
        try:
            total = f" of {json.loads((folder / 'config.json').read_text())['num_steps']}"
        except (OSError, ValueError, KeyError):
            total = ""
        parts = [f"{last['step']}{total}"]
        seconds = [step["time/step/s"] for step in steps[-_MEAN_STEPS:] if step.get("time/step/s") is not None]
        for name, key in _FIGURES:
            value = next((step[key] for step in reversed(steps) if step.get(key) is not None), None)
            parts += [] if value is None else [f"{name} {value:.4g}"]
        if seconds:
            parts.append(f"{sum(seconds) / len(seconds):.3g} s per step (mean of the last {len(seconds)})")
        lines.append(_line(title, ", ".join(parts)))
    if checkpoint := newest_checkpoint(run_dir):
        lines.append(_line("checkpoint", checkpoint))
    return lines


def _last_steps(path: Path) -> list[dict[str, Any]]:
    """The last complete records of a metrics file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return []
    records = []
    for line in lines:
        with contextlib.suppress(ValueError):  # the first line may be cut
            records.append(json.loads(line))
    return records


def _line(title: str, text: str) -> str:
    return f"{title:<12}{text}"
