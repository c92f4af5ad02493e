"""How a launched run stands, read from its folder and, where there is one, from Slurm.

In: a run's folder. Out: :class:`JobState` for each of its jobs, and lines for people. Runs wherever the folder can be
read; the standard library alone.
"""

from __future__ import annotations

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
_SLURM_S = 20.0  # for a question that the rest of the answer can do without
_SILENT_S = 30.0  # agents touch their file every 5 s
_TAIL_BYTES = 1 << 20
_MEAN_STEPS = 10
_FIGURES = (("reward", "reward/score/mean"), ("pass rate", "eval/pass_rate/mean"), ("loss", "train/loss/mean"))


@dataclass(frozen=True, kw_only=True)
class JobState:
    """One submission of a run."""

    job: dict[str, Any]  # its line of jobs.jsonl
    state: str  # Slurm's word, or RUNNING, COMPLETED, FAILED, CANCELLED by the job's files; UNKNOWN when neither tells
    attempts: tuple[int, ...]  # those that have a folder, oldest first
    note: str = ""  # how the state is known, when Slurm did not say

    @property
    def job_id(self) -> str:
        return self.job["job_id"]

    @property
    def is_over(self) -> bool:
        return self.state != UNKNOWN and is_over(self.state)


def job_states(run_dir: Path) -> list[JobState]:
    """All jobs of a run, oldest first."""
    found = []
    for job in read_jobs(run_dir):
        folders = launch_dir(run_dir).glob(f"{job['job_id']}.*")
        attempts = sorted(int(suffix) for folder in folders if (suffix := folder.name.rpartition(".")[2]).isdigit())
        state, note = _state(run_dir, job, attempts)
        found.append(JobState(job=job, state=state, note=note, attempts=tuple(attempts)))
    return found


