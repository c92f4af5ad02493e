"""A trainer rank that SIGSTOP has stopped ends the run, with its name, and SIGTERM ends a run with such a rank.

A small program takes torchrun's place: it starts two ranks, and kills the other when one of them fails.
"""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.helpers.processes import until

TORCHRUN = """
import os, subprocess, sys, time
ranks = [subprocess.Popen(["sleep", "300"], env={**os.environ, "RANK": str(i)}) for i in range(2)]
try:
    while all(rank.poll() is None for rank in ranks):
        time.sleep(0.05)
finally:
    for rank in ranks:
        rank.kill()
        rank.wait()
sys.exit(1)
"""
PROGRAM = """
import os, sys
from megatron_fp8rl.runtime.stop import run_ranks
sys.exit(run_ranks([sys.executable, "-c", sys.argv[1]], dict(os.environ), stopped_s=float(sys.argv[2])))
"""


def _start(stopped_s: float) -> tuple[subprocess.Popen, list[psutil.Process]]:
    """The program, and its ranks in order."""
    command = [sys.executable, "-c", PROGRAM, TORCHRUN, str(stopped_s)]
    program = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def ranks() -> list[psutil.Process]:
        return [child for child in psutil.Process(program.pid).children(recursive=True) if child.name() == "sleep"]

    until(lambda: len(ranks()) == 2, "two ranks")
    return program, sorted(ranks(), key=lambda rank: rank.environ()["RANK"])


@pytest.mark.parametrize("index", [0, 1])
def test_a_rank_that_stands_still_is_named_and_ends_the_run(index):
    program, ranks = _start(stopped_s=3.0)
    ranks[index].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    _, output = program.communicate(timeout=60)
    assert program.returncode == 1 and time.monotonic() - began >= 3
    assert (
        f"trainer rank {index} (process {ranks[index].pid}) was stopped by a signal and has stood still for" in output
    )
    assert not any(rank.is_running() for rank in ranks)


def test_a_short_pause_changes_nothing_and_sigterm_ends_a_run_with_a_stopped_rank():
    program, ranks = _start(stopped_s=300.0)
    ranks[1].send_signal(signal.SIGSTOP)
    time.sleep(2.5)
    ranks[1].send_signal(signal.SIGCONT)
    time.sleep(1.5)
    assert program.poll() is None
    ranks[1].send_signal(signal.SIGSTOP)
    program.send_signal(signal.SIGTERM)
    _, output = program.communicate(timeout=60)
    assert program.returncode == 1 and "trainer rank 1 (process" in output


def test_a_second_sigterm_ends_a_run_whose_ranks_do_not_answer():
    program, _ = _start(stopped_s=300.0)
    program.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    assert program.poll() is None  # the ranks may save
    program.send_signal(signal.SIGTERM)
    program.communicate(timeout=60)
    assert program.returncode != 0
