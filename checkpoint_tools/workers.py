"""Run the buckets of a conversion in worker processes, with a progress bar and a bound on each worker's memory.

In:  a job and its buckets.
Out: the result of each bucket, in the journal of the output folder.
Runs on: the process of the command and its worker processes, which end with it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Protocol

import tyro

from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.output import Output
from checkpoint_tools.row_chunks import MIN_MEMORY_BYTES

BUCKET_BYTES = 256 << 20  # weights between two lines of the journal
_LINE_INTERVAL_S = 5.0
_MIN_SHARE = 0.01  # of the bytes, before a remaining time is shown
_MAX_SHOWN = 5
_UNITS = {"K": 10, "M": 20, "G": 30}
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Bucket:
    index: int
    names: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Processes and memory of a command."""

    workers: int = min(8, os.cpu_count() or 1)
    """Number of worker processes."""
    max_memory: Annotated[str, tyro.conf.arg(metavar="BYTES")] = "512M"
    """Memory for tensors in each worker (K, M, G; at least 64M). Python and PyTorch take about 600M more."""
    overwrite: bool = False
    """Replace an existing target folder that these tools wrote."""

    def __post_init__(self) -> None:
        require_at_least("workers", self.workers, 1)

    @property
    def memory_bytes(self) -> int:
        text = self.max_memory.strip().upper().removesuffix("B").removesuffix("I")
        try:
            value = int(float(text[:-1]) * (1 << _UNITS[text[-1]])) if text[-1:] in _UNITS else int(text)
        except ValueError as error:
            message = f"--max_memory {self.max_memory!r}: expected a number of bytes, such as 512M (K, M or G)"
            raise ValueError(message) from error
        if value < MIN_MEMORY_BYTES:
            raise ValueError(f"--max_memory {self.max_memory!r}: at least {MIN_MEMORY_BYTES >> 20}M are needed")
        return value


def require_at_least(option: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ValueError(f"--{option} {value}: at least {minimum} is needed")


class Job(Protocol):
    """Work on one bucket at a time. Workers receive a pickled copy."""

    def run(self, bucket: Bucket) -> dict[str, Any]:
        """Process a bucket; the result is JSON."""
        ...


def fill_buckets(sizes: Iterable[tuple[str, int]]) -> list[Bucket]:
    """Divide (name, bytes) in order into buckets of at most ``BUCKET_BYTES``; a larger tensor gets its own bucket."""
    buckets: list[Bucket] = []
    members: list[str] = []
    total = 0
    for name, num_bytes in sizes:
        if members and total + num_bytes > BUCKET_BYTES:
            buckets.append(Bucket(len(buckets), tuple(members), total))
            members, total = [], 0
        members.append(name)
        total += num_bytes
    return [*buckets, Bucket(len(buckets), tuple(members), total)] if members else buckets


class Volume(NamedTuple):
    """Bytes of weights in a result, and how many of them this run of the command wrote."""

    total_bytes: int
    new_bytes: int


def run_buckets(job: Job, buckets: Sequence[Bucket], output: Output, *, workers: int, label: str) -> Volume:
    """Run the buckets that the journal lacks. The first error stops the work; finished buckets stay. A warning on
    stderr names tensors with NaN or infinity, which are converted like others."""
    pending = [bucket for bucket in buckets if bucket.index not in output.done]
    volume = Volume(sum(bucket.num_bytes for bucket in buckets), sum(bucket.num_bytes for bucket in pending))
    with Progress(label, volume.total_bytes, volume.total_bytes - volume.new_bytes) as progress:
        for bucket, result in run_jobs(job, pending, workers):
            output.record(bucket.index, result)
            progress.advance(bucket.num_bytes)
    not_finite = [name for bucket in buckets for name in output.done[bucket.index].get("not_finite", ())]
    if not_finite:
        shown = ", ".join(not_finite[:_MAX_SHOWN]) + (", ..." if len(not_finite) > _MAX_SHOWN else "")
        print(f"{label}: warning: {len(not_finite)} tensors have NaN or infinity: {shown}", file=sys.stderr)
    return volume


def run_jobs(job: Job, buckets: Sequence[Bucket], workers: int) -> Iterator[tuple[Bucket, dict[str, Any]]]:
    """Yield each bucket with its result when it is done. One worker runs in this process. Raises the first error of a
    bucket, and CheckpointError when a worker was killed."""
    if workers <= 1 or len(buckets) <= 1:
        for bucket in buckets:
            yield bucket, job.run(bucket)
        return
    # A forked process would inherit this process's locks and open files.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(buckets)), context, _start_worker, (job, os.getpid()))
    try:
        running = {pool.submit(_run_in_worker, bucket): bucket for bucket in buckets}
        for future in as_completed(running):
            yield running[future], future.result()
    except BrokenProcessPool as error:
        raise CheckpointError(
            "a worker process",
            "was killed, perhaps for its memory. Lower --workers or --max_memory; the same command continues the work",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_job: Job | None = None


def _start_worker(job: Job, parent: int) -> None:
    global _job
    import torch

    # A worker that outlives the command could write into the folder of the next command.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles it
    torch.set_num_threads(1)
    _job = job


def _run_in_worker(bucket: Bucket) -> dict[str, Any]:
    assert _job is not None
    return _job.run(bucket)


class Progress:
    """Shows bytes, speed and time left on stderr: a bar on a terminal, else a line every five seconds."""

    def __init__(
        self, label: str, total_bytes: int, done_bytes: int = 0, *, clock: Callable[[], float] = time.monotonic
    ):
        self._label, self._total, self._done, self._resumed = label, total_bytes, done_bytes, done_bytes
        self._clock = clock
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        self._start = self._last = self._clock()
        if self._resumed:
            resumed = format_bytes(self._resumed)
            print(f"{self._label}: continues after {resumed} of an interrupted run", file=sys.stderr)
        if sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            columns = (
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.DownloadColumn(),
                progress.TransferSpeedColumn(),
                progress.TimeRemainingColumn(elapsed_when_finished=True),
            )
            self._bar = progress.Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task(self._label, total=self._total, completed=self._done)
            self._bar.start()
        return self

    def advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        if self._bar is not None:
            self._bar.update(self._task, advance=num_bytes)
            return
        now = self._clock()
        if now - self._last >= _LINE_INTERVAL_S:
            self._last = now
            rate = (self._done - self._resumed) / max(now - self._start, 1e-9)
            line = f"{self._label}: {format_bytes(self._done)} of {format_bytes(self._total)}, {rate / 1e6:.0f} MB/s"
            if self._done - self._resumed > _MIN_SHARE * self._total:
                line += f", {(self._total - self._done) / rate:.0f} s left"
            print(line, file=sys.stderr, flush=True)

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def format_rate(volume: Volume, seconds: float) -> str:
    speed = f"{seconds:.1f} s ({volume.new_bytes / 1e6 / max(seconds, 1e-9):.0f} MB/s)"
    if volume.new_bytes < volume.total_bytes:
        return f"{format_bytes(volume.total_bytes)}, {format_bytes(volume.new_bytes)} of them now in {speed}"
    return f"{format_bytes(volume.total_bytes)} in {speed}"


def format_bytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"
