"""Wall-clock timing of named spans: ``with span("update"):`` in any thread.

The observer writes the seconds of each step as ``time/<name>/s``. Spans nest; each counts its whole duration, except
inner spans with ``apart``. Spans of the same name add up, also in parallel threads.
"""

import re
import threading
from time import perf_counter
from types import TracebackType

STARTED = "MEGATRON_FP8RL_STARTED"  # environment variable: when the command was called, in seconds of the Unix epoch
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_checked_names: set[str] = set()
_seconds: dict[str, float] = {}
_lock = threading.Lock()


class _Open(threading.local):
    def __init__(self) -> None:
        self.names: list[str] = []


_open = _Open()
_current: tuple[str, float] | None = None  # outermost open span of the main thread, and when it began


class span:  # lower case because it is used like a function: `with span("generate"):`
    """Adds the duration of its block to the seconds of ``name``, even if the block raises.

    With ``apart``, the duration is subtracted from the enclosing span. Raises ValueError unless the name, which becomes
    part of a metric key, consists of lower-case letters, digits and underscores.
    """

    __slots__ = ("_apart", "_name", "_start")

    def __init__(self, name: str, *, apart: bool = False) -> None:
        if name not in _checked_names:
            if not _NAME.fullmatch(name):
                raise ValueError(f"span name {name!r}: use lower-case letters, digits and underscores")
            _checked_names.add(name)
        self._name, self._apart = name, apart

    def __enter__(self) -> None:
        global _current
        _open.names.append(self._name)
        self._start = perf_counter()
        if len(_open.names) == 1 and threading.current_thread() is threading.main_thread():
            _current = self._name, self._start

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _current
        seconds = perf_counter() - self._start
        add_seconds(_open.names.pop(), seconds)
        if not _open.names and threading.current_thread() is threading.main_thread():
            _current = None
        if self._apart and _open.names:
            add_seconds(_open.names[-1], -seconds)


def current() -> tuple[str, float] | None:
    """The outermost open span of the main thread and its seconds so far; None outside of spans."""
    running = _current
    return None if running is None else (running[0], perf_counter() - running[1])


def add_seconds(name: str, seconds: float) -> None:
    """Add ``seconds`` measured elsewhere, for instance in an engine process."""
    with _lock:
        _seconds[name] = _seconds.get(name, 0.0) + seconds


def take_seconds() -> dict[str, float]:
    """Return seconds by span name since the last call and reset them. A span that is still open counts next time."""
    global _seconds
    with _lock:
        taken, _seconds = _seconds, {}
    return taken
