"""What the log of a job says: whether it did its work, in one line, and where it failed, in a dozen.

In: text of a log, exit status, how the job ended. Out: an Outcome. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_LINES = 12
MAX_WIDTH = 220
_TESTS = re.compile(r"^=*\s*((?:\d+ \w+, )*\d+ \w+ in [\d.]+s)\b")
_OUT_OF_TIME = re.compile(r"^SKIPPED .*(?:budget is spent|nearly over|s are left; run)")
_CAUSE = re.compile(r"\w(?:Error|Exception|Mismatch)(?:: |$)|CUDA error|out of memory|Segmentation fault|Killed")
_TELLING = re.compile(rf"^E  |^(?:FAILED|ERROR|SKIPPED)\b|^\S+:\d+: in |\bassert\b|{_CAUSE.pattern}")
_NOISE = re.compile(r"[Ww]arning|DEPRECAT|deprecat|^RESULT |cannot be retrieved")


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    passed: all of it was done. failed: a test, a row or the program failed, or it took too long. part: it stopped in
    time by itself with more to do. cut: it was ended because the time of all jobs was over.
    """

    name: str
    status: str
    seconds: float
    note: str
    lines: tuple[str, ...] = ()  # where it failed


def read(name: str, text: str, code: int | None, seconds: float, *, late: str = "", cut: bool = False) -> Outcome:
    """``code``: exit status. ``late``: the limit that it exceeded. ``cut``: it was ended without a fault of its own."""
    lines = text.splitlines()
    rows = _rows(lines)
    errors = [f"row failed: {row.get('error') or json.dumps(row)}" for row in rows if _is_failure(row)]
    failures = [line for line in lines if line.startswith("FAILED ")]
    tests = next((found[1] for line in reversed(lines) if (found := _TESTS.match(line))), "")
    note = tests or (f"{len(rows)} row{'s' * (len(rows) != 1)}" if rows else _last(lines) or "no output")
    if cut:
        return Outcome(name, "cut", seconds, note)
    nothing_ran = bool(tests) and "passed" not in tests and code in (0, 5)
    if code != 0 or late or errors or failures or nothing_ran:
        named = [late, *errors, *([] if tests else failures), first_cause(lines), f"exit status {code}; {note}"]
        first = next(filter(None, named))
        found = [*map(_cut, errors[:4]), *telling(lines)] or list(map(_cut, lines[-3:]))
        note = f"no test ran: {tests}" if nothing_ran else f"{tests}: {first}" if tests else first
        return Outcome(name, "failed", seconds, _cut(note), tuple(found[:MAX_LINES]))
    if left := sum(bool(_OUT_OF_TIME.match(line)) for line in lines):
        return Outcome(name, "part", seconds, f"{note}; {left} left for the next call")
    return Outcome(name, "passed", seconds, note)


def first_cause(lines: Sequence[str]) -> str:
    """The first error: of a test where there is one."""
    tests = [line[1:].strip() for line in lines if line.startswith("E  ")]
    causes = [line.strip() for line in lines if _CAUSE.search(line) and not _NOISE.search(line)]
    return _cut(next(iter([*tests, *causes]), ""))


def telling(lines: Sequence[str]) -> tuple[str, ...]:
    """At most MAX_LINES lines that name errors: the first ones, and the last; what differs in numbers alone once."""
    found: dict[str, str] = {}
    for line in lines:
        if _TELLING.search(line) and not _NOISE.search(line):
            found.setdefault(re.sub(r"\d+", "0", line), _cut(line.rstrip()))
    kept = list(found.values())
    if len(kept) > MAX_LINES:
        kept = kept[: MAX_LINES - 4] + kept[-4:]
    return tuple(kept)


def _rows(lines: Sequence[str]) -> list[dict[str, Any]]:
    found = []
    for line in lines:
        if line.startswith("RESULT {"):
            try:
                found.append(json.loads(line.removeprefix("RESULT ")))
            except json.JSONDecodeError:  # cut short, or another process wrote into it
                found.append({})
    return found


def _is_failure(row: dict[str, Any]) -> bool:
    return "error" in row or row.get("outcome") == "FAILED"


def _last(lines: Sequence[str]) -> str:
    return _cut(next((line.strip() for line in reversed(lines) if line.strip() and not _NOISE.search(line)), ""))


def _cut(line: str) -> str:
    return line if len(line) <= MAX_WIDTH else line[: MAX_WIDTH - 3] + "..."
