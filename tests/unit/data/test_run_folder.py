"""Who may use a run's folder: no other run beside a living one, and nothing that is not a run's."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_fp8rl.config import CheckpointConfig, ConfigError
from megatron_fp8rl.data import folder_lock, run_folder
from megatron_fp8rl.net import sockets
from megatron_fp8rl.preflight import rules
from model_configs.tiny import tiny_qwen3
from tests.helpers.processes import holds


def config(folder: Path, **fields):
    return replace(tiny_qwen3(), output_dir=str(folder), **fields)


@pytest.fixture
def holder(tmp_path):
    with holds(tmp_path / "run") as process:
        yield process


def test_a_second_run_is_refused_and_a_killed_ones_folder_is_taken_over(tmp_path, holder):
    cfg = config(tmp_path / "run")
    output = f"another run uses it: process {holder.pid} on {socket.gethostname()}, since 20"
    with pytest.raises(ConfigError, match=output), run_folder.locked(cfg):
        pass
    assert json.loads((tmp_path / "run" / "run.lock").read_text())["pid"] == str(holder.pid)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with run_folder.locked(cfg):
        assert json.loads((tmp_path / "run" / "run.lock").read_text())["pid"] == str(os.getpid())
    assert (tmp_path / "run" / "run.lock").read_text() == ""


@contextlib.contextmanager
def beats(lock: Path, behind_s: float = 0.0):
    """Another node's run, whose clock is behind, keeps its lock new."""
    ended = threading.Event()

    def beat():
        while not ended.wait(0.2):
            os.utime(lock, (time.time() - behind_s,) * 2)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("is_alive", [False, True])
def test_the_heartbeat_tells_of_a_run_on_another_node(tmp_path, monkeypatch, is_alive):
    monkeypatch.setattr(folder_lock, "SILENT_S", 2.0)
    lock = tmp_path / "run.lock"
    lock.write_text(json.dumps({"host": "elsewhere", "pid": "7", "job": "123", "since": "today"}))
    if is_alive:
        with beats(lock), pytest.raises(ConfigError, match="process 7 on elsewhere, job 123, since today"):
            with run_folder.locked(config(tmp_path)):
                pass
    else:
        began = time.monotonic()
        with run_folder.locked(config(tmp_path)):
            assert time.monotonic() - began < 10


def test_a_living_holder_whose_clock_is_behind_keeps_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "SILENT_S", 2.0)
    lock = tmp_path / "run.lock"
    lock.write_text(json.dumps({"host": "elsewhere", "pid": "7"}))
    with beats(lock, 3600.0), pytest.raises(ConfigError, match="process 7 on elsewhere"):
        with run_folder.locked(config(tmp_path)):
            pass


def test_a_full_disk_is_said_in_a_line(tmp_path, monkeypatch):
    def full(file, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder_lock, "_write", full)
    with pytest.raises(ConfigError, match="run.lock cannot be written: No space left on device"):
        with run_folder.locked(config(tmp_path)):
            pass


def test_a_folder_that_is_no_runs_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "my_weights.bin").write_text("precious")
    with pytest.raises(ConfigError, match="is not empty and not a run folder: it contains model"):
        with run_folder.locked(config(tmp_path)):
            pass
    assert (tmp_path / "model" / "my_weights.bin").read_text() == "precious"
    (actual,) = [str(violation) for violation in rules.check(config(tmp_path)) if violation.field == "--output_dir"]
    assert "not a run folder" in actual and "Name another" in actual
    (tmp_path / "launch").mkdir()  # a folder of that name makes it no run's
    assert run_folder.violations(config(tmp_path))
    (tmp_path / "versions.json").write_text("{}")  # of a run from before there were locks
    assert not run_folder.violations(config(tmp_path))


def test_a_name_that_leaves_the_folder_is_refused():
    assert any(violation.field == "--name" for violation in rules.check(replace(tiny_qwen3(), name="..")))


@pytest.mark.parametrize("name", ["step_00000020", "damaged_step_00000020"])
def test_a_start_from_0_beside_checkpoints_is_refused(tmp_path, name):
    (tmp_path / "run.lock").touch()
    (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert not run_folder.violations(config(tmp_path))
    anew = config(tmp_path, checkpoint=CheckpointConfig(resume=False))
    (actual,) = run_folder.violations(anew)
    assert f"contains {name}, which a run from step 0 would overwrite" in str(actual) and "Name another" in str(actual)


def test_what_an_earlier_run_left_standing_still_is_killed(tmp_path):
    folder = tmp_path / "run"
    environ = {**os.environ, "FP8RL_RUN_DIR": str(folder)}
    left = subprocess.Popen(["sleep", "600"], env=environ)
    other = subprocess.Popen(["sleep", "600"], env={**os.environ, "FP8RL_RUN_DIR": str(tmp_path / "other")})
    os.kill(left.pid, signal.SIGSTOP)
    try:
        with run_folder.locked(config(folder)):
            assert left.wait(60) == -signal.SIGKILL and other.poll() is None
            assert os.environ["FP8RL_RUN_DIR"] == str(folder)
    finally:
        other.kill()
        other.wait()


def test_sockets_of_servers_that_were_killed_are_removed_before_and_after_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = tmp_path / "run"
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    mine = Path(sockets.make_folder())

    def leave() -> Path:
        folder = tmp_path / f"fp8rl-sockets-{dead.pid}-x"
        folder.mkdir()
        (folder / "socket").touch()
        return folder

    left = leave()
    with run_folder.locked(config(run)):
        assert not left.exists()
        left = leave()
    assert not left.exists() and mine.exists()
