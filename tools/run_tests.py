"""Run the tests; one that fails beside others is run again alone, to be told apart: python tools/run_tests.py [ARG...]

In: arguments of pytest, among them ``-n``, the number of processes that share the cores. Out: pytest's exit status.
A test that passes only alone is named: it needs time, memory or a port that others may use. More than TOLERATED such
tests fail the build.
Nothing is repeated after a usage error, an interrupt or a collection error, nor when more than MOST tests failed.
Runs in the installed environment; imports the standard library alone.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

MOST = 10
TOLERATED = 2
TESTS_FAILED = 1  # pytest's exit status for tests that failed, as against 2 to 5


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="fp8rl-tests-") as cache:
        # A separate cache, which holds the failures of this run alone.
        arguments = [*arguments, "-o", f"cache_dir={cache}"]
        status = pytest(arguments)
        failed = failures(Path(cache)) if status == TESTS_FAILED else []
        if not 0 < len(failed) <= MOST or not all("::" in name for name in failed):  # a file: it cannot be imported
            return status
        print(f"\n{len(failed)} failed while others shared the cores; again, alone, to tell why:", flush=True)
        without_coverage = ["--no-cov"] if any(argument.startswith("--cov") for argument in arguments) else []
        pytest([*arguments, *without_coverage, "-n", "0", "--last-failed", "--last-failed-no-failures", "none"])
        broken = failures(Path(cache))
        for name in failed:
            print(f"FAILS {'ALSO ALONE' if name in broken else 'ONLY BESIDE OTHERS'}: {name}", flush=True)
        return status if broken or len(failed) > TOLERATED else 0


def pytest(arguments: list[str]) -> int:
    """The exit status of pytest. An interrupt is pytest's to handle; SIGTERM is passed on to it."""
    process = subprocess.Popen([sys.executable, "-m", "pytest", *arguments])
    signal.signal(signal.SIGINT, lambda number, frame: None)
    signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(number))
    status = process.wait()
    return status if status >= 0 else 128 - status


def failures(cache: Path) -> list[str]:
    """Node ids of tests that failed or whose fixtures did, and of files that are none, from pytest's cache."""
    path = cache / "v" / "cache" / "lastfailed"
    return sorted(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
