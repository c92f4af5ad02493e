"""A lock over several nodes: one owner, whatever flock does there; a dead owner elsewhere does not keep it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_fp8rl.data import folder_lock
from megatron_fp8rl.data.folder_lock import InUseError
from tests.helpers.processes import until

# host, whether flock works, path: holds the lock for two minutes.
OWNER = """
import sys, time
from pathlib import Path
from megatron_fp8rl.data import folder_lock
host, has_flock, path = sys.argv[1:]
me = folder_lock._me() | ({"host": host, "boot": host} if host else {})
folder_lock._me = lambda: me
folder_lock.DYING_S, folder_lock.SILENT_S, folder_lock.BEAT_S = 1.0, 4.0, 0.5
if has_flock == "no":
    def flock(file, kind):
        raise OSError(95, "Operation not supported")
    folder_lock.fcntl.flock = flock
try:
    with folder_lock.hold(Path(path)):
        print("owner", flush=True)
        time.sleep(120)
except folder_lock.InUseError as error:
    print("in use:", error, flush=True)
"""


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(folder_lock, "DYING_S", 0.5)
    monkeypatch.setattr(folder_lock, "SILENT_S", 2.0)
    monkeypatch.setattr(folder_lock, "HELD_SILENT_S", 3.0)


@pytest.fixture
def start():
    processes = []

    def started(path: Path, host: str = "", has_flock: str = "yes") -> subprocess.Popen:
        command = [sys.executable, "-c", OWNER, host, has_flock, str(path)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, **pipes))
        return processes[-1]

    yield started
    for process in processes:
        process.kill()
        process.wait()


def owned(process: subprocess.Popen) -> subprocess.Popen:
    assert process.stdout.readline() == "owner\n", process.stderr.read()
    return process


def refusal(path: Path, **how) -> str:
    """Why the lock cannot be held; empty if it can."""
    try:
        with folder_lock.hold(path, **how):
            return ""
    except InUseError as error:
        return str(error)


def test_of_processes_that_start_at_once_one_owns_the_lock(tmp_path, start):
    processes = [start(tmp_path / "lock") for _ in range(4)]
    lines = sorted(process.stdout.readline() for process in processes)
    assert [line.split(":")[0].strip() for line in lines] == ["in use"] * 3 + ["owner"]


@pytest.mark.parametrize("hosts", [("", ""), ("node1", "node2")])
def test_without_flock_one_of_two_at_once_remains(tmp_path, start, hosts):
    processes = [start(tmp_path / "lock", host, "no") for host in hosts]
    until(lambda: sum(process.poll() is None for process in processes) == 1, "one of two to end")
    (first,), (last,) = ([p for p in processes if (p.poll() is None) is alive] for alive in (True, False))
    assert owned(first).poll() is None and last.wait() in (0, 2)
    assert "in use" in last.stdout.read() or "is now used by another run" in last.stderr.read()
    assert json.loads((tmp_path / "lock").read_text())["pid"] == str(first.pid)


def test_a_living_owner_elsewhere_keeps_its_lock(tmp_path, start):
    process = owned(start(tmp_path / "lock", "elsewhere"))
    assert f"process {process.pid} on elsewhere, since 20" in refusal(tmp_path / "lock")
    assert f"process {process.pid} on elsewhere" in folder_lock.owner(tmp_path / "lock")
    assert folder_lock.owner(tmp_path / "lock", waits=False) == ""  # nothing is known about another node
    assert process.poll() is None and refusal(tmp_path / "lock")


def test_a_held_lock_of_a_dead_node_is_taken_over_and_a_suspended_owner_ends(tmp_path, start):
    """As on a file system that keeps the locks of a lost node: the file is locked, and nobody touches it."""
    process = owned(start(tmp_path / "lock", "elsewhere"))
    process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    with folder_lock.hold(tmp_path / "lock"):
        assert time.monotonic() - began < 30
        assert json.loads((tmp_path / "lock").read_text())["pid"] == str(os.getpid())
        process.send_signal(signal.SIGCONT)
        assert process.wait(30) == 2
        assert f"is now used by another run: process {os.getpid()} on " in process.stderr.read()
        assert json.loads((tmp_path / "lock").read_text())["pid"] == str(os.getpid())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["lock"]


def test_a_suspended_owner_on_this_machine_keeps_its_lock(tmp_path, start):
    process = owned(start(tmp_path / "lock"))
    process.send_signal(signal.SIGSTOP)
    assert f"process {process.pid} on " in refusal(tmp_path / "lock")
    assert f"process {process.pid} on " in folder_lock.owner(tmp_path / "lock", waits=False)
    process.kill()
    process.wait()
    assert folder_lock.owner(tmp_path / "lock") == "" and refusal(tmp_path / "lock") == ""


@pytest.mark.parametrize(
    ("job", "is_restart", "waits"), [("7", True, False), ("7", False, True), ("8", True, True), ("", True, True)]
)
def test_the_next_attempt_of_a_job_does_not_wait_for_the_earlier_one(tmp_path, monkeypatch, job, is_restart, waits):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    path = tmp_path / "lock"
    path.write_text(json.dumps({"host": "elsewhere", "boot": "other", "pid": "1", "job": job}))
    began = time.monotonic()
    assert refusal(path, is_restart=is_restart) == ""
    assert (time.monotonic() - began >= 2.0) == waits


def test_an_owner_tells_of_its_loss_once_and_removal_of_the_file_is_none(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(folder_lock, "BEAT_S", 0.1)
    lost, path = threading.Event(), tmp_path / "lock"
    with folder_lock.hold(path, on_loss=lost.set):
        path.unlink()
        assert not lost.wait(1.0)
        path.write_text(json.dumps({"host": "elsewhere", "pid": "9", "since": "today"}))
        assert lost.wait(10.0)
    assert json.loads(path.read_text())["pid"] == "9", "the new owner's name stays"
    assert (
        "is now used by another run: process 9 on elsewhere, since today. This process ends" in capfd.readouterr().err
    )


def test_a_lock_that_cannot_be_read_or_is_not_there_has_no_owner(tmp_path):
    assert folder_lock.owner(tmp_path / "none" / "lock") == ""
    (tmp_path / "lock").write_text("[1, ")
    assert folder_lock.owner(tmp_path / "lock") == "" and refusal(tmp_path / "lock") == ""
