"""Warnings of other packages go to the log of the run, and nothing else does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fp8rl import cli
from megatron_fp8rl.observe import other_packages

ROOT = Path(__file__).resolve().parents[3]
# Runs a line of code as if it stood in a file of another package, of this package or of the user.
SCRIPT = """
import logging, sys, sysconfig, warnings
from pathlib import Path
import megatron_fp8rl
from megatron_fp8rl.observe import other_packages

folder, place, code = sys.argv[1:]
own_handler, to_file = logging.StreamHandler(), logging.FileHandler("own.log", delay=True)
other_packages.keep_in_log(Path(folder), 3)
files = {
    "package": sysconfig.get_paths()["purelib"] + "/megatron/core/optimizer.py",
    "program": str(Path(megatron_fp8rl.__file__).parent / "trainer" / "build.py"),
    "user": "/nowhere/reward.py",
}
log = logging.getLogger("some.name")
exec(compile(code, files[place], "exec"))
"""
WARN = "warnings.warn('Apex is not installed')"
LOG = "log.warning('GPTModel IS DEPRECATED')"
WITH_HANDLER = "log.addHandler(own_handler); log.propagate = False; log.warning('async save is deprecated')"
TRACEBACK = """
try:
    1 / 0
except ZeroDivisionError:
    log.warning('cleanup failed', exc_info=True)
"""


def outcome(tmp_path: Path, place: str, code: str, **environment: str) -> tuple[str, str]:
    """(stderr, text of the log)."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "logs"), place, code]
    environment = {key: value for key, value in os.environ.items() if key != "FP8RL_VERBOSE"} | environment
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    log = tmp_path / "logs" / "packages.rank3.txt"
    return done.stderr, log.read_text() if log.exists() else ""


@pytest.mark.parametrize(
    ("place", "code", "text"),
    [
        ("package", WARN, "optimizer.py:1: UserWarning: Apex is not installed"),
        ("package", "warnings.warn('old', FutureWarning)", "FutureWarning: old"),
        ("program", WARN, "UserWarning: Apex is not installed"),  # of a package that this line calls
        ("package", LOG, "some.name: GPTModel IS DEPRECATED"),
        ("package", WITH_HANDLER, "some.name: async save is deprecated"),
    ],
)
def test_warnings_of_other_packages_are_only_in_the_log(tmp_path, place, code, text):
    stderr, log = outcome(tmp_path, place, code)
    assert stderr == "" and text in log


@pytest.mark.parametrize(
    ("place", "code", "text"),
    [
        ("program", LOG, "GPTModel IS DEPRECATED"),
        ("user", WARN, "reward.py:1: UserWarning: Apex is not installed"),
        ("user", LOG, "GPTModel IS DEPRECATED"),
        ("package", "log.error('NCCL failed')", "NCCL failed"),
        ("package", TRACEBACK, "ZeroDivisionError: division by zero"),
        ("package", "raise RuntimeError('out of memory')", "RuntimeError: out of memory"),
        ("package", "print('saving', file=sys.stderr)", "saving"),
    ],
)
def test_own_and_user_warnings_errors_and_tracebacks_stay_visible(tmp_path, place, code, text):
    stderr, log = outcome(tmp_path, place, code)
    assert text in stderr and log == ""


@pytest.mark.parametrize("code", [WARN, LOG, WITH_HANDLER])
def test_verbose_shows_them(tmp_path, code):
    stderr, log = outcome(tmp_path, "package", code, FP8RL_VERBOSE="1")
    assert stderr and log == "" and not (tmp_path / "logs").exists()


@pytest.mark.parametrize("code", [WARN, LOG])
def test_they_are_shown_if_the_log_cannot_be_written(tmp_path, code):
    (tmp_path / "logs").write_text("a file, not a folder")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "logs"), "package", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "Apex is not installed" in done.stderr or "GPTModel IS DEPRECATED" in done.stderr


def test_files_that_a_package_logs_to_get_everything(tmp_path):
    stderr, log = outcome(tmp_path, "package", "log.addHandler(to_file); log.warning('kept')")
    assert (tmp_path / "own.log").read_text() == "kept\n" and stderr == log == ""


def test_starts_are_told_apart_in_the_log(tmp_path):
    for _ in range(2):
        _, log = outcome(tmp_path, "package", f"{LOG}; {LOG}")
    lines = log.splitlines()
    assert [line.startswith("# 20") for line in lines] == [True, False, False] * 2


def test_a_run_without_warnings_has_no_log(tmp_path):
    assert outcome(tmp_path, "package", "pass") == ("", "") and not (tmp_path / "logs").exists()


def test_the_flag_is_taken_from_the_command_line_of_any_command(monkeypatch):
    monkeypatch.setenv("FP8RL_VERBOSE", "")
    monkeypatch.delenv("FP8RL_VERBOSE")
    seen = []

    def run(invocation):
        seen.append((invocation.options, other_packages.is_verbose()))
        return 0

    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    command = cli.Command(name="go", summary="Go.", run=run, takes_config=False)
    assert cli.main([command], ["go"]) == 0 and cli.main([command], ["go", "--verbose"]) == 0
    assert [is_verbose for _, is_verbose in seen] == [False, True]


@pytest.mark.parametrize(("flags", "level"), [((), "ERROR"), (("--verbose",), None)])
def test_a_command_sets_the_level_of_pytorch_before_it_runs(monkeypatch, flags, level):
    for name in ("TORCH_CPP_LOG_LEVEL", "FP8RL_VERBOSE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    levels = []
    command = cli.Command(
        name="go",
        summary="Go.",
        run=lambda _: levels.append(os.environ.get("TORCH_CPP_LOG_LEVEL")) or 0,
        takes_config=False,
    )
    assert cli.main([command], ["go", *flags]) == 0 and levels == [level]


def test_pytorch_follows_the_level(tmp_path):
    code = "torch.distributed.TCPStore('no-such-host.invalid', 1, timeout=timedelta(seconds=1))"
    code = f"import torch.distributed; from datetime import timedelta; {code}"
    shown = []
    for level in ({}, {"TORCH_CPP_LOG_LEVEL": "ERROR"}):
        environment = {key: value for key, value in os.environ.items() if key != "TORCH_CPP_LOG_LEVEL"} | level
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        shown.append(done.stderr)
    assert "[W" in shown[0] and "[W" not in shown[1]
    assert "[E" in shown[1] and "Traceback" in shown[1]


def test_warnings_of_pytorch_in_cpp_are_left_out_unless_a_user_wants_them(monkeypatch):
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    monkeypatch.delenv("FP8RL_VERBOSE", raising=False)
    assert other_packages.pytorch_level() == {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    assert other_packages.pytorch_level() == {}
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
    monkeypatch.setenv("FP8RL_VERBOSE", "1")
    assert other_packages.pytorch_level() == {}
