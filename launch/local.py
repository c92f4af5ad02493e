"""Runs a job without Slurm: a supervisor process, and one agent per node of the job on this machine.

``python -m launch.local JOB.json`` is the supervisor. It starts the agents, forwards signals, restarts the agents at
most ``max_restarts`` times, and exits with their status. Its session is separate from the terminal, so it survives the
terminal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from launch import outcome
from launch.peers import Board, Place
from launch.roles import format_exit_status, kill_leftovers
from launch.spec import SAVED, JobSpec, attempt_dir, launch_dir, record_job, spec_file

_ROOT = Path(__file__).parents[1]
_POLL_S = 0.2
_GRACE_S = 120.0  # for the other agents after the first has ended, beside the time to save


def start(spec: JobSpec, *, cluster_name: str) -> tuple[str, subprocess.Popen[bytes]]:
    """(job id, supervisor process), which outlives this process. Raises OSError if the folder is not writable."""
    folder = launch_dir(spec.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    name = f"local-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    log_path, job = folder / f"{name}.out", spec.save(spec_file(spec.run_dir, name))
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "launch.local", job],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": _python_path()},
        )
    job_id = f"local-{process.pid}"
    files = {"folder": str(folder), "script": str(log_path), "file": job}
    record_job(spec, job_id=job_id, cluster=cluster_name, kind="local", **files)
    return job_id, process


def supervise(spec: JobSpec, job: str) -> int:
    """Run all attempts of the job in the file ``job``; return the exit status."""
    job_id = f"local-{os.getpid()}"
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda received, _: signals.append(received))
    for attempt in range(spec.max_restarts + 1):
        status = _attempt(spec, job, job_id, attempt, signals)
        print(f"launch: attempt {attempt} of job {job_id} ended with status {status}", flush=True)
        received = len(signals)  # later signals are for the next attempt
        if status != SAVED or any(number != signal.SIGUSR1 for number in signals[:received]):
            return status
        del signals[:received]
    print(f"launch: max_restarts = {spec.max_restarts} attempts are used up; start it again", flush=True)
    return status


def _attempt(spec: JobSpec, job: str, job_id: str, attempt: int, signals: list[int]) -> int:
    """Run one agent per node; return the status that they agreed on, or the first failure."""
    agents = []
    for node in range(spec.nodes):
        place = {"LAUNCH_JOB": job_id, "LAUNCH_ATTEMPT": str(attempt), "LAUNCH_NODE": str(node)}
        env = {**os.environ, **place, "LAUNCH_NODES": str(spec.nodes), "PYTHONPATH": _python_path()}
        # Blocked until the agent installs its handlers: a signal would kill Python while it starts.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1})
        try:
            agents.append(subprocess.Popen([sys.executable, "-m", "launch.agent", job], env=env))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    sent = 0
    deadline = None
    while any(agent.poll() is None for agent in agents):
        for number in signals[sent:]:
            for agent in agents:
                if agent.poll() is None:
                    agent.send_signal(number)
        sent = len(signals)
        if deadline is None and any(agent.poll() is not None for agent in agents):
            deadline = time.monotonic() + spec.save_signal_s + _GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            for node, agent in enumerate(agents):
                if agent.poll() is None:
                    late = f"{spec.save_signal_s + _GRACE_S:.0f} s after the first ended"
                    print(f"launch: the agent of node {node} is killed, {late}", flush=True)
                    agent.kill()
        time.sleep(_POLL_S)
    kill_leftovers(spec.run_dir, job_id)
    if killed := [node for node, agent in enumerate(agents) if agent.returncode < 0]:
        _conclude(spec, job_id, attempt, killed[0], agents[killed[0]].returncode)
    with contextlib.suppress(OSError, ValueError):
        return int((attempt_dir(spec.run_dir, job_id, attempt) / "done").read_text())
    return next((agent.returncode for agent in agents if agent.returncode), 0) & 0xFF


def _conclude(spec: JobSpec, job_id: str, attempt: int, node: int, status: int) -> None:
    """Decide the outcome for an agent that was killed, unless another agent has decided it."""
    place = Place(job=job_id, attempt=attempt, node=node, num_nodes=spec.nodes, is_slurm=False)
    with contextlib.suppress(OSError):
        board = Board(spec.run_dir, place)
        reason = f"the agent of node {node} was killed by {format_exit_status(status)}"
        board.note_lost(node, time.time(), reason)
        outcome.conclude(spec, board, "failed", reason)


def _python_path() -> str:
    inherited = os.environ.get("PYTHONPATH")
    return f"{_ROOT}:{inherited}" if inherited else str(_ROOT)


if __name__ == "__main__":
    sys.exit(supervise(JobSpec.load(sys.argv[1]), sys.argv[1]))
