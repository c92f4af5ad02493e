"""Runs jobs on the GPUs of this machine, side by side, within a time, and remembers what they came to.

In: jobs in their order, the GPUs, a file of states. Out: an outcome for each job that was started, a log for each.

A job has a log and GPUs of its own, but that light jobs share one with each other. Ports need no care: whoever serves
binds port 0. Nor do tables of results and docs/measured.md: whoever writes them locks them. The first job that waits
for more GPUs than are free is not overtaken. What a job started has ended before its GPUs go to the next one.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from benchmarks.job_logs import Outcome, read
from benchmarks.jobs import Job
from benchmarks.process_tree import ProcessTree

GRACE_S = 10.0  # between a request to end and a kill
END_S = 30.0  # kept free at the end of a budget: to end what runs, and for the summary
MAX_LIGHT = 5  # light jobs on one GPU at a time
_POLL_S = 0.3


class States:
    """Outcomes of this and earlier calls, by name. One holds for its own command on its own kind of GPU."""

    def __init__(self, path: Path, device: str):
        self._path, self._device = path, device
        self._entries = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def status(self, job: Job) -> str:
        """passed, failed, part, cut, or "" for none."""
        entry = self._entries.get(job.name, {})
        holds = entry.get("arguments") == list(job.arguments) and entry.get("device") == self._device
        return entry["status"] if holds else ""

    def keep(self, job: Job, outcome: Outcome) -> None:
        entry = asdict(outcome) | {"arguments": job.arguments, "device": self._device, "unix_s": round(time.time())}
        self._entries[job.name] = entry
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_name(f"{self._path.name}.partial")
        partial.write_text(json.dumps(self._entries, indent=1), encoding="utf-8")
        partial.replace(self._path)

    def forget(self) -> None:
        self._entries = {}


@dataclass
class _Running:
    job: Job
    gpus: list[str]
    tree: ProcessTree
    log: IO[bytes]
    began: float
    end: float  # by its limit, on the clock of time.monotonic


class JobRunner:
    """``budget_s`` seconds are for everything; None: no end. ``is_stopped`` is asked several times a second."""

    def __init__(
        self,
        gpus: Sequence[str],
        states: States,
        logs: Path,
        *,
        budget_s: float | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
        end_s: float = END_S,
    ):
        self._free, self._num_gpus = list(gpus), len(gpus)
        self._lost: set[str] = set()  # kept by a process that cannot be killed
        self._states, self._logs = states, logs
        self._started = time.monotonic()
        self._end = None if budget_s is None else self._started + budget_s - end_s
        self._is_stopped = is_stopped
        self._running: list[_Running] = []
        self.outcomes: list[Outcome] = []
        self.left_out: dict[str, str] = {}  # name -> why it was not started

    def run(self, jobs: Sequence[Job]) -> None:
        """All jobs that fit. Whatever happens, no process of theirs is left behind."""
        waiting = list(jobs)
        try:
            while True:
                for one in list(self._running):
                    self._look_at(one)
                if self._is_stopped() or self._left_s() <= 0:
                    break
                self._start_some(waiting)
                if not self._running and not waiting:
                    return
                time.sleep(_POLL_S)
            self.left_out |= {job.name: "the time was over" for job in waiting}
        finally:
            cut = [one for one in self._running if one.tree.poll() is None]
            for one in cut:
                one.tree.ask()
            for one in list(self._running):
                self._finish(one, cut=one in cut)

    def _left_s(self) -> float:
        return float("inf") if self._end is None else self._end - time.monotonic()

    def _start_some(self, waiting: list[Job]) -> None:
        for job in list(waiting):
            if job.num_gpus > self._num_gpus:
                self._leave_out(waiting, job, f"needs {job.num_gpus} GPUs")
            elif self._left_s() < job.least_s:
                self._leave_out(waiting, job, f"needs {job.least_s:.0f} s, {self._left_s():.0f} s are left")
            elif job.num_gpus > len({*self._free, *(gpu for one in self._running for gpu in one.gpus)}):
                self._leave_out(waiting, job, "a process that cannot be killed keeps its GPU")
            elif gpus := self._gpus_for(job, waiting):
                waiting.remove(job)
                self._start(job, gpus)
            elif not job.is_light:
                break

    def _gpus_for(self, job: Job, waiting: Sequence[Job]) -> list[str]:
        """GPUs to start a job on now: free ones, or one that other light jobs use; none while there are too few.

        Light jobs take a second GPU when no other jobs wait for it.
        """
        if job.is_light:
            shared = Counter(one.gpus[0] for one in self._running if one.job.is_light)
            if found := [gpu for gpu, count in shared.items() if count < MAX_LIGHT and gpu not in self._lost]:
                return found[:1]
            if shared and not all(other.is_light for other in waiting):
                return []
        return self._free[: job.num_gpus] if job.num_gpus <= len(self._free) else []

    def _leave_out(self, waiting: list[Job], job: Job, why: str) -> None:
        waiting.remove(job)
        self.left_out[job.name] = why

    def _start(self, job: Job, gpus: list[str]) -> None:
        self._free = [gpu for gpu in self._free if gpu not in gpus]
        seconds = min(job.limit_s, self._left_s())
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self.log_path(job).open("wb")
        self._say("start", f"{job.name} on GPU {', '.join(gpus)}")
        tree = ProcessTree.start(job.command(seconds), log, self._environment(job, gpus))
        now = time.monotonic()
        self._running.append(_Running(job, gpus, tree, log, now, now + job.limit_s))

    def log_path(self, job: Job) -> Path:
        return self._logs / f"{job.name}.log"

    def _environment(self, job: Job, gpus: Sequence[str]) -> dict[str, str]:
        share = (os.cpu_count() or 1) * job.num_gpus // self._num_gpus // (MAX_LIGHT if job.is_light else 1)
        threads = {} if job.module == "pytest" else {"OMP_NUM_THREADS": str(max(1, share))}  # tests take one each
        return threads | os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "PYTHONUNBUFFERED": "1"}

    def _look_at(self, one: _Running) -> None:
        if one.tree.poll() is not None:
            self._finish(one)
        elif time.monotonic() > one.end:
            self._finish(one, late=f"no end within its limit of {one.job.limit_s:.0f} s")

    def _finish(self, one: _Running, *, late: str = "", cut: bool = False) -> None:
        """End what is left of a job, read its log, keep its outcome and free its GPUs."""
        code = one.tree.poll()
        seconds = round(time.monotonic() - one.began, 1)
        self._running.remove(one)
        try:
            one.tree.end(GRACE_S)
            shared = {gpu for other in self._running for gpu in other.gpus}
            self._free = sorted({*self._free, *one.gpus} - shared - self._lost)
        except RuntimeError as error:  # its GPUs stay taken
            self._lost |= set(one.gpus)
            late = str(error)
        one.log.close()
        text = self.log_path(one.job).read_text(encoding="utf-8", errors="replace")
        outcome = read(one.job.name, text, code, seconds, late=late, cut=cut)
        self._states.keep(one.job, outcome)
        self.outcomes.append(outcome)
        self._say(outcome.status, f"{outcome.name} in {seconds:.0f} s: {outcome.note}")

    def _say(self, what: str, text: str) -> None:
        print(f"{time.monotonic() - self._started:5.0f} s  {what:7s} {text}", flush=True)
