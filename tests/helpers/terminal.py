"""A terminal for tests: runs a command on a pseudo-terminal, and computes what its user sees."""

import fcntl
import os
import re
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence

_PIECE = re.compile(r"\x1b\[(\?)?(\d*)(?:;\d*)*([A-Za-z])|(.)", re.DOTALL)


class Terminal:
    """The lines of a terminal that is high enough to show everything; only the sequences that rich writes are known."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._lines = [[" "] * columns]
        self._row = self._column = 0

    @staticmethod
    def run(
        command: Sequence[str], columns: int, *, lines: int = 24, environment: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """(status, output) of a command on a terminal of this size."""
        ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        kept = {**os.environ, "TERM": "xterm-256color", **(environment or {})}
        for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
            kept.pop(name, None)
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=kept)
        os.close(theirs)
        output = b""
        try:
            while piece := os.read(ours, 65536):
                output += piece
        except OSError:  # Linux reports the end of the last writer as an error
            pass
        finally:
            os.close(ours)
        return process.wait(60), output

    def write(self, output: bytes) -> list[str]:
        """Write, and return the lines on the terminal, without blanks at their ends and without empty lines."""
        for question, number, command, letter in _PIECE.findall(output.decode()):
            if letter:
                self._letter(letter)
            elif command == "A":
                self._row -= int(number or 1)
                assert self._row >= 0, "the cursor moved above the first line"
            elif command == "K":
                assert number == "2", f"erase in line {number}"
                self._lines[self._row] = [" "] * self._columns
            else:
                assert command == "m" or question, f"unknown sequence {number}{command}"
        return [line for line in ("".join(line).rstrip() for line in self._lines) if line]

    def _letter(self, letter: str) -> None:
        if letter == "\r":
            self._column = 0
            return
        if letter == "\n" or self._column == self._columns:  # a full line wraps when the next letter comes
            self._row += 1
            self._column = 0 if letter != "\n" else self._column
            if self._row == len(self._lines):
                self._lines.append([" "] * self._columns)
        if letter != "\n":
            self._lines[self._row][self._column] = letter
            self._column += 1
