"""What the doctor has to say, and the command that mends it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

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
    change: Change = ()  # of the configuration, which applies the remedy
    command: str = ""  # the same as a command; or one that is not about the configuration


def exit_status(findings: list[Finding]) -> int:
    """2 when the run cannot work, 1 with warnings, 0 otherwise."""
    return max((EXIT_STATUS[finding.severity] for finding in findings), default=0)
