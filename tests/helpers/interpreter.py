"""Files of tests that run themselves again in Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported, and other tests import it without: so the interpreter has a process
of its own, which one test of the file starts.
"""

import os
import subprocess
import sys

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
in_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_in_the_interpreter starts")
starts_interpreter = pytest.mark.skipif(INTERPRETED, reason="is the process that it would start")


def assert_passes_interpreted(path: str, *, says: str = "passed", deadline_s: float = 300.0) -> None:
    """The tests of a file pass in the interpreter, and pytest's output has the words ``says``."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=deadline_s)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert says in done.stdout, done.stdout[-6000:]
