"""The process that watches one trainer rank: ``python watchdog.py JSON``, started by :mod:`.watch`.

In: one line per second from the rank, which says where its main thread is. Out: an error with the rank's name on the
terminal and in the launcher's folder, and the end of a rank that stands still. Imports only the standard library.

A process of its own, because a rank that is stopped by a signal, or whose interpreter is blocked by one call (the GIL),
runs no code. Times are counted in turns of this process: if all processes pause and resume together, nothing is late.
"""

import contextlib
import json
import os
import re
import select
import signal
import sys
import time
from pathlib import Path

_TURN_S = 0.5
_LONGEST_TURN_S = 2.0  # a longer one is a pause of this process
_DUMP_S = 5.0  # between two requests for a traceback
_TOLD_STOPPED_S = 2.0  # a stopped rank ends so soon after it was asked to end
_ASKED = (b"\x02", b"\x0f")  # SIGINT and SIGTERM, as the interpreter writes them to its wakeup file
ASKED_FILE = "asked"  # beside the files of ranks that stand still
_DENIALS = 3  # lines that say that the rank was not asked to end
_RESUME = "The run ends; when it is started again, it continues from its last checkpoint"


class Watchdog:
    """Counts how long a rank has been stopped, silent, or at the same place."""

    def __init__(self, options: dict) -> None:
        self.options = options
        self.pid = options["pid"]
        self.line = {"kind": "works", "at": None, "place": "its first second", "asked": False}
        self.asked = False
        self.stopped_s = self.silent_s = self.still_s = 0.0
        self._buffer = b""
        self._dumped_s = -_DUMP_S
        self._num_denied = 0  # lines since the last signal

    def run(self) -> None:
        """Watch until the rank has ended."""
        before = time.monotonic()
        while os.getppid() == self.pid:
            if select.select([0], [], [], _TURN_S)[0] and not self._read():
                return
            # A rank whose main thread waits for others does not note a signal; its command does (``runtime/stop.py``).
            if self.options["still_file"] and Path(self.options["still_file"]).with_name(ASKED_FILE).exists():
                self.asked = True
            now = time.monotonic()
            passed_s, before = min(now - before, _LONGEST_TURN_S), now
            if (problem := self._problem(passed_s)) is not None:
                self._end(problem)
                return
            if self.options["still_file"] and self.asked:
                self._note_still()

    def _read(self) -> bool:
        """Read lines; False at the end of the rank."""
        data = os.read(0, 1 << 16)
        for mark in _ASKED:
            if mark in data:
                self.asked, self._num_denied = True, 0
        self._buffer += re.sub(rb"[\x00-\x09\x0b-\x1f]", b"", data)
        *lines, self._buffer = self._buffer.split(b"\n")
        for text in filter(None, lines):
            line = json.loads(text)
            self.silent_s = 0.0
            if (line["at"], line["kind"]) != (self.line["at"], self.line["kind"]):
                self.still_s = 0.0
            # The signal may have been one to a fork of the rank, and the first lines may be older than the signal.
            self._num_denied = 0 if line["asked"] else self._num_denied + 1
            self.line, self.asked = line, line["asked"] or (self.asked and self._num_denied < _DENIALS)
        return bool(data)

    def _problem(self, passed_s: float) -> str | None:
        """Count ``passed_s``; what is wrong with the rank, or None."""
        options = self.options
        is_stopped, is_asked = _state(self.pid)
        if is_stopped:
            self.stopped_s += passed_s
            if self.stopped_s >= (_TOLD_STOPPED_S if self.asked or is_asked else options["stopped_s"]):
                return (
                    f"was stopped by a signal and has stood still for {self.stopped_s:.0f} s, while all other ranks "
                    f"wait for it. It was in {self.line['place']}"
                )
            return None
        self.stopped_s = 0.0
        self.silent_s += passed_s
        self.still_s += passed_s
        user_s = options["asked_s"] if self.asked else options["user_s"]
        works_s = options["user_s"] if self.asked else options["wait_s"]
        if self.silent_s >= user_s and time.monotonic() > self._dumped_s + _DUMP_S:
            self._dumped_s = time.monotonic()
            place, is_user = self._dump()
            if is_user or self.silent_s >= works_s:
                return f"has run one call without a pause for {self.silent_s:.0f} s: {place}"
        kind = self.line["kind"]
        limit_s = {"user": user_s, "works": works_s, "saves": options["wait_s"]}.get(kind, float("inf"))
        if self.silent_s < user_s and self.still_s >= limit_s:
            return f"has stood still for {self.still_s:.0f} s in {self.line['place']}"
        return None

    def _dump(self) -> tuple[str, bool]:
        """Where the rank's main thread is, from a traceback that needs no interpreter; and whether in user code."""
        with contextlib.suppress(OSError):
            begin = os.fstat(self.options["dump_fd"]).st_size
            os.kill(self.pid, signal.SIGUSR2)
            time.sleep(1.0)
            text = os.pread(self.options["dump_fd"], 1 << 14, begin).decode(errors="replace")
            frames = re.findall(r'File "(.*?)", line (\d+|\?\?\?) in (\S+)', text)
            if frames:
                file, line, name = frames[0]
                is_user = any(file.endswith(self.options["caller"]) for file, _, _ in frames)
                return f"{name} ({file}:{line})", is_user
        return str(self.line["place"]), self.line["kind"] == "user"

    def _note_still(self) -> None:
        file = Path(self.options["still_file"])
        content = {"kind": self.line["kind"], "place": self.line["place"], "still_s": self.still_s}
        with contextlib.suppress(OSError):
            _write(file, content)

    def _end(self, problem: str) -> None:
        options = self.options
        text = f"trainer rank {options['rank']} (process {self.pid}) {problem}. {_RESUME}"
        if options["error_file"]:
            error = {"time": time.time(), "rank": options["rank"], "text": text, **options["error"]}
            file = Path(options["error_file"])
            with contextlib.suppress(OSError):
                _write(file, error)
                with open(file.parent / ".bell", "ab") as bell:
                    bell.write(b".")
        print(text, file=sys.stderr, flush=True)
        if os.getppid() == self.pid:
            os.kill(self.pid, signal.SIGKILL)


def _write(file: Path, content: dict) -> None:
    file.with_suffix(".tmp").write_text(json.dumps(content))
    file.with_suffix(".tmp").replace(file)


def _state(pid: int) -> tuple[bool, bool]:
    """(whether a signal has stopped a process, whether a signal that asks it to end waits for it)."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False, False
    lines = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    waiting = int(lines.get("ShdPnd", "0"), 16) | int(lines.get("SigPnd", "0"), 16)  # some kernels lack them
    asks = any(waiting >> (number - 1) & 1 for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
    return lines.get("State", "").startswith("T (stopped"), asks


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the rank's end is this process's end
    Watchdog(json.loads(sys.argv[1])).run()
