"""Reads and truncates files with a line of JSON for each step, such as ``metrics.jsonl``, and writes JSON files.

A line begins with ``{"step": n``, and steps never decrease. A killed run can leave a truncated last line, which readers
skip with a warning.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_fp8rl.data.checkpoint_dir import errors_name

_log = logging.getLogger(__name__)
_TAIL_BYTES = 4 << 20  # holds the last line of metrics.jsonl
_STEP = re.compile(rb'\{"step": (\d+)[,}]')  # lines start with the step, so finding one needs no JSON parsing


def truncate_from(path: Path, step: int) -> int:
    """Truncate a JSON-lines file before its first line of ``step`` or later and before an incomplete last line; return
    the bytes removed. First appends them to ``metrics.cut.jsonl`` or the like."""
    if not path.exists():
        return 0
    keep = 0
    with path.open("rb") as file:
        for line in file:
            match = _STEP.match(line)
            if match is None or int(match[1]) >= step or not line.endswith(b"\n"):
                break
            keep += len(line)
    cut = path.stat().st_size - keep
    if cut:
        with path.open("rb") as file, path.with_suffix(".cut.jsonl").open("ab") as aside:
            file.seek(keep)
            shutil.copyfileobj(file, aside)
            aside.flush()
            os.fsync(aside.fileno())
        os.truncate(path, keep)
    return cut


def last_step(path: Path) -> int:
    """The step of the last complete line of a JSON-lines file; -1 if there is none."""
    step = -1
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        for line in file:
            if (match := _STEP.match(line)) and line.endswith(b"\n"):
                step = int(match[1])
    return step


def read_json_lines(path: Path | str) -> list[dict[str, Any]]:
    """All complete lines of a JSON-lines file such as ``metrics.jsonl``. Raises ValueError with file and line."""
    records = []
    for number, line in _complete_lines(Path(path)):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON ({error}); remove the line") from error
    return records


def _complete_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, line); skips a truncated last line with a warning."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield number, line
            else:
                _log.warning("%s, line %d is truncated: the run was killed during the write; skipped", path, number)


def write_text(path: Path, text: str) -> None:
    """Write a temporary file and rename it, so that readers never see a partial file."""
    temporary = path.with_name(f".{path.name}.tmp")
    with errors_name(path):
        temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=2, default=str) + "\n")
