"""Engines start before slow imports, and after the data are checked."""

import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_fp8rl.commands import train
from megatron_fp8rl.config import ConfigError, Violation
from megatron_fp8rl.rollout import reward_server
from megatron_fp8rl.rollout.fleet import Fleet
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

    def start(cfg, hf_dir, run_dir, *, wait):
        happened.append("engines start")
        assert (Path(hf_dir) / "config.json").exists() and not wait
        return NoEngines()

    monkeypatch.setattr(Fleet, "start", start)
    monkeypatch.setattr(train, "check_data", lambda cfg: happened.append("data"))
    monkeypatch.setattr(train, "write_reports", lambda cfg: happened.append("reports"))
    return happened


@pytest.fixture
def cfg(tmp_path):
    (tmp_path / "run.lock").touch()
    return replace(tiny_qwen3(), output_dir=str(tmp_path))


def test_engines_start_after_the_data_are_checked(events, cfg, monkeypatch):
    monkeypatch.setattr(reward_server, "serving", lambda cfg: ExitStack())
    with ExitStack() as stack:
        assert train._prepare(cfg, stack, wants_engines=True) is not None
        assert events == ["data", "engines start"]
    assert events == ["data", "engines start", "engines end", "reports"]


def test_bad_data_start_no_engine(events, cfg, monkeypatch):
    def refuse(_):
        raise ConfigError([Violation("--data", "x", "no rows", "Name a file")])

    monkeypatch.setattr(train, "check_data", refuse)
    with pytest.raises(ConfigError, match="no rows"), ExitStack() as stack:
        train._prepare(cfg, stack, wants_engines=True)
    assert events == []
