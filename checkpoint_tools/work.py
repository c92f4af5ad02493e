"""Work in buckets over several processes, with progress and one bound on the memory of each.

In:  a job, and buckets of it. Out: what each bucket recorded, in the journal of the output folder.
The command's process hands out buckets; each worker is a process of its own that ends with it.
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
from checkpoint_tools.strips import MIN_MEMORY_BYTES

BUCKET_BYTES = 256 << 20  # of weights between two lines of the journal
_PLAIN_EVERY_S = 5.0
_MEANINGFUL = 0.01  # share of the bytes after which a speed says something about the rest
_MAX_NAMED = 5
_UNITS = {"K": 10, "M": 20, "G": 30}


@dataclass(frozen=True)
class Bucket:
    """Tensors that are converted together by one worker."""

    index: int
    names: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class WorkOptions:
    """How a conversion runs."""

    workers: int = min(8, os.cpu_count() or 1)
    """Processes that convert at the same time."""
    max_memory: Annotated[str, tyro.conf.arg(metavar="BYTES")] = "512M"
    """Memory for tensors in each worker (K, M, G; at least 64M), besides some 600M of Python and PyTorch."""
    overwrite: bool = False
    """Replace a folder of the output's name, if these tools made it."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"--workers {self.workers}: at least 1 is needed")

    @property
    def memory_bytes(self) -> int:
        text = self.max_memory.strip().upper().removesuffix("B").removesuffix("I")
        try:
            value = int(float(text[:-1]) * (1 << _UNITS[text[-1]])) if text[-1:] in _UNITS else int(text)
        except ValueError as error:
            raise ValueError(
                f"--max_memory {self.max_memory!r}: expected a number of bytes, or one with K, M or G"
            ) from error
        if value < MIN_MEMORY_BYTES:
            raise ValueError(f"--max_memory {self.max_memory!r}: at least {MIN_MEMORY_BYTES >> 20}M are needed")
        return value


class Job(Protocol):
    """One conversion. It travels to the workers, so it pickles."""

    def run(self, bucket: Bucket) -> dict[str, Any]:
        """Convert and verify a bucket; the result (JSON) goes into the journal."""
        ...


def fill_buckets(sizes: Iterable[tuple[str, int]]) -> list[Bucket]:
    """Buckets of at most ``BUCKET_BYTES``, or of one larger tensor, from (name, bytes) in order."""
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
    """Bytes of weights in a result, and those of them that were written by this run of the command."""

    total_bytes: int
    new_bytes: int


def run_buckets(job: Job, buckets: Sequence[Bucket], output: Output, *, workers: int, label: str) -> Volume:
    """Run what the journal does not have yet. The first error of a bucket ends the work; what is done stays.

    Numbers that are not finite are kept as they are, and said on stderr.
    """
    pending = [bucket for bucket in buckets if bucket.index not in output.done]
    volume = Volume(sum(bucket.num_bytes for bucket in buckets), sum(bucket.num_bytes for bucket in pending))
    progress = Progress(label, volume.total_bytes, volume.total_bytes - volume.new_bytes)
    with progress:
        for bucket, result in results(job, pending, workers):
            output.record(bucket.index, result)
            progress.advance(bucket.num_bytes)
    wrong = [name for bucket in buckets for name in output.done[bucket.index].get("not_finite", ())]
    if wrong:
        shown = ", ".join(wrong[:_MAX_NAMED]) + (", ..." if len(wrong) > _MAX_NAMED else "")
        print(f"{label}: warning: {len(wrong)} tensors hold NaN or infinity: {shown}", file=sys.stderr)
    return volume


def results(job: Job, buckets: Sequence[Bucket], workers: int) -> Iterator[tuple[Bucket, dict[str, Any]]]:
    """What each bucket gives, as soon as it is there: in this process with one worker, else in processes of their own.

    Raises the first error of a bucket, and CheckpointError when a worker was killed.
    """
    if workers <= 1 or len(buckets) <= 1:
        for bucket in buckets:
            yield bucket, job.run(bucket)
        return
    # A forked process would inherit the threads' locks and the files of this one.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(buckets)), context, _start_worker, (job, os.getpid()))
    try:
        running = {pool.submit(_run_in_worker, bucket): bucket for bucket in buckets}
        for future in as_completed(running):
            yield running[future], future.result()
    except BrokenProcessPool as error:
        raise CheckpointError(
            "a worker process",
            "was killed, perhaps for its memory; lower --workers or --max_memory. The same command goes on from here",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_job: Job | None = None


def _start_worker(job: Job, parent: int) -> None:
    global _job
    import torch

    # A worker that outlived the command would write into the folder of the next one.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command's process decides
    torch.set_num_threads(1)
    _job = job


def _run_in_worker(bucket: Bucket) -> dict[str, Any]:
    assert _job is not None
    return _job.run(bucket)


class Progress:
    """Bytes, speed and time left: a bar on a terminal, a line every few seconds elsewhere; on stderr."""

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
            print(f"{self._label}: goes on after {gigabytes(self._resumed)} of an interrupted run", file=sys.stderr)
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
        if now - self._last >= _PLAIN_EVERY_S:
            self._last = now
            rate = (self._done - self._resumed) / max(now - self._start, 1e-9)
            said = f"{self._label}: {gigabytes(self._done)} of {gigabytes(self._total)}, {rate / 1e6:.0f} MB/s"
            if self._done - self._resumed > _MEANINGFUL * self._total:
                said += f", {(self._total - self._done) / rate:.0f} s left"
            print(said, file=sys.stderr, flush=True)

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def rate_of(volume: Volume, seconds: float) -> str:
    """How much in which time, for the last lines of a command."""
    speed = f"{seconds:.1f} s ({volume.new_bytes / 1e6 / max(seconds, 1e-9):.0f} MB/s)"
    if volume.new_bytes < volume.total_bytes:
        return f"{gigabytes(volume.total_bytes)}, {gigabytes(volume.new_bytes)} of them now in {speed}"
    return f"{gigabytes(volume.total_bytes)} in {speed}"


def gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"
