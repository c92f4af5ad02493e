"""Reads a run's folder: metrics by key, details, rollouts. Needs no torch, and works while the run is in progress."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_fp8rl.observe.groups import pass_rates
from megatron_fp8rl.observe.recording import FOLDER, read_step, steps_of
from megatron_fp8rl.observe.records import read_json_lines
from megatron_fp8rl.types import RolloutGroup

WARM_START_DIR = "warm_start"  # subfolder of a run with the records of the warm start
EVALUATIONS = "evaluations/*/eval.json"  # results of the eval command
PROBLEMS = "problems.jsonl"  # beside each result: its problems, with their completions


@dataclass(frozen=True)
class RunData:
    """One run. Data that the run has not written yet is empty, not an error."""

    run_dir: Path

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        return self._lines("metrics.jsonl")

    @cached_property
    def details(self) -> list[dict[str, Any]]:
        return self._lines("details.jsonl")

    @cached_property
    def config(self) -> dict[str, Any]:
        return self._json("config.json")

    @cached_property
    def versions(self) -> dict[str, Any]:
        return self._json("versions.json")

    @cached_property
    def failure(self) -> dict[str, Any]:
        return self._json("failure.json")

    @property
    def is_done(self) -> bool:
        return (self.run_dir / "done.json").exists()

    @cached_property
    def is_exact(self) -> bool:
        """Whether trainer and engine computed equal log-probabilities for every token that was compared."""
        largest = self.values("mismatch/abs_logprob_diff/max")
        return bool(largest) and not any(largest)

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """Results of the eval command, sorted by the checkpoint's step, unknown steps last."""
        results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(self.run_dir.glob(EVALUATIONS))]
        return sorted(results, key=lambda result: (result["step"] is None, result["step"] or 0, result["name"]))

    @cached_property
    def pass_rates(self) -> dict[Path, dict[str, float]]:
        """By checkpoint that this run evaluated: the pass rate of each problem."""
        results = {path: json.loads(path.read_text(encoding="utf-8")) for path in self.run_dir.glob(EVALUATIONS)}
        return {
            Path(result["checkpoint"]): pass_rates(read_json_lines(path.with_name(PROBLEMS)))
            for path, result in results.items()
        }

    @cached_property
    def warm_start(self) -> RunData:
        return RunData(self.run_dir / WARM_START_DIR)

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """(steps, values) of the steps with a finite value for ``key``."""
        points = [(r["step"], r[key]) for r in self.records if isinstance(r.get(key), int | float)]
        points = [(step, value) for step, value in points if math.isfinite(value)]
        return [step for step, _ in points], [value for _, value in points]

    def values(self, key: str) -> list[float]:
        return self.series(key)[1]

    def mean(self, key: str, last: int | None = None) -> float | None:
        """Mean over all steps, or over the ``last`` ones; None if there are no values."""
        values = self.values(key)[-last:] if last else self.values(key)
        return sum(values) / len(values) if values else None

    def first(self, key: str) -> float | None:
        return next(iter(self.values(key)), None)

    def last(self, key: str) -> float | None:
        return next(iter(reversed(self.values(key))), None)

    def first_and_last_groups(self) -> Iterator[tuple[int, tuple[RolloutGroup, ...]]]:
        """(step, groups) of the first and the last recorded step, read one at a time: a step can take 300 MB."""
        files = steps_of(self.run_dir / FOLDER)
        yield from ((step, read_step(files[step])) for step in sorted({*list(files)[:1], *list(files)[-1:]}))

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self.run_dir / name
        return read_json_lines(path) if path.exists() else []

    def _json(self, name: str) -> dict[str, Any]:
        path = self.run_dir / name
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
