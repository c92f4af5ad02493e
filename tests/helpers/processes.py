"""Waiting for what other processes do, which takes its time on a busy machine, and whether they run."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

HOLDER = """
import sys, time
from dataclasses import replace
from megatron_fp8rl.data import run_folder
from model_configs.tiny import tiny_qwen3
with run_folder.locked(replace(tiny_qwen3(), output_dir=sys.argv[1])):
    print("held", flush=True)
    time.sleep(300)
"""
DEADLINE_S = 150.0  # far beyond what anything here takes, on a machine whose cores are shared by many


def until(condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait until a condition holds. Raises AssertionError with its name after ``deadline_s`` seconds."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, f"waited {deadline_s:g} s for {what}"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether a process runs. A zombie does not: in a container its parent may never wait for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:  # it may end between the opening of the file and the reading
        return False


@contextmanager
def holds(run_dir: Path) -> Iterator[subprocess.Popen]:
    """A process that uses a run folder, as training does."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(run_dir)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()
