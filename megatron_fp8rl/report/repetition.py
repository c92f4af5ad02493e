"""Compares the results of two runs value by value: whether one run repeats the other.

In: two run folders, finished or not. Out: the number of equal values, or the first value that differs, and what in the
configurations and versions can explain it. Times, memory, speed and how requests were served are not compared.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fp8rl.observe.recording import FOLDER, read_step, steps_of
from megatron_fp8rl.report.run_data import RunData
from megatron_fp8rl.token_array import TokenArray
from megatron_fp8rl.types import RolloutGroup

# Metrics of times, memory and speed, and of lost replicas and cached prompts, which depend on times.
_IGNORED_METRICS = re.compile(
    r"time/.*|speculation/.*|memory/.*|.*/s|.*/tokens_per_s/.*"
    r"|rollout/(prefill_saved|replicas|replicas_lost|replicas_joined|num_retried)/.*"
)
# ``prompt`` of a rollout is that of its group.
_IGNORED_FIELDS = ("prompt", "seconds", "num_prompt_tokens", "num_cached_tokens")
_IGNORED_FIELDS += ("num_draft_tokens", "num_accepted_tokens")
_SETTINGS_WITHOUT_EFFECT = re.compile(r"name|output_dir|num_steps|observe\.(?!eval).*|checkpoint\..*|started_unix_s")
_MOST_CAUSES = 12
_MOST_CHARACTERS = 60  # of a value


class _Absent:
    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()
type _Found = tuple[str, Any, Any]  # path of a value, and both values


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """``is_equal``: both runs recorded the same steps, and all values are equal."""

    is_equal: bool
    lines: tuple[str, ...]  # for the terminal


def compare_results(first: Path | str, second: Path | str) -> Comparison:
    """Compare metrics and recorded rollouts of two runs, a step at a time, up to the first difference. Raises
    FileNotFoundError if a folder has no metrics, and ValueError for a damaged file or if no step is in both."""
    folders = Path(first), Path(second)
    for folder in folders:
        if not (folder / "metrics.jsonl").exists():
            raise FileNotFoundError(f"{folder} has no metrics.jsonl")
    a, b = map(RunData, folders)
    counter, num_steps, missing = _Counter(), 0, []
    for stage, left, right in (("warm start, ", a.warm_start, b.warm_start), ("", a, b)):
        rows = [{record["step"]: record for record in run.records} for run in (left, right)]
        files = [steps_of(run.run_dir / FOLDER) for run in (left, right)]
        for what, (of_a, of_b) in (("metrics", rows), ("rollouts", files)):
            for folder, steps in zip(folders, (of_a.keys() - of_b.keys(), of_b.keys() - of_a.keys()), strict=True):
                if steps:
                    missing.append(f"only {folder} has {stage}{what} of {_steps_text(sorted(steps))}")
        common = rows[0].keys() & rows[1].keys()
        num_steps += len(common)
        for step in sorted(common | (files[0].keys() & files[1].keys())):
            found = _step_differences(counter, step, rows, files)
            if (difference := next(found, None)) is not None:
                path, *values = difference
                texts = (f"  {_shown(value)} in {folder}" for value, folder in zip(values, folders, strict=True))
                lines = (f"differs: {stage}step {step}, {path}", *texts, *_causes(a, b))
                return Comparison(is_equal=False, lines=lines)
    if not num_steps:
        raise ValueError(f"{folders[0]} and {folders[1]} have no step in common")
    total = f"{counter.num_values} values of {num_steps} steps"
    if missing:
        return Comparison(is_equal=False, lines=(f"no difference in {total}, but:", *(f"  {m}" for m in missing)))
    return Comparison(is_equal=True, lines=(f"equal: {total}",))


class _Counter:
    """Finds differences and counts the values that it compares."""

    def __init__(self) -> None:
        self.num_values = 0

    def differences(self, a: Any, b: Any, path: str) -> Iterator[_Found]:
        """All differences, in the order of fields. NaN equals NaN."""
        if dataclasses.is_dataclass(a) and type(a) is type(b):
            for field in dataclasses.fields(a):
                if field.name not in _IGNORED_FIELDS:
                    yield from self.differences(
                        getattr(a, field.name), getattr(b, field.name), _below(path, field.name)
                    )
        elif isinstance(a, Mapping) and isinstance(b, Mapping):
            for key in dict.fromkeys(chain(a, b)):
                yield from self.differences(a.get(key, _ABSENT), b.get(key, _ABSENT), _below(path, key))
        elif isinstance(a, TokenArray | np.ndarray) and isinstance(b, TokenArray | np.ndarray):
            yield from self._of_arrays(np.asarray(a), np.asarray(b), path)
        elif isinstance(a, Sequence) and isinstance(b, Sequence) and not isinstance(a, str) and not isinstance(b, str):
            for index, (left, right) in enumerate(zip_longest(a, b, fillvalue=_ABSENT)):
                yield from self.differences(left, right, f"{path}[{index}]")
        else:
            self.num_values += 1
            if not (a == b or (a != a and b != b)):
                yield path, a, b

    def _of_arrays(self, a: np.ndarray, b: np.ndarray, path: str) -> Iterator[_Found]:
        self.num_values += min(a.size, b.size)
        if a.shape[1:] != b.shape[1:]:
            yield f"{path}.shape", a.shape, b.shape
            return
        length = min(len(a), len(b))
        left, right = a[:length], b[:length]
        for index in np.argwhere((left != right) & ~((left != left) & (right != right))).tolist():
            yield f"{path}[{', '.join(map(str, index))}]", left[tuple(index)].item(), right[tuple(index)].item()
        if len(a) != len(b):
            yield f"{path}, length", len(a), len(b)


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _step_differences(
    counter: _Counter, step: int, rows: Sequence[Mapping[int, Any]], files: Sequence[Mapping[int, Path]]
) -> Iterator[_Found]:
    """Rollouts first, because the metrics follow from them."""
    if all(step in recorded for recorded in files):
        yield from _group_differences(counter, *(read_step(recorded[step]) for recorded in files))
    if all(step in recorded for recorded in rows):
        compared = ({k: v for k, v in row[step].items() if not _IGNORED_METRICS.fullmatch(k)} for row in rows)
        for path, a, b in counter.differences(*compared, ""):
            yield f"metric {path}", a, b


def _group_differences(counter: _Counter, a: Sequence[RolloutGroup], b: Sequence[RolloutGroup]) -> Iterator[_Found]:
    if len(a) != len(b):
        yield "number of recorded prompts", len(a), len(b)
        return
    for position, (left, right) in enumerate(zip(a, b, strict=True)):
        name = left.prompt.prompt_id
        for path, *values in counter.differences(left.prompt, right.prompt, ""):
            yield f"recorded prompt {position}, {path}", *values
        if len(left.rollouts) != len(right.rollouts):
            yield f"number of recorded rollouts of {name}", len(left.rollouts), len(right.rollouts)
            return
        for one, other in zip(left.rollouts, right.rollouts, strict=True):
            for path, *values in counter.differences(one, other, ""):
                yield f"rollout {one.name}, {path}", *values


def _causes(a: RunData, b: RunData) -> Iterator[str]:
    """Settings and versions that differ, and settings with which no run repeats exactly."""
    pairs = (("", a.config, b.config), ("", a.versions, b.versions))
    found = [
        f"  {path}: {_shown(left)}, {_shown(right)}"
        for prefix, *both in pairs
        for path, left, right in _Counter().differences(*both, prefix)
        if not _SETTINGS_WITHOUT_EFFECT.fullmatch(path)
    ]
    if found:
        yield "settings and versions that differ:"
        yield from found[:_MOST_CAUSES]
        if len(found) > _MOST_CAUSES:
            yield f"  and {len(found) - _MOST_CAUSES} more"
    if any(run.config.get("sampling", {}).get("max_staleness") for run in (a, b)):
        yield "sampling.max_staleness is above 0: rollouts are trained in order of arrival, which no run repeats"
    if any(run.config.get("precision", {}).get("exact") is False for run in (a, b)):
        yield "precision.exact is False: only exact runs repeat on other batches of requests"


def _steps_text(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps from {steps[0]} to {steps[-1]}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
