"""The command that starts ranks on its machine: SIGTERM ends a run with a rank that stands still, and names the rank.

A small program takes torchrun's place: it starts two ranks, and kills the other when one of them fails.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[3]
TORCHRUN = """
import os, subprocess, sys, time
ranks = [
    subprocess.Popen([sys.executable, *sys.argv[1:]], env={**os.environ, "RANK": str(i), "WORLD_SIZE": "2"})
    for i in range(2)
]
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
sys.exit(run_ranks([sys.executable, "-c", *sys.argv[1:]], dict(os.environ), hang_s=2.0))
"""
WATCHED = (str(ROOT / "tests" / "helpers" / "still_rank.py"),)
BARE = ("-c", "import time; print('watched', flush=True); time.sleep(300)")  # a rank that has not begun to be watched
IN_COLLECTIVE = """
import json, os, signal, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: None)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
file = Path(os.environ["FP8RL_STILL_DIR"], f"still-rank{os.environ['RANK']}.json")
kind = os.environ[f"KIND{os.environ['RANK']}"]
file.write_text(json.dumps({"kind": kind, "place": "all_reduce, called by step (x.py:3)", "still_s": 5.0}))
print("watched", flush=True)
while True:
    time.sleep(1)
"""


def _start(*rank: str, scale: float = 3 / 30, **environ: str) -> tuple[subprocess.Popen, list[psutil.Process]]:
    """The program, and its ranks in order."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "STILL_SCALE": str(scale)} | environ
    command = [sys.executable, "-c", PROGRAM, TORCHRUN, *rank]
    program = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert "".join(program.stdout.readline() for _ in range(2)).count("watched") == 2  # the lines may mix
    (torchrun,) = psutil.Process(program.pid).children()
    return program, sorted(torchrun.children(), key=lambda one: one.environ()["RANK"])


@pytest.mark.parametrize("index", [0, 1])
def test_a_rank_that_stands_still_is_named_and_ends_the_run(index):
    program, ranks = _start(*WATCHED, "nothing", "300", scale=3 / 300)
    ranks[index].suspend()
    _, output = program.communicate(timeout=60)
    assert program.returncode == 1
    assert f"trainer rank {index} (process {ranks[index].pid}) was stopped by a signal and has stood still" in output
    assert not any(rank.is_running() for rank in ranks)


@pytest.mark.parametrize("fault", ["regex", "read", "stop"])
def test_a_first_sigterm_ends_a_run_with_a_rank_that_stands_still(fault):
    program, _ = _start(*WATCHED, fault, "300")
    time.sleep(1.5)
    program.send_signal(signal.SIGTERM)
    began = time.monotonic()
    _, output = program.communicate(timeout=60)
    assert program.returncode == 1 and "trainer rank 1 (process " in output and time.monotonic() - began < 20


@pytest.mark.parametrize("victim", ["rank", "torchrun"])
def test_a_first_sigterm_ends_a_run_with_a_stopped_process_that_is_not_watched(victim):
    program, ranks = _start(*BARE)
    (ranks[1] if victim == "rank" else ranks[1].parent()).suspend()
    for rank in ranks:
        assert signal.SIGTERM in _blocked(rank)
    program.send_signal(signal.SIGTERM)
    output = _end(program, ranks)
    assert program.returncode != 0 and "was stopped by a signal, and is killed" in output


def _end(program: subprocess.Popen, ranks: list[psutil.Process]) -> str:
    """What the program printed, after its end; ends ranks that have outlived the stand-in of torchrun."""
    try:
        program.wait(60)
    finally:
        for rank in ranks:
            if rank.is_running():
                rank.kill()
    return program.communicate(timeout=60)[1]


def _blocked(process: psutil.Process) -> set[int]:
    mask = int(Path(f"/proc/{process.pid}/status").read_text().partition("SigBlk:")[2].split()[0], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def test_a_short_pause_changes_nothing():
    program, ranks = _start(*WATCHED, "nothing", "300")
    ranks[1].suspend()
    time.sleep(2.0)
    ranks[1].resume()
    time.sleep(1.5)
    assert program.poll() is None
    program.kill()
    _end(program, ranks)


@pytest.mark.parametrize("kinds", ["collective collective", "collective works"])
def test_ranks_that_wait_for_each_other_are_killed_after_sigterm(kinds):
    first, second = kinds.split()
    program, ranks = _start("-c", IN_COLLECTIVE, KIND0=first, KIND1=second)
    program.send_signal(signal.SIGTERM)
    if second == "works":
        time.sleep(4.0)
        assert program.poll() is None  # it may still save
        program.send_signal(signal.SIGTERM)
    output = _end(program, ranks)
    assert program.returncode != 0
    told = "all trainer ranks wait for each other and are killed: rank 0 in all_reduce, called by step (x.py:3); rank 1"
    assert (told in output) == (second == "collective")


def test_a_second_sigterm_ends_a_run_whose_ranks_do_not_answer():
    program, ranks = _start(*BARE)
    program.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    assert program.poll() is None  # the ranks may save
    program.send_signal(signal.SIGTERM)
    _end(program, ranks)
    assert program.returncode != 0
