"""Rows of a benchmark that add up over several invocations, and what a GPU can do at best.

A benchmark writes one JSON line per row as soon as it has it, so that a run which is cut short loses nothing, and makes
its table from the newest row of every key. Several programs may write to one file at a time.
"""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.process_tree import ProcessTree

Row = dict[str, Any]

FOLDER = Path("runs/benchmarks")
KEPT = Path("docs/measured")  # rows behind the tables of docs/measured.md, part of the repository

# Bytes per second of device memory, from the vendor's data sheets, by a word of the name that the driver reports.
_PEAK_BANDWIDTH = {"H200": 4.8e12, "H100": 3.35e12, "B200": 8.0e12, "A100": 2.04e12}


class Results:
    """Rows in a file of JSON lines. ``keys`` are the fields that tell one measurement from another.

    Rows that a GPU measured are kept in ``KEPT``, unless the file is not in ``FOLDER``, where all go by default.
    """

    def __init__(self, path: Path | str, keys: Sequence[str]):
        self.path = Path(path)
        self.kept = KEPT / self.path.name if self.path.parent == FOLDER else self.path
        self._keys = tuple(keys)
        self._letter: str | None = None  # of the rows of this invocation

    def rows(self) -> list[Row]:
        """The newest row of each key, in the order in which the keys first came."""
        newest: dict[tuple, Row] = {}
        for path in dict.fromkeys((self.kept, self.path)):
            if path.exists():
                with locked(path):
                    lines = path.read_text(encoding="utf-8").splitlines()
                newest |= {self.key(row): row for row in map(json.loads, lines)}
        return list(newest.values())

    def add(self, row: Row) -> None:
        """Append a row with the letter and the stamp of this invocation, and print it as ``RESULT {...}``."""
        if "run" not in row:
            self._letter = self._letter or next_letter(found.get("run") for found in self.rows())
            row = {**row, "run": self._letter, "stamp": stamp()}
        path = self.kept if "NVIDIA" in row.get("device", "") else self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(row)
        with locked(path), path.open("ab", buffering=0) as file:
            file.write(f"{text}\n".encode())  # in one piece, which a kill does not divide
        print("RESULT", text, flush=True)

    def has(self, row: Row) -> bool:
        """Whether there is a row of this key that is not a failure."""
        return any(self.key(found) == self.key(row) and "error" not in found for found in self.rows())

    def key(self, row: Row) -> tuple:
        return tuple(json.dumps(row.get(name), sort_keys=True) for name in self._keys)


def next_letter(taken: Iterable[str | None]) -> str:
    """The first of A, B, ..., Z, AA, AB, ... behind all that are taken."""
    letters = [letter for letter in taken if letter]
    last = max(letters, key=lambda letter: (len(letter), letter), default="")
    head, tail = last[:-1], last[-1:]
    if not last:
        return "A"
    return head + chr(ord(tail) + 1) if tail != "Z" else (next_letter([head]) if head else "A") + "A"


@cache
def stamp() -> Row:
    """Where the rows of this invocation come from: date, commit, hardware and versions, host, command."""
    from benchmarks import record

    root = Path(__file__).parents[1]

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=60)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short", "HEAD") or "unknown"
    if git("status", "--porcelain", "--untracked-files=no", "--", "*.py", "*.cu", "*.h"):
        commit += " with changes"
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit,
        "machine": record.machine(),
        "host": f"{os.cpu_count()} cores",
        "command": record.command(),
    }


_held: set[Path] = set()  # by this process


@contextmanager
def locked(path: Path, deadline_s: float = 60.0) -> Iterator[None]:
    """No other process of this user on this machine is in such a block for the same file at the same time.

    A block within a block for the same file waits for nobody. Raises TimeoutError when the file is in another's hands
    for ``deadline_s``. For one thread of a process.
    """
    if (path := path.resolve()) in _held:
        yield
        return
    deadline = time.monotonic() + deadline_s
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:16]
    with open(Path(tempfile.gettempdir()) / f"megatron_fp8rl-{os.getuid()}-{digest}.lock", "a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    message = f"{path}: another process has held its lock {file.name} for {deadline_s:g} s"
                    raise TimeoutError(message) from None
                time.sleep(0.02)
        _held.add(path)
        try:
            yield
        finally:
            _held.remove(path)


def num_gpus() -> int:
    """GPUs that this process may use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device_name() -> str:
    """What rows call the device that measured them."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def require_gpus(needed: int, what: str) -> None:
    """Exit with status 2 when this machine has fewer GPUs than ``what`` needs."""
    found = num_gpus()
    if found < needed:
        print(f"{what} needs {needed} GPU{'s' if needed > 1 else ''}; this machine has {found}", file=sys.stderr)
        raise SystemExit(2)


def peak_bandwidth(device_name: str) -> float | None:
    """Bytes per second of the memory of a GPU by its data sheet; None for one that is not listed."""
    return next((value for word, value in _PEAK_BANDWIDTH.items() if word in device_name), None)


def copy_bandwidth(num_bytes: int = 2 << 30, rounds: int = 10) -> float:
    """Bytes per second that a copy within the current GPU's memory reads and writes together; best of ``rounds``."""
    import torch

    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = min(timed(lambda: target.copy_(source)) for _ in range(rounds))
    del source, target
    torch.cuda.empty_cache()
    return 2 * num_bytes / seconds


def timed(work: Any) -> float:
    """Seconds of ``work()``, what it started on the GPU included."""
    import torch

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def run_logged(command: Sequence[str], log_path: Path, deadline_s: float, **environment: str) -> bool:
    """Run a command with its output in ``log_path``; whether it ended well within ``deadline_s``.

    Too late a command is asked to end and killed 15 s later. What it started ends with it in any case.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        tree = ProcessTree.start(command, log, {**os.environ, **environment})
        status = tree.wait(deadline_s)
        tree.end(15.0)
    return status == 0


def on_ranks(world_size: int, module: str, *words: str) -> tuple[list[str], dict[str, str]]:
    """(command, variables to add to its environment) of a program on ranks of this machine, which share its cores."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    threads = str(max(1, (os.cpu_count() or 1) // (2 * world_size)))
    return [*command, "-m", module, *words], {"OMP_NUM_THREADS": threads}


def failure_in(log_path: Path, deadline_s: float) -> str:
    """The first error that a log names, in one line."""
    lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    causes = [line.strip() for line in lines if re.search(r"\w(Error|Exception|Mismatch): |mistakes? in the conf", line)]
    return causes[0][-300:] if causes else f"no result within {deadline_s:.0f} s; see {log_path}"
