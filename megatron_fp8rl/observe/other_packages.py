"""Warnings of other packages: kept in a log of the run, or shown on the terminal with ``--verbose``.

Warnings of this package and of user code, errors and tracebacks stay on the terminal.
"""

import logging
import os
import site
import sys
import sysconfig
import time
import warnings
from pathlib import Path
from typing import TextIO

VERBOSE_VARIABLE = "FP8RL_VERBOSE"  # set by --verbose, also for the ranks
_PYTORCH_LEVEL = "TORCH_CPP_LOG_LEVEL"  # of what PyTorch's C++ code writes to stderr
_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_INSTALLED = tuple(
    f"{os.path.realpath(folder)}{os.sep}"
    for folder in {*site.getsitepackages(), site.getusersitepackages(), *sysconfig.get_paths().values()}
    if folder.endswith("-packages")
)


def is_verbose() -> bool:
    return VERBOSE_VARIABLE in os.environ


def pytorch_level() -> dict[str, str]:
    """The variable that leaves out warnings of PyTorch's C++ code; empty if they are wanted."""
    return {} if is_verbose() or _PYTORCH_LEVEL in os.environ else {_PYTORCH_LEVEL: "ERROR"}


def keep_in_log(folder: Path, rank: int) -> None:
    """Write warnings of other packages to ``packages.rank<i>.txt`` in ``folder`` instead of stderr, from now on. With
    ``--verbose`` this does nothing. If the log cannot be written, they are shown."""
    if is_verbose():
        return
    log = _Log(folder / f"packages.rank{rank}.txt")
    show, emit = warnings.showwarning, logging.StreamHandler.emit

    def show_or_keep(message, category, filename, lineno, file: TextIO | None = None, line: str | None = None) -> None:
        # This package gives no Python warnings: those at its lines are about the packages that it calls.
        is_other = _is_own(filename) or _is_installed(filename)
        if not (is_other and file is None and log.add(warnings.formatwarning(message, category, filename, lineno))):
            show(message, category, filename, lineno, file, line)

    def emit_or_keep(self: logging.StreamHandler, record: logging.LogRecord) -> None:
        is_warning = record.levelno <= logging.WARNING and record.exc_info is None
        is_other = _is_installed(record.pathname) and not _is_own(record.pathname)
        is_shown = self.stream in (sys.stderr, sys.stdout, sys.__stderr__, sys.__stdout__)
        if not (is_warning and is_other and is_shown and log.add(f"{record.name}: {self.format(record)}")):
            emit(self, record)

    warnings.showwarning = show_or_keep
    logging.StreamHandler.emit = emit_or_keep  # packages add handlers of their own, also later


def _is_own(file: str) -> bool:
    return os.path.realpath(file).startswith(_PACKAGE)


def _is_installed(file: str) -> bool:
    return os.path.realpath(file).startswith(_INSTALLED)


class _Log:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._has_started = False

    def add(self, text: str) -> bool:
        """Append a text, with the time of the first one; return whether it was written."""
        start = "" if self._has_started else time.strftime("# %Y-%m-%d %H:%M:%S\n")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8", errors="replace") as file:
                file.write(f"{start}{text.rstrip()}\n")
        except OSError:
            return False
        self._has_started = True
        return True
