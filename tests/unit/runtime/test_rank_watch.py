"""A trainer rank that stands still ends, with its name and the place on the terminal; one that works does not."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from megatron_fp8rl.runtime.watch import waited_for_ranks, where
from tests.helpers.processes import until

ROOT = Path(__file__).parents[3]
PROGRAM = str(ROOT / "tests" / "helpers" / "still_rank.py")
SCALE = 3 / 300  # of engine.update_s = 3 s


def _start(fault: str, seconds: float = 200.0, *, scale: float = SCALE, **environ: str) -> subprocess.Popen:
    env = os.environ | {"RANK": "1", "STILL_SCALE": str(scale), "PYTHONPATH": str(ROOT)} | environ
    return subprocess.Popen(
        [sys.executable, PROGRAM, fault, str(seconds)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


PLACES = {
    "stop": "was stopped by a signal and has stood still for 3 s",
    "regex": "has run one call without a pause for",
    "loop": "in algo.advantage = still_rank:stand_still, stand_still (",
    "read": "in algo.advantage = still_rank:stand_still, stand_still (",
    "library": "in main (",
}


@pytest.mark.parametrize("fault", PLACES)
def test_a_rank_that_stands_still_is_named_with_its_place(fault, tmp_path):
    process = _start(fault, LAUNCH_DIR=str(tmp_path), LAUNCH_ROLE="trainer", LAUNCH_NODE="4")
    _, output = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    line = next(line for line in output.splitlines() if line.startswith("trainer rank 1 (process "))
    assert f"(process {process.pid})" in line and PLACES[fault] in line, line
    if fault == "regex":
        assert "still_rank.py:" in line or "match (" in line, line
    error = json.loads((tmp_path / "error-rank1.json").read_text())
    assert (error["text"], error["rank"], error["node"], error["role"]) == (line, 1, 4, "trainer")


@pytest.mark.parametrize("fault", ["regex", "loop", "read", "stop"])
def test_a_first_sigterm_ends_a_rank_that_stands_still(fault):
    process = _start(fault, scale=3 / 30)  # asked to end: 3 s; otherwise 30 s
    process.stdout.readline()
    time.sleep(2.5)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, output = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL and "trainer rank 1 (process " in output
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("fault", ["nothing", "work"])
def test_a_rank_that_works_is_left_alone_and_leaves_nothing(fault):
    process = _start(fault, 6.0)
    process.stdout.readline()
    (watching,) = psutil.Process(process.pid).children()
    _, output = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, "") and not watching.is_running()


def test_a_pause_of_all_processes_ends_no_run():
    process = _start("nothing", 6.0)
    process.stdout.readline()
    processes = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
    for one in processes:
        one.suspend()
    time.sleep(5.0)  # more than a stopped rank may stand still
    for one in reversed(processes):
        one.resume()
    assert process.wait(60) == 0


def test_a_killed_rank_leaves_no_watch():
    process = _start("nothing")
    process.stdout.readline()
    (watching,) = psutil.Process(process.pid).children()
    process.kill()
    process.communicate(timeout=60)
    until(lambda: not watching.is_running(), "the watching process to end")


def test_the_error_of_a_collective_operation_names_the_rank_and_the_operation():
    try:
        dist.all_reduce(None)
    except Exception as error:
        failure = RuntimeError("Timed out waiting 1000ms for recv operation to complete").with_traceback(
            error.__traceback__
        )
    note = waited_for_ranks(failure, 3)
    assert "trainer rank 3 waited for other ranks in all_reduce, called by test_the_error" in note
    assert waited_for_ranks(ValueError("no"), 3) == "" and waited_for_ranks(RuntimeError("no"), 3) == ""


def test_places_are_those_of_the_callers_of_libraries():
    kind, at, place = where(sys._getframe())
    assert kind == "works" and "test_places_are_those" in place and at != where(sys._getframe())[1]
    assert where(None)[0] == "works"


PACKAGE = str(Path(where.__code__.co_filename).parents[1])
TORCH = str(Path(dist.__file__).parent)


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ([f"{PACKAGE}/rl_loop.py", f"{TORCH}/distributed_c10d.py"], "collective"),
        ([f"{PACKAGE}/trainer/parallel.py", "/site/megatron/core/x.py", f"{TORCH}/distributed_c10d.py"], "collective"),
        ([f"{PACKAGE}/rl_loop.py", f"{PACKAGE}/rollout/stream.py", "/usr/lib/threading.py"], "engines"),
        ([f"{PACKAGE}/rl_loop.py", f"{PACKAGE}/weight_sync/publish.py"], "engines"),
        ([f"{PACKAGE}/rl_loop.py", f"{PACKAGE}/trainer/checkpoint.py", "/usr/lib/threading.py"], "saves"),
        ([f"{PACKAGE}/rl_loop.py", f"{PACKAGE}/data/prompts.py", "/user/env.py"], "works"),
        ([f"{TORCH}/run.py", f"{PACKAGE}/trainer/policy.py"], "works"),
    ],
)
def test_waits_that_have_deadlines_of_their_own_are_known(files, kind):
    function = lambda: where(sys._getframe(1))  # noqa: E731  the innermost frame is that of the last file
    for file in reversed(files):
        names: dict = {"inner": function}
        exec(compile("def outer():\n    return inner()", file, "exec"), names)
        function = names["outer"]
    assert function()[0] == kind


LEAVES = """
import datetime, os, time
import torch, torch.distributed as dist
from megatron_fp8rl.runtime.stop import StopRequest
stop = StopRequest.install()
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=3))
def gradients():
    dist.all_reduce(torch.ones(1), group=None if os.environ["RANK"] == "0" else group)
with stop.errors_noted():
    gradients()
"""


def test_ranks_in_different_collective_operations_are_named_with_them(tmp_path):
    (tmp_path / "leaves.py").write_text(LEAVES)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "LAUNCH_DIR": str(tmp_path)}
    done = subprocess.run(
        [*command, str(tmp_path / "leaves.py")], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    error = json.loads((tmp_path / "error-rank0.json").read_text())["text"]
    assert "Timed out waiting" in error or "losed by peer" in error or "reset by peer" in error, error
    assert "trainer rank 0 waited for other ranks in all_reduce, called by gradients (" in error
    assert "waited for other ranks in all_reduce, called by gradients (" in done.stderr
