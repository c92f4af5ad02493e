"""Where the checks of a configuration leave what they find, and the questions that they ask of many fields."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from megatron_fp8rl.config import RunConfig, Violation


@dataclass
class Findings:
    """Collects violations of one configuration; fields are dotted paths from ``RunConfig``."""

    cfg: RunConfig
    violations: list[Violation] = field(default_factory=list)

    def value(self, path: str) -> Any:
        return attrgetter(path)(self.cfg)

    def refuse(self, path: str, problem: str, remedy: str, *, value: Any = None) -> None:
        shown = self.value(path) if value is None else value
        self.violations.append(Violation(f"--{path}", shown, problem, remedy))

    def at_least(self, minimum: float, *paths: str) -> bool:
        """Refuse every field below ``minimum``; True when there was none."""
        low = [path for path in paths if not self.value(path) >= minimum]
        for path in low:
            self.refuse(path, f"is below {minimum}", f"Set it to {minimum} or more")
        return not low

    def positive(self, *paths: str) -> None:
        """Refuse every number that is set and not above 0."""
        for path in paths:
            value = self.value(path)
            if value is not None and not (value > 0 and math.isfinite(value)):
                self.refuse(path, "is not above 0", "Set a positive number")

    def within(self, path: str, low: float, high: float, *, open_low: bool = False, open_high: bool = False) -> None:
        """Refuse a number that is set and lies outside the interval."""
        value = self.value(path)
        if value is None:
            return
        above = value > low if open_low else value >= low
        below = value < high if open_high else value <= high
        if not (above and below):
            interval = f"{'(' if open_low else '['}{low}, {high}{')' if open_high else ']'}"
            self.refuse(path, f"is outside {interval}", f"Choose a value in {interval}")

    def divides(self, path: str, whole: int, noun: str) -> bool:
        """Refuse a degree that does not divide ``whole``; True when it divides."""
        degree = self.value(path)
        if whole % degree == 0:
            return True
        choices = ", ".join(str(d) for d in range(1, whole + 1) if whole % d == 0)
        self.refuse(path, f"does not divide the {whole} {noun}", f"Choose one of {choices}")
        return False
