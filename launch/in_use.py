"""Refuses a job whose run folder another job or run uses: before it is submitted, and again when it starts.

Two jobs in one folder would overwrite each other's checkpoints, logs and addresses of replicas. The agent of node 0
therefore holds ``launch/job.lock`` during an attempt, and the trainer holds ``run.lock``. Uses only the standard
library.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from launch import run_state, slurm
from launch.spec import TRAINING_JOBS, JobSpec, launch_dir, read_jobs
from megatron_fp8rl.data import folder_lock
from megatron_fp8rl.data.folder_lock import RUN_LOCK, InUseError

_JOB_LOCK = "job.lock"


def problems(spec: JobSpec, sbatch: dict[str, Any]) -> list[str]:
    """Reasons not to submit the job, one sentence each with a remedy.

    ``sbatch``: other options of sbatch. Jobs that Slurm runs one after another may share a folder.
    """
    if str(sbatch.get("dependency", "")).partition(":")[0] in ("singleton", "afterany"):
        return []
    errors = [
        f"job {job['job_id']} of cluster {job['cluster']!r} is {state} in {spec.run_dir}. Cancel it by "
        "`python -m launch cancel`, or choose another --output_dir."
        for job in read_jobs(spec.run_dir)
        if (state := _state(spec.run_dir, job)) is not None
    ]
    if not errors and _trains(spec) and (owner := folder_lock.owner(Path(spec.run_dir) / RUN_LOCK)):
        errors.append(_sentence(spec, owner))
    return errors


@contextlib.contextmanager
def claimed(spec: JobSpec, *, on_loss: Callable[[], None]) -> Iterator[None]:
    """Hold the folder for an attempt of the job, whose earlier processes on this machine have been killed.

    Raises InUseError with a sentence.
    """
    folder = launch_dir(spec.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(folder_lock.hold(folder / _JOB_LOCK, is_restart=True, on_loss=on_loss))
        except InUseError as error:
            raise InUseError(_sentence(spec, str(error))) from error
        if _trains(spec) and (owner := folder_lock.owner(Path(spec.run_dir) / RUN_LOCK, waits=False)):
            raise InUseError(_sentence(spec, owner))
        yield


def _trains(spec: JobSpec) -> bool:
    """Whether the job trains in its folder. An evaluation does not, so it may run beside a training run."""
    return any(len(role.command) > 2 and role.command[2] in TRAINING_JOBS for role in spec.roles)


def _state(run_dir: str, job: dict[str, Any]) -> str | None:
    """The state of an active job; None if it has ended or its state is unknown."""
    job_id = job["job_id"]
    if job["kind"] == "slurm":
        if (state := slurm.job_state(job_id)) is not None:
            return None if slurm.is_over(state) else state
    elif run_state.supervisor(job) is not None:
        return "RUNNING"
    elif socket.gethostname() in run_state.hosts(run_dir, job_id):
        return None  # its supervisor was on this machine, and has ended
    return "RUNNING" if run_state.has_heartbeat(run_dir, job_id) else None


def _sentence(spec: JobSpec, owner: str) -> str:
    return f"another run uses {spec.run_dir}: {owner}. Wait for it or stop it, or choose another --output_dir."