def supervisor(job: dict[str, Any]) -> int | None:
    """The process of this machine that looks after a local job; None when it has ended or is elsewhere."""
    pid = job["job_id"].removeprefix("local-")
    try:
        words = Path("/proc", pid, "cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    return int(pid) if pid.isdigit() and any(word.startswith(b"launch") for word in words) else None


def no_output_message(run_dir: str | Path, job_id: str) -> str:
    """What to say of a job that ended without a file in its run's folder."""
    return (
        f"it wrote nothing into {run_dir}: do its nodes see that folder, and may they write there? "
        f"`sacct -j {job_id} -o State,ExitCode,NodeList` says where it was"
    )


def describe(run_dir: Path, jobs: list[JobState]) -> list[str]:
    """What ``status`` shows."""
    lines = [_line("run", str(run_dir))]
    for one in jobs[-5:]:
        lines += _job_lines(run_dir, one)
    current = next((one for one in reversed(jobs) if one.attempts), None)
    if current is not None:
        lines += _role_lines(run_dir, current)
    lines += _progress_lines(run_dir)
    if current is not None:
        lines += _error_lines(run_dir, current)
    try:
        name = report_name(JobSpec.load(jobs[-1].job["spec"]))
    except ValueError:  # the run of somebody else, whose job holds values of variables
        name = "report.html"
    if name is None:
        return lines
    report = run_dir / name
    draw = f": python -m megatron_fp8rl report --run_dir {shlex.quote(str(run_dir))}" if name == "report.html" else ""
    written = "" if report.exists() else f" (not written yet{draw})"
    return [*lines, _line("report", f"{report}{written}")]


def report_name(spec: JobSpec) -> str | None:
    """The file of a run's folder that shows what came of it; None for a checkpoint tool."""
    _, program, *words = (*spec.roles[0].command, "", "")
    if program == "checkpoint_tools":
        return None
    return "study.md" if words[:1] == ["study"] else "report.html"


def error_file(attempt: Path) -> Path | None:
    """The file with the first error of an attempt, by its folder; None where it left none, or an empty one on a full
    disk."""
    path = attempt / "first_error.txt"
    return path if path.exists() and path.stat().st_size else None


def first_error_file(run_dir: Path, jobs: list[JobState]) -> Path | None:
    """Of the newest job that left an error: that of its last attempt, which holds the first error of a crash loop."""
    for one in reversed(jobs):
        for attempt in reversed(one.attempts):
            if (path := error_file(attempt_dir(run_dir, one.job_id, attempt))) is not None:
                return path
    return None


def _state(run_dir: Path, job: dict[str, Any], attempts: list[int]) -> tuple[str, str]:
    """(state, how it is known unless Slurm or the process of a local job says so)."""
    is_slurm = job["kind"] == "slurm"
    if is_slurm and (state := job_state(job["job_id"])) is not None:
        return state, ""
    if not is_slurm and supervisor(job) is not None:
        return "RUNNING", ""
    state, note = _state_by_files(run_dir, job["job_id"], attempts)
    if is_slurm:
        return state, f"Slurm does not answer here, or has forgotten it; {note}"
    return ("FAILED", "") if state == UNKNOWN else (state, "")  # it ended without a word


def _state_by_files(run_dir: Path, job_id: str, attempts: list[int]) -> tuple[str, str]:
    """(state, what tells it), from what the agents of the last attempt wrote."""
    if not attempts:
        return UNKNOWN, "no agent has started yet"
    last = read_outcome(run_dir, job_id, attempts[-1])
    if last is not None and last.status != SAVED:
        return {"done": "COMPLETED", "cancelled": "CANCELLED"}.get(last.result, "FAILED"), "its agents wrote this"
    folder = attempt_dir(run_dir, job_id, attempts[-1])
    heard = max((path.stat().st_mtime for path in folder.glob("node-*.json")), default=0.0)
    silent_s = time.time() - heard
    if last is not None:
        return UNKNOWN, f"attempt {last.attempt} has saved, and asked to be started again"
    if silent_s <= _SILENT_S:
        return "RUNNING", f"an agent gave a sign of life {max(0.0, silent_s):.0f} s ago"
    return UNKNOWN, f"no agent has given a sign of life for {silent_s:.0f} s" if heard else "no agent has come"


def _job_lines(run_dir: Path, one: JobState) -> list[str]:
    job = one.job
    submitted = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job["submitted_at"]))
    lines = [_line("job", f"{one.job_id} on {job['cluster']}: {one.state}, {job['nodes']} node(s), queued {submitted}")]
    if one.note:
        lines.append(_line("", one.note))
    if one.state == "PENDING":
        waits = slurm_output("squeue", "-h", "-j", one.job_id, "-o", "%r, may start %S", deadline_s=_SLURM_S)
        lines += [_line("", f"waits: {waits.strip()}")] if waits and waits.strip() else []
    has_output = (Path(job.get("folder") or "/") / f"sbatch-{one.job_id}.out").exists()
    is_silent = job["kind"] == "slurm" and not (one.attempts or has_output)
    if is_silent and one.is_over and one.state not in ("COMPLETED", "CANCELLED"):
        lines.append(_line("", no_output_message(run_dir, one.job_id)))
    for attempt in one.attempts:
        outcome = read_outcome(run_dir, one.job_id, attempt)
        if outcome is not None:
            lines.append(_line("", f"attempt {attempt}: {outcome.result} ({outcome.reason})"))
        elif attempt == one.attempts[-1] and not one.is_over:
            lines.append(_line("", f"attempt {attempt}: under way"))
        else:
            why = "a node was lost, all was killed, or the disk was full"
            lines.append(_line("", f"attempt {attempt}: ended without a word ({why})"))
    return lines


def _role_lines(run_dir: Path, one: JobState) -> list[str]:
    folder = attempt_dir(run_dir, one.job_id, one.attempts[-1])
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
        if state == "running" and one.is_over:
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
            config = json.loads((folder / "config.json").read_text())
            of = f" of {config['num_steps']}"
        except (OSError, ValueError, KeyError):
            of = ""
        words = [f"{last['step']}{of}"]
        seconds = [one["time/step/s"] for one in steps[-_MEAN_STEPS:] if one.get("time/step/s") is not None]
        for name, key in _FIGURES:
            value = next((one[key] for one in reversed(steps) if one.get(key) is not None), None)
            words += [] if value is None else [f"{name} {value:.4g}"]
        if seconds:
            words.append(f"{sum(seconds) / len(seconds):.3g} s per step (mean of the last {len(seconds)})")
        lines.append(_line(title, ", ".join(words)))
    if checkpoint := newest_checkpoint(run_dir):
        lines.append(_line("checkpoint", checkpoint))
    return lines


def _error_lines(run_dir: Path, current: JobState) -> list[str]:
    path = first_error_file(run_dir, [current])
    if path is None:
        return []
    text = path.read_text(errors="replace").splitlines()
    return [_line("error", f"{path}"), *(_line("", line) for line in [*text[:1], *text[1:][-6:]])]


def _last_steps(path: Path) -> list[dict[str, Any]]:
    """The last records of a file of metrics; a line that is being written is left out."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:  # the first of the part that was read may be half a line
            continue
    return found


def _line(title: str, text: str) -> str:
    return f"{title:<12}{text}"
