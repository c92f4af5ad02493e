"""The pages of the jobs sft, dpo and distill: their files and commands are executed."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.own_model import make_model

ROOT = Path(__file__).resolve().parents[2]
_FILE = re.compile(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", re.DOTALL)
_RUN = re.compile(r"<!-- run -->\n```sh\n(.*?)```", re.DOTALL)


def _run(page: str, folder: Path) -> str:
    """Run the command of a page in ``folder`` with its files; the output."""
    text = (ROOT / "docs" / page).read_text()
    for name, content in _FILE.findall(text):
        (folder / name).write_text(content)
    if not (folder / "MODEL").exists():
        make_model(folder / "MODEL", ["What is 2 + 3?", "Sure?", "Yes.", "Be short."])
    (command,) = _RUN.findall(text)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "MEGATRON_FP8RL_CACHE": str(folder / "cache")}
    args = shlex.split(command.replace("\\\n", " "))[1:]
    done = subprocess.run([sys.executable, *args], cwd=folder, env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def _metrics(run_dir: Path) -> list[dict]:
    assert (run_dir / "hf" / "model.safetensors").exists() and (run_dir / "report.html").exists()
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_the_page_of_sft_runs_as_written(tmp_path):
    output = _run("sft.md", tmp_path)
    assert "chats: 3 conversations" in output and "chats, held out: 1 conversations" in output
    metrics = _metrics(tmp_path / "runs" / "MODEL-sft-chats")
    assert [row["step"] for row in metrics] == [0, 1, 2, 3]
    assert metrics[3]["eval/loss/mean"] < metrics[0]["eval/loss/mean"]


def test_the_page_of_dpo_runs_as_written(tmp_path):
    output = _run("dpo.md", tmp_path)
    assert "pairs: 4 pairs" in output and "computes reference log-probabilities of 4 pairs" in output
    metrics = _metrics(tmp_path / "runs" / "MODEL-dpo-pairs")
    assert [row["step"] for row in metrics] == [0, 1, 2, 3, 4]
    assert metrics[1]["train/loss/mean"] == pytest.approx(0.6931, abs=1e-3)  # log 2: the policy is the reference


@pytest.mark.slow
def test_the_page_of_distill_runs_as_written(tmp_path):
    make_model(tmp_path / "TEACHER", ["What is 2 + 3?", "Sure?", "Yes.", "Be short."])
    _run("distill.md", tmp_path)
    run_dir = tmp_path / "runs" / "MODEL-questions-distilled"
    metrics = _metrics(run_dir)
    assert [row["step"] for row in metrics] == [0, 1, 2]
    for row in metrics[1:]:
        assert row["train/loss/mean"] > 0 and row["loss/kl_ref/mean"] > 0.01 and row["reward/score/max"] == 0
        assert row["publish/version/max"] == row["step"] and row["mismatch/abs_logprob_diff/max"] < 0.1


@pytest.mark.parametrize(
    ("job", "args", "message"),
    [
        ("sft", ["--data", "chats.jsonl"], "--model = '': there is no model to train"),
        ("sft", ["--model", "MODEL", "--data", "chain_sum"], "--data = ('chain_sum',): chain_sum has no rows"),
        ("sft", ["--model", "MODEL", "--data", "chat.jsonl"], "did you mean chats.jsonl"),
        ("sft", ["--model", "MODEL", "--data", "chats.jsonl", "--batch_size", "0"], "--batch_size = 0: is below 1"),
        ("sft", ["--model", "MODEL", "--data", "chats.jsonl", "--epochs", "-1"], "--epochs = -1.0: is not a number"),
        ("dpo", ["--model", "MODEL", "--data", "chats.jsonl"], "pairs need the columns chosen and rejected"),
        ("dpo", ["--model", "MODEL", "--data", "chats.jsonl", "--beta", "0"], "--beta = 0.0: is not a number above 0"),
        ("dpo", ["--model", "MODEL", "--data", "chats.jsonl", "--label_smoothing", "0.5"], "--label_smoothing = 0.5"),
        ("dpo", ["tiny_qwen3"], "--algo.loss = 'dapo': with these sources"),
        ("distill", ["--model", "MODEL", "--data", "chats.jsonl"], "--teacher = (): there is no teacher"),
        ("distill", ["--model", "MODEL", "--data", "chats.jsonl", "--teacher", "MODLE"], "is not a folder with config"),
        (
            "distill",
            ["--model", "MODEL", "--data", "a.jsonl", "b.jsonl", "c.jsonl", "--teacher", "MODEL", "http://a/v1"],
            "2 teachers for 3 sources",
        ),
        ("distill", ["tiny_qwen3"], "--algo.loss = 'dapo': with these sources"),
        ("train", ["tiny_qwen3", "--algo.loss", "dpo"], "--algo.loss = 'dpo': learns pairs of rows without rewards"),
        ("sft", ["tiny_qwen3", "--data", "chats.jsonl"], "--data makes a configuration, and tiny_qwen3 is one"),
    ],
)
def test_mistakes_are_named_by_field(tmp_path, monkeypatch, capsys, job, args, message):
    from megatron_fp8rl import cli
    from megatron_fp8rl.__main__ import COMMANDS

    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "MODEL", ["What is 2 + 3?"])
    (tmp_path / "chats.jsonl").write_text('{"prompt": "1", "completion": "2"}\n')
    assert cli.main(COMMANDS, [job, *args, *(["--gpus", "0"] if "MODEL" in args else [])]) == 2
    assert message in capsys.readouterr().err
