"""Run a benchmark: each arm in its own processes, rows to a file, and a table to the page docs/performance.md.

Rows from a GPU go to benchmarks/results/NAME.jsonl. Rows from a CPU, from ``--quick`` or with ``--folder`` stay in that
folder, with their table.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.process_tree import run_logged
from benchmarks.record import FOLDER, KEPT, Results, Row


class Benchmark(ABC):
    """What a program measures. An arm is a row of JSON with the fields that identify it."""

    name: str  # of the program and of its rows
    title: str
    keys: tuple[str, ...]  # fields that identify a measurement
    about: str  # the docstring of the program
    limit_s = 600.0  # for one arm

    @abstractmethod
    def arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of this benchmark."""

    def settle(self, options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:  # noqa: B027  may stay empty
        """Complete the options, also for ``options.quick``. Calls ``parser.error`` for a contradiction."""

    @abstractmethod
    def arms(self, options: argparse.Namespace) -> Iterable[Row]:
        """The arms to measure, in this order."""

    def measure(self, arm: Row, options: argparse.Namespace) -> Iterator[Row]:
        """Rows of one arm. Of several ranks, only rank 0 reports. A row with ``error`` is a failure."""
        raise NotImplementedError

    def ranks(self, arm: Row) -> int:
        return 1

    def gpus(self, arm: Row) -> int:
        return 1

    def is_wrong(self, row: Row) -> bool:
        return False

    def line(self, row: Row) -> Row:
        raise NotImplementedError

    def order(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The rows in the order of the table."""
        return rows

    def table(self, rows: Sequence[Row]) -> str:
        return record.table([{"run": row["run"]} | self.line(row) for row in self.order(rows)])

    def notes(self, rows: Sequence[Row]) -> str:
        return ""

    def rows_of(self, arm: Row, options: argparse.Namespace, log: Path) -> Iterator[Row]:
        """Rows of one arm, measured in new processes."""
        out = log.with_suffix(".jsonl")
        out.unlink(missing_ok=True)
        command = ["-m", f"benchmarks.{self.name}", "--worker", json.dumps(arm), str(out.resolve()), *options.argv]
        environment = {}
        if (ranks := self.ranks(arm)) > 1:
            command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *command]
            environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // (2 * ranks)))
        ended_well = run_logged([sys.executable, *command], log, options.run_limit_s, **environment)
        lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
        yield from map(json.loads, lines)
        if not ended_well or not lines:
            yield arm | {"error": failure_in(log, options.run_limit_s)}


def num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device_name() -> str:
    return record.gpus()[0][0] if num_gpus() else "cpu"


def failure_in(log: Path, limit_s: float) -> str:
    """The first error in a log, in one line; of a configuration, with its mistakes."""
    text = log.read_text(encoding="utf-8", errors="replace")
    cause = re.search(r".*(\w(Error|Exception|Mismatch): .*|mistakes? in the conf.*(\n +\d+\. .*)*)", text)
    return " ".join(cause[0].split())[:300] if cause else f"no result within {limit_s:.0f} s; see {log}"


def parse(benchmark: Benchmark, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{benchmark.name}",
        description=benchmark.about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    benchmark.arguments(parser)
    parser.add_argument("--quick", action="store_true", help="about a minute, with or without a GPU")
    parser.add_argument("--table", action="store_true", help="write the table of all rows again; measure nothing")
    parser.add_argument("--run-limit-s", type=float, default=benchmark.limit_s, help="kill an arm after this time")
    parser.add_argument("--run", metavar="LETTER", help="add rows to this run of the same machine, day and commit")
    parser.add_argument("--folder", type=Path, default=FOLDER / benchmark.name, help="folder of logs and runs")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.argv = list(sys.argv[1:] if argv is None else argv)
    benchmark.settle(options, parser)
    return options


def main(benchmark: Benchmark, argv: Sequence[str] | None = None) -> int:
    """Measure all arms and write the table. Exit status 0: success; 1: an arm failed or was wrong; 2: too few GPUs, or
    no such run."""
    options = parse(benchmark, argv)
    if options.worker:
        return _work(benchmark, json.loads(options.worker[0]), Path(options.worker[1]), options)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # arms end with this process
    is_default = options.folder == FOLDER / benchmark.name and not options.quick
    is_kept = is_default and (options.table or num_gpus() > 0)
    path = (KEPT if is_kept else options.folder) / f"{benchmark.name}.jsonl"
    try:
        results = Results(path, benchmark.keys, options.run)
    except ValueError as error:
        print(f"benchmarks.{benchmark.name}: {error}", file=sys.stderr)
        return 2
    failed = 0 if options.table else _measure_all(benchmark, options, results)
    if rows := results.rows():
        shown, path = rows, options.folder / record.PAGE.name
        if is_kept:
            shown, path = record.not_superseded(benchmark.name, rows), record.PAGE
        record.replace(benchmark.name, section(benchmark, shown), path)
        print(f"the table is in {path}", flush=True)
    return failed


def section(benchmark: Benchmark, rows: Sequence[Row]) -> str:
    """Markdown of a section: the table, its notes, and the origin of its rows."""
    parts = [f"## {benchmark.title}", benchmark.table(rows), benchmark.notes(rows), record.runs(rows)]
    return "\n\n".join(part.strip() for part in parts if part.strip())


def _measure_all(benchmark: Benchmark, options: argparse.Namespace, results: Results) -> int:
    status = 0
    for number, arm in enumerate(benchmark.arms(options), 1):
        text = " ".join(str(value) for value in arm.values())
        if (needed := benchmark.gpus(arm)) > num_gpus():
            message = f"{text} needs {needed} GPU{'s' * (needed > 1)}; this machine has {num_gpus()}"
            print(f"benchmarks.{benchmark.name} of {message}", file=sys.stderr)
            status = status or 2
            continue
        log = options.folder / f"{number}-{re.sub(r'[^A-Za-z0-9.+]+', '-', text)[:100]}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        print(f"{text} begins; log {log}", flush=True)
        for row in benchmark.rows_of(arm, options, log):
            row = {**row, "device": device_name()}
            if "error" in row:
                print(f"FAILED {text}: {row['error']}", flush=True)
            if "error" in row or benchmark.is_wrong(results.add(row)):
                status = 1
    return status


def _work(benchmark: Benchmark, arm: Row, out: Path, options: argparse.Namespace) -> int:
    """Entry point of the processes that :meth:`Benchmark.rows_of` starts."""
    if not num_gpus():
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # before Megatron-Core is imported
    for row in benchmark.measure(arm, options):
        if os.environ.get("RANK", "0") == "0":
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    return 0


def reason(error: BaseException, limit: int = 300) -> str:
    """The most useful line of a long message: a rejected kernel, the last exception, or the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kernels = [line[line.index("UnwritableKernel: ") :] for line in lines if "UnwritableKernel: " in line]
    exceptions = [line for line in lines[1:] if "Error: " in line or "Exception: " in line]
    return f"{type(error).__name__}: {(kernels or exceptions[::-1] or lines or [''])[0][:limit]}"


def choices(parser: argparse.ArgumentParser, name: str, of: Iterable[Any], default: Sequence[Any], **more: Any) -> None:
    """Add an option that takes one or more values of a list."""
    parser.add_argument(name, nargs="+", choices=list(of), default=list(default), **more)
