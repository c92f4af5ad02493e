"""Writes every rollout of a run to disk and reads it back for replay.

In: the scored groups of a step. Out: ``rollouts.jsonl``, one line per group, all lines of a step in one write; reading
yields groups that are equal in every field. Runs on: the writing trainer rank; any process may read.

A line is ``{"step": ..., "prompt": {...}, "rollouts": [{...}, ...]}`` with the field names of ``types.py``. Floats
round-trip exactly; routed-expert arrays are compressed. A run that was killed while writing leaves a truncated last
line, which readers skip with a warning.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron_fp8rl.types import Completion, Prompt, Rollout, RolloutGroup

_log = logging.getLogger(__name__)
_TAIL_BYTES = 4 << 20  # holds the last line of metrics.jsonl
_STEP = re.compile(rb'\{"step": (\d+)[,}]')  # lines start with the step, so finding one needs no JSON parsing


class RolloutWriter:
    """Appends groups to a file. Not thread-safe; one writer per file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("ab")

    def write(self, step: int, groups: Iterable[RolloutGroup]) -> None:
        """Append the groups of one step and flush them to the operating system."""
        self._file.write("".join(_encode(step, group) + "\n" for group in groups).encode())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_steps(path: Path | str) -> Iterator[tuple[int, tuple[RolloutGroup, ...]]]:
    """Yield (step, groups) in file order.

    Raises ValueError, with file and line, for a line that is not a record; FileNotFoundError if the file is missing.
    """
    step, groups = -1, []
    for number, line in _complete_lines(Path(path)):
        try:
            record = json.loads(line)
            group = _decode(record)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number} is not a recorded group ({type(error).__name__}: {error}); "
                "remove the line, or record the run again"
            ) from error
        if record["step"] != step and groups:
            yield step, tuple(groups)
            groups = []
        step = record["step"]
        groups.append(group)
    if groups:
        yield step, tuple(groups)


def truncate_from(path: Path, step: int) -> int:
    """Truncate a JSON-lines file before its first line of ``step`` or later; return the number of bytes removed.

    Lines begin with ``{"step": n`` and steps never decrease. An incomplete last line is removed whatever its step. What
    is removed is appended to a file beside it first, such as ``metrics.cut.jsonl``.
    """
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
    """(line number from 1, line); a last line without newline, truncated by a kill, is skipped with a warning."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield number, line
            else:
                _log.warning("%s, line %d is truncated: the run was killed during the write; skipped", path, number)


def _encode(step: int, group: RolloutGroup) -> str:
    record = {
        "step": step,
        "prompt": _fields(group.prompt),
        "rollouts": [_encode_rollout(rollout) for rollout in group.rollouts],
    }
    return json.dumps(record, ensure_ascii=False)


def _encode_rollout(rollout: Rollout) -> dict[str, Any]:
    encoded = _fields(rollout)
    del encoded["prompt"]  # the group's
    encoded["completion"] = completion = _fields(rollout.completion)
    experts = rollout.completion.routed_experts
    if experts is not None:
        completion["routed_experts"] = {
            "dtype": experts.dtype.str,
            "shape": experts.shape,
            "zlib_base64": base64.b64encode(zlib.compress(experts.tobytes(), level=1)).decode(),
        }
    return encoded


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _decode(record: dict[str, Any]) -> RolloutGroup:
    fields = record["prompt"]
    sequences = {name: tuple(fields[name]) for name in ("token_ids", "messages") if name in fields}
    prompt = Prompt(**{**fields, **sequences})
    return RolloutGroup(prompt=prompt, rollouts=tuple(_decode_rollout(r, prompt) for r in record["rollouts"]))


def _decode_rollout(encoded: dict[str, Any], prompt: Prompt) -> Rollout:
    completion = encoded["completion"]
    experts = completion["routed_experts"]
    if experts is not None:
        raw = zlib.decompress(base64.b64decode(experts["zlib_base64"]))
        experts = np.frombuffer(raw, dtype=experts["dtype"]).reshape(experts["shape"])
    restored = {
        **completion,
        "token_ids": tuple(completion["token_ids"]),
        "rollout_logprobs": tuple(completion["rollout_logprobs"]),
        "version_spans": tuple(tuple(span) for span in completion["version_spans"]),
        "routed_experts": experts,
    }
    return Rollout(**{**encoded, "prompt": prompt, "completion": Completion(**restored)})
