"""A warning about rewarded wrong answers is red on a terminal, and plain in a pipe."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WARNING = "WARNING: train: 24 wrong answers are rewarded, such as 'pass' by 1"
PROGRAM = """
import dataclasses, sys
from megatron_fp8rl import cli
from megatron_fp8rl.config import EnvironmentConfig, RewardConfig
from megatron_fp8rl.preflight.data_check import check_data

source = EnvironmentConfig(dataset=sys.argv[1], rewards=(RewardConfig(function=sys.argv[2]),))
demo = cli.load_config("tiny_qwen3_moe")
cfg = dataclasses.replace(demo, data=dataclasses.replace(demo.data, environments=(source,)))
check_data(cfg)  # before a run, on standard output
cli.load_config = lambda target: cfg  # a dry run, on standard error
cli.main([cli.Command(name="rl", summary="", run=lambda _: 3, reads_data=True)], ["rl", "demo", "--dry-run"])
"""


def printed(folder: Path, *, on_terminal: bool, **variables: str) -> str:
    """What the check of a reward that accepts any text prints."""
    rows = [json.dumps({"question": f"{i} + 1 =", "answer": str(i + 1)}) for i in range(20)]
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "mine.py").write_text("def always(completion):\n    return float(bool(completion))\n")
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", "train.jsonl", "mine.py:always"]
    environ = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
    environ |= {"PYTHONPATH": str(ROOT), "MEGATRON_FP8RL_CACHE": str(folder / "cache"), "TERM": "xterm", **variables}
    if not on_terminal:
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.run(command, cwd=folder, env=environ, timeout=300, text=True, **both).stdout
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, cwd=folder, env=environ, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    text = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # the program has ended
            break
        if not part:
            break
        text += part
    os.close(ours)
    process.wait(timeout=60)
    return text.decode()


def test_red_on_a_terminal(tmp_path):
    text = printed(tmp_path, on_terminal=True)
    lines = [line.strip() for line in text.splitlines() if WARNING in line]
    assert len(lines) == 2
    assert all(line.startswith(f"\x1b[31m{WARNING}") and line.endswith("\x1b[0m") for line in lines)
    assert text.count("\x1b[31m") == 2


@pytest.mark.parametrize(("on_terminal", "variables"), [(False, {}), (True, {"NO_COLOR": "1"})])
def test_no_color_in_a_pipe_or_if_the_user_wants_none(tmp_path, on_terminal, variables):
    text = printed(tmp_path, on_terminal=on_terminal, **variables)
    assert text.count(WARNING) == 2 and "\x1b" not in text
