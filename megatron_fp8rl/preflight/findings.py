"""The results of preflight: violations of single fields, and findings about a whole run. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from megatron_fp8rl.config import RunConfig, Violation
from megatron_fp8rl.preflight import ranges

if TYPE_CHECKING:
    from megatron_fp8rl.preflight.engine_memory import EngineEstimate
    from megatron_fp8rl.preflight.memory import Estimate


@dataclass
class Findings:
    """Collects the violations of one configuration. Fields are dotted paths from ``RunConfig``."""

    cfg: RunConfig
    violations: list[Violation] = field(default_factory=list)
    _in_range: dict[str, bool] = field(default_factory=dict)  # by path, for the fields already checked

    def value(self, path: str) -> Any:
        return attrgetter(path)(self.cfg)

    def refuse(self, path: str, problem: str, remedy: str, *, value: Any = None) -> None:
        shown = self.value(path) if value is None else value
        self.violations.append(Violation(f"--{path}", shown, problem, remedy))

    def within(self, path: str, interval: str) -> bool:
        """Refuse a number outside an interval such as ``[0, 1)``; return whether it is inside or not set."""
        wrong = ranges.problem(self.value(path), interval)
        if wrong is not None:
            self.refuse(path, *wrong)
        return wrong is None

    def in_range(self, *paths: str) -> bool:
        """Refuse every field outside its interval in ``ranges.py``; a section selects all of its own fields.

        A field is refused only once, however often it is checked. Returns whether all fields are inside.
        """
        concerned = [path for path in ranges.INTERVALS if path in paths or path.rpartition(".")[0] in paths]
        fresh = [path for path in concerned if path not in self._in_range]
        self._in_range |= {path: self.within(path, ranges.INTERVALS[path]) for path in fresh}
        return all(self._in_range[path] for path in concerned)

    def divides(self, path: str, whole: int, noun: str) -> bool:
        """Refuse a degree that does not divide ``whole``; return whether it does."""
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
    """One thing the user should know before the run starts."""

    severity: Severity  # error: the run cannot work; warning: it may fail or be slow; note: information
    subject: str  # a field of the configuration, a package, or a process
    problem: str
    remedy: str = ""  # in words
    change: Change = ()  # to the configuration, which applies the remedy; in a Judgement only a proposal
    command: str = ""  # applies ``change``; or a command that does not concern the configuration
    is_of_layout: bool = False  # a warning that another layout may avoid


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """All findings about one configuration on given machines. No estimates if the degrees do not divide the model."""

    findings: tuple[Finding, ...]
    trainer: Estimate | None = None
    engine: EngineEstimate | None = None
    phases: tuple[Estimate, ...] = ()  # of a GPU shared by trainer and engine; empty if each has its own

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
    """2 if the run cannot work, 1 if there are warnings, 0 otherwise."""
    return max((EXIT_STATUS[finding.severity] for finding in findings), default=0)
