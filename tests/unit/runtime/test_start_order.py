"""Engines start before slow imports and before the data are checked, and end if the data are bad."""

import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_fp8rl.commands import train
from megatron_fp8rl.config import ConfigError, Violation
from megatron_fp8rl.rollout import reward_server
from megatron_fp8rl.rollout.fleet import Fleet
from megatron_fp8rl.rollout.vllm_plugin import server
from model_configs.tiny import tiny_qwen3

SLOW = ("vllm", "transformers", "scipy", "fastapi", "megatron", "sympy", "torch._inductor")


def test_engines_start_before_slow_packages_are_imported():
    code = (
        "import sys\n"
        "from megatron_fp8rl.rollout import fleet, reward_server\n"
        "from megatron_fp8rl.data import model_dir, run_folder\n"
        "from megatron_fp8rl.precision.hardware import local_hardware\n"
        "local_hardware()\n"
        f"sys.exit(', '.join(name for name in {SLOW} if name in sys.modules) or 0)\n"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr


@pytest.fixture
def events(monkeypatch):
    """What happens, in order: the start of a fleet that needs no engine, and its end."""
    happened: list[str] = []

    class NoEngines(ExitStack):
        def __exit__(self, *error):
            happened.append("engines end")
            return super().__exit__(*error)

    def start(cfg, hf_dir, run_dir, *, wait, meanwhile):
        happened.append("engines start")
        assert not Path(hf_dir).exists() and not wait
        fleet = NoEngines()
        try:
            meanwhile()
        except BaseException:
            fleet.__exit__(None, None, None)
            raise
        assert (Path(hf_dir) / "config.json").exists()
        return fleet

    monkeypatch.setattr(Fleet, "start", start)
    monkeypatch.setattr(train, "check_data", lambda cfg: happened.append("data"))
    monkeypatch.setattr(train, "write_reports", lambda cfg: happened.append("reports"))
    return happened


@pytest.fixture
def cfg(tmp_path):
    (tmp_path / "model").mkdir()  # of an earlier start
    (tmp_path / "run.lock").touch()
    return replace(tiny_qwen3(), output_dir=str(tmp_path))


def test_the_data_are_checked_while_engines_start(events, cfg, monkeypatch):
    monkeypatch.setattr(reward_server, "serving", lambda cfg: ExitStack())
    with ExitStack() as stack:
        assert train._prepare(cfg, stack, wants_engines=True) is not None
        assert events == ["engines start", "data"]
    assert events == ["engines start", "data", "engines end", "reports"]


def test_bad_data_end_the_engines(events, cfg, monkeypatch):
    def refuse(_):
        raise ConfigError([Violation("--data", "x", "no rows", "Name a file")])

    monkeypatch.setattr(train, "check_data", refuse)
    with pytest.raises(ConfigError, match="no rows"), ExitStack() as stack:
        train._prepare(cfg, stack, wants_engines=True)
    assert events == ["engines start", "engines end"]


def test_an_engine_waits_for_the_folder_of_its_model(tmp_path):
    waiting = threading.Thread(target=server._wait_for_model, args=(tmp_path,), daemon=True)
    waiting.start()
    time.sleep(0.1)
    assert waiting.is_alive()
    (tmp_path / "config.json").touch()
    waiting.join(10)
    assert not waiting.is_alive()
