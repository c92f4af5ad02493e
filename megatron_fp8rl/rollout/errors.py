"""Errors of rollout replicas, and how a replica ended, as fields for programs and text for people."""

from __future__ import annotations

import re
import signal as signals
from dataclasses import dataclass

EXCEPTION = re.compile(r"\b[A-Z]\w*(?:Error|Exception): .*")  # in a line of a log
_MAX_CAUSE = 300  # characters of an exception in a summary


class EngineError(RuntimeError):
    """A call to a rollout replica failed. ``status`` is the HTTP status of the answer; None without an answer."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    @property
    def summary(self) -> str:
        """The message in one line, without the log of the replica but for its first exception."""
        return summary_of(str(self))


class EngineDeadError(EngineError):
    """The process of a rollout replica has ended. ``is_innocent`` if the request cannot be the cause. Then it has not
    reached the replica, SIGKILL ended the process, or a replica on another host ended without an error."""

    def __init__(self, message: str, *, is_innocent: bool = False) -> None:
        super().__init__(message)
        self.is_innocent = is_innocent


class RequestLostError(EngineError):
    """A request has cost two replicas, and is not sent to a third."""


class EngineDeadlineError(EngineError):
    """A rollout replica did not answer before the deadline."""


def summary_of(message: str) -> str:
    """One line of an error message that may end with a replica's log: its first line, and the log's first exception."""
    first, _, log = message.partition("\n")
    first = first.removesuffix(", which ends with").removesuffix(" ends with")
    found = EXCEPTION.search(log)
    return f"{first}: {found[0][:_MAX_CAUSE]}" if found else first


@dataclass(frozen=True)
class Exit:
    """How a replica ended; the text completes a sentence that begins with the name of the replica.

    ``code``: exit code; None if a signal ended the process, or if it is unknown. ``signal``: that signal's number.
    ``reason``: text to show instead of both, such as "hung for 30 s and was killed". ``left_no_error``: the replica is
    on another host, where its end is unknown, and its log has no error.
    """

    code: int | None = None
    signal: int | None = None
    reason: str = ""
    left_no_error: bool = False

    @classmethod
    def from_returncode(cls, returncode: int) -> Exit:
        return cls(code=returncode) if returncode >= 0 else cls(signal=-returncode)

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended the process, from the kernel or another process."""
        return self.signal == signals.SIGKILL

    def __str__(self) -> str:
        if self.reason:
            return self.reason
        return f"died with exit code {self.code}" if self.signal is None else f"was killed by signal {self.signal}"
