"""Runs that are told to stop: they finish their step, save, say so with exit status 85, and go on from there."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_fp8rl.config import ConfigError, Violation
from megatron_fp8rl.runtime.stop import SAVED, RunStopped, StopRequest
from tests.helpers.processes import until

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 600
BRIEF = tuple(
    "--observe.display plain --observe.eval_prompts 4 --warm_start.steps 30 --sampling.prompts_per_step 4".split()
)


class Alone:
    rank, world_size = 0, 1

    def barrier(self, name: str) -> None:
        pass


def _start(run_dir: Path, *args: str, environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    log = run_dir.with_suffix(".log").open("ab")
    command = [sys.executable, "-m", "megatron_fp8rl", "sft", "tiny_qwen3_moe", *BRIEF, "--output_dir", str(run_dir)]
    return subprocess.Popen(
        [*command, *args], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=os.environ | (environment or {})
    )


def _wait_for_steps(process: subprocess.Popen[bytes], metrics: Path, count: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not metrics.exists() or len(metrics.read_text().splitlines()) < count:
        assert process.poll() is None and time.monotonic() < deadline, f"{metrics} has no {count} steps"
        time.sleep(0.05)


def _losses(run_dir: Path) -> dict[int, float]:
    lines = map(json.loads, (run_dir / "warm_start" / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["train/loss/mean"] for line in lines}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    run_dir = tmp_path_factory.mktemp("stop") / "whole"
    assert _start(run_dir).wait(DEADLINE_S) == 0
    return _losses(run_dir)


def _processes(mark: str) -> dict[int, str]:
    """Command lines of a run's descendants, by process."""
    result = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get("FP8RL_TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                result[process.pid] = " ".join(process.cmdline())
    return result


@pytest.mark.parametrize("victim", ["the command", "torchrun"])
def test_the_ranks_of_a_killed_command_end_with_it(victim, tmp_path: Path):
    run_dir, mark = tmp_path / "run", str(tmp_path)
    process = _start(run_dir, "--parallel.world_size", "2", environment={"FP8RL_TEST_MARK": mark})
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not (run_dir / "run.lock").exists():  # both ranks are there, and at least one waits for the other
            assert process.poll() is None and time.monotonic() < deadline, run_dir.with_suffix(".log").read_text()[
                -3000:
            ]
            time.sleep(0.02)
        (torchrun,) = (pid for pid, line in _processes(mark).items() if "torch.distributed.run" in line)
        os.kill(process.pid if victim == "the command" else torchrun, signal.SIGKILL)
        process.wait(30)
        until(lambda: not _processes(mark), "the processes of a killed command to end")
    finally:
        process.kill()
        for pid in _processes(mark):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGUSR1, 1), (signal.SIGTERM, 2)])
def test_a_signal_ends_a_run_after_its_step_and_the_next_one_goes_on(number, ranks, uninterrupted, tmp_path: Path):
    run_dir = tmp_path / "run"
    args = ("--parallel.world_size", str(ranks))
    process = _start(run_dir, *args)
    warm_start = run_dir / "warm_start"
    _wait_for_steps(process, warm_start / "metrics.jsonl", 3)
    process.send_signal(number)
    assert process.wait(DEADLINE_S) == SAVED, run_dir.with_suffix(".log").read_text()[-3000:]
    stopped_at = max(_losses(run_dir))
    assert 3 <= stopped_at < 30
    assert [path.name for path in (warm_start / "checkpoints").iterdir()] == [f"step_{stopped_at:08d}"]
    assert not (warm_start / "failure.json").exists() and not (warm_start / "done.json").exists()

    if ranks > 1:
        return  # the next one would only show once more how a checkpoint is read
    assert _start(run_dir, *args).wait(DEADLINE_S) == 0
    assert (warm_start / "done.json").exists() and not (warm_start / "checkpoints").exists()
    assert _losses(run_dir) == uninterrupted


@pytest.mark.long
def test_before_the_first_step_there_is_nothing_to_save(tmp_path: Path):
    run_dir = tmp_path / "run"
    told = tmp_path / "told"
    told.mkdir()
    (told / "stop.json").write_text("{}")
    assert _start(run_dir, environment={"LAUNCH_DIR": str(told)}).wait(DEADLINE_S) == SAVED
    assert json.loads((told / "stopped.json").read_text()) == {"step": 0, "checkpoint": None}
    assert not list(run_dir.glob("warm_start/checkpoints/*"))


def test_what_a_rank_starts_outlives_the_signal():
    program = (
        "import os, signal, subprocess, sys, time\n"
        "from megatron_fp8rl.runtime.stop import StopRequest\n"
        "StopRequest.install()\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(120)'],"
        " stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "child.send_signal(signal.SIGUSR1)\n"
        "time.sleep(0.3)\n"
        "assert child.poll() is None\n"
        "child.terminate()\n"
        "assert child.wait(60) == -signal.SIGTERM\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_rank_under_a_launcher_ends_with_zero_and_leaves_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "0")
    stop = StopRequest(tmp_path)
    stop.at_boundary(Alone(), 7)  # nobody asked
    (tmp_path / "stop.json").write_text("{}")
    saved: list[int] = []
    with pytest.raises(RunStopped) as stopped:
        stop.at_boundary(Alone(), 9, lambda step: saved.append(step) or Path("step_00000009"))
    assert (stopped.value.code, saved) == (0, [9])
    assert json.loads((tmp_path / "stopped.json").read_text()) == {"step": 9, "checkpoint": "step_00000009"}


def test_a_run_that_is_asked_at_its_start_ends_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "0")
    stop = StopRequest(tmp_path)
    stop.at_start(Alone())  # nobody asked
    (tmp_path / "stop.json").write_text("{}")
    with pytest.raises(RunStopped):
        stop.at_start(Alone())
    assert json.loads((tmp_path / "stopped.json").read_text()) == {"step": 0, "checkpoint": None}


def test_an_error_is_noted_with_its_rank_the_moment_it_passes(tmp_path: Path):
    stop = StopRequest(tmp_path, rank=3)
    with pytest.raises(ZeroDivisionError), stop.errors_noted():
        1 / 0  # noqa: B018
    noted = json.loads((tmp_path / "error-rank3.json").read_text())
    assert noted["rank"] == 3 and noted["text"].endswith("ZeroDivisionError: division by zero")
    assert abs(noted["time"] - time.time()) < 60


def test_a_mistake_of_the_user_is_noted_without_a_traceback(tmp_path: Path):
    with pytest.raises(ConfigError), StopRequest(tmp_path).errors_noted():
        raise ConfigError([Violation("--seed", -1, "is negative", "Set 0 or more")])
    noted = json.loads((tmp_path / "error-rank0.json").read_text())
    assert noted["text"] == "1 mistake in the configuration:\n  1. --seed = -1: is negative. Set 0 or more."
