"""What preflight finds: mistakes of fields, and what the doctor has to say of a whole run. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from megatron_fp8rl.config import RunConfig, Violation

if TYPE_CHECKING:
    from megatron_fp8rl.preflight.engine_memory import EngineEstimate
    from megatron_fp8rl.preflight.memory import Estimate


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


Severity = Literal["error", "warning", "note"]
Change = tuple[tuple[str, Any], ...]  # (dotted field, value), in the order in which they are typed
EXIT_STATUS = {"note": 0, "warning": 1, "error": 2}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that a user should know before the run starts."""

    severity: Severity  # error: the run cannot work; warning: it may not, or not as well; note: good to know
    subject: str  # a field of the configuration, a package, or a process
    problem: str
    remedy: str = ""  # in words
    change: Change = ()  # of the configuration, which applies the remedy; in a Judgement only a proposal
    command: str = ""  # the same as a command; or one that is not about the configuration
    is_of_layout: bool = False  # a warning that another layout may not have


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What all of preflight finds of one configuration on some machines. No estimates where degrees do not divide."""

    findings: tuple[Finding, ...]
    trainer: Estimate | None = None
    engine: EngineEstimate | None = None
    phases: tuple[Estimate, ...] = ()  # of a GPU that both use in turns; empty when each has its own

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def works(self) -> bool:
        return not self.errors

    @property
    def num_layout_warnings(self) -> int:
        return sum(finding.is_of_layout for finding in self.findings)


def exit_status(findings: Sequence[Finding]) -> int:
    """2 when the run cannot work, 1 with warnings, 0 otherwise."""
    return max((EXIT_STATUS[finding.severity] for finding in findings), default=0)
