"""The pages quickstart and data_and_rewards: their files, commands and snippets are executed."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fp8rl.config import EnvironmentConfig, RewardConfig
from megatron_fp8rl.envs.rewards.configured import BUILT_IN, build, problem
from megatron_fp8rl.types import Prompt
from tests.helpers.own_model import make_model

ROOT = Path(__file__).resolve().parents[2]
_FILE = re.compile(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", re.DOTALL)
_RUN = re.compile(r"<!-- run -->\n```sh\n(.*?)```", re.DOTALL)
_PYTHON = re.compile(r"<!-- python -->\n```python\n(.*?)```", re.DOTALL)


def _page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def test_the_quickstart_runs_as_written(tmp_path):
    page = _page("quickstart.md")
    for name, text in _FILE.findall(page):
        (tmp_path / name).write_text(text)
    questions = [json.loads(line)["question"] for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    make_model(tmp_path / "MODEL", questions)
    (command,) = _RUN.findall(page)
    args = shlex.split(command.replace("\\\n", " "))
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "MEGATRON_FP8RL_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, *args[1:]], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "10 rows" in done.stdout and "reference answers score 1, empty answers 0" in done.stdout
    assert "WARNING" not in done.stdout + done.stderr
    run_dir = tmp_path / "runs" / "MODEL-train"
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 4
    assert (run_dir / "hf" / "model.safetensors").exists() and (run_dir / "report.html").exists()


def test_every_reward_of_the_page_exists_and_every_reward_is_on_it(tmp_path, monkeypatch):
    page = _page("data_and_rewards.md")
    assert set(BUILT_IN) == set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    for name, text in _FILE.findall(page):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    (snippet,) = _PYTHON.findall(page)
    names: dict = {}
    exec(snippet, names)
    source: EnvironmentConfig = names["source"]
    assert [problem(reward) for reward in source.rewards] == ["", "", ""]
    prompt = Prompt(prompt_id="a/0", environment="a", token_ids=(), text="?", answer="4", metadata={"level": "hard"})
    assert build(RewardConfig(function="mine.py:graded"))([prompt], ["it is 4"])[0] == {"right": 1.0, "hard": 1.0}
    assert build(RewardConfig(function="mine.py:asked"))([prompt], ["x"]) == [1.0]


@pytest.mark.parametrize("name", ["prompt", "answer"])
def test_the_columns_of_the_page_are_those_that_are_found(name):
    from megatron_fp8rl.data import columns

    (row,) = re.findall(rf"^\| {name} \| (.*) \|$", _page("data_and_rewards.md"), re.MULTILINE)
    listed = re.findall(r"`([\w.]+)`", row)
    rows = [{"x": "1", "prompt" if name == "answer" else "answer": "2"} | _nested(column) for column in listed]
    assert listed == list({"prompt": columns._PROMPTS, "answer": columns._ANSWERS}[name])
    assert [getattr(columns.find_columns(row), name) for row in rows] == listed


def _nested(column: str) -> dict:
    head, _, tail = column.partition(".")
    return {head: {tail: "1"} if tail else "1"}
