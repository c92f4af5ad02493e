"""The grpo command as a person uses it: an empty folder, a model and a tokenizer made on the spot, rows, a reward."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_fp8rl import cli
from megatron_fp8rl.__main__ import COMMANDS
from megatron_fp8rl.observe.recording import read_steps
from tests.helpers.own_model import make_model

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 600
REWARD = """
def digits(completion, answer):
    share = sum(c.isdigit() for c in completion) / max(1, len(completion))
    return {"digits": share, "right": float(completion.strip() == answer)}


def number_only(completion, answer):
    return float(int(completion) == int(answer))  # raises for nearly every completion of an untrained model
"""
SHORT = tuple(
    (
        "--sampling.max_prompt_tokens 128 --sampling.max_completion_tokens 12 --observe.display plain "
        "--observe.eval_prompts 4 --checkpoint.every_steps 1"
    ).split()
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    rows = [
        {"question": f"Tom has {i} apples and buys {j} more. How many?", "answer": str(i + j)}
        for i in range(8)
        for j in range(5)
    ]
    lines = [json.dumps(row) for row in rows]
    (folder / "train.jsonl").write_text("\n".join([*lines[:30], "{broken", *lines[30:36]]) + "\n")
    (folder / "test.jsonl").write_text("\n".join(lines[36:]) + "\n")
    (folder / "reward.py").write_text(REWARD)
    make_model(folder / "model", [row["question"] for row in rows])
    return folder


def _run(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "MEGATRON_FP8RL_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "megatron_fp8rl", *args]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=DEADLINE_S)


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable:
    """Runs a command that starts nothing, in this process: (status, what it printed, its errors)."""
    monkeypatch.chdir(folder)

    def run(*args: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = cli.main(COMMANDS, list(args))
        return (status, *capsys.readouterr())

    return run


def _rows(run_dir: Path) -> dict[int, list[int]]:
    return {
        step: [group.prompt.metadata["row"] for group in groups] for step, groups in read_steps(run_dir / "rollouts")
    }


def test_three_steps_stop_and_go_on_without_a_row_twice(folder: Path):
    own = (*"grpo --model model --data train.jsonl --eval test.jsonl --reward reward.py:digits".split(), *SHORT)
    few = ("--data.max_dropped", "0.1")
    first = _run(folder, *own, *few, "--num_steps", "2")
    assert first.returncode == 0, first.stdout[-3000:] + first.stderr[-3000:]
    for output in (
        "37 rows, 4 held out",
        "prompt in 'question', answer in 'answer'",
        "left out: row 30 of train: is not JSON",
        "reference answers score 2, empty answers 0",
    ):
        assert output in first.stdout, (output, first.stdout)
    run_dir = folder / "runs" / "model-train"
    again = _run(folder, *own, *few, "--num_steps", "4")
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
    seen = _rows(run_dir)
    rows = [row for step in sorted(seen) for row in seen[step]]
    assert sorted(seen) == [1, 2, 3, 4] and len(rows) == 32 and len(set(rows)) == 32 and 30 not in rows
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["reward/part_digits/mean"] >= 0 and "reward/part_right/mean" in metrics[-1]
    assert metrics[-1]["mismatch/abs_logprob_diff/max"] == 0
    assert (run_dir / "report.html").exists() and (run_dir / "hf" / "config.json").exists()
    (line,) = (run_dir / "data" / "dropped.jsonl").read_text().splitlines() or [None]
    assert json.loads(line)["prompt"] == "row 30 of train"


def test_a_reward_that_fails_for_every_completion_ends_the_run_without_an_export(folder: Path):
    own = "grpo --model model --data train.jsonl --reward reward.py:number_only --name failing --num_steps 3".split()
    actual = _run(folder, *own, *SHORT, "--data.max_dropped", "0.1")
    assert actual.returncode not in (0, 85), actual.stdout[-3000:]
    assert "completions of train got no score, the last because scorer of train raised ValueError" in actual.stderr
    assert not (folder / "runs" / "failing" / "hf").exists()


def test_a_dry_run_prints_the_function_that_gives_the_same_run(folder: Path, here: Callable):
    own = ("grpo", "--model", "model", "--data", "train.jsonl", "--reward", "number", *SHORT)
    own += ("--data.max_dropped", "0.1")
    status, printed, errors = here(*own, "--dry-run")
    assert status == 0, errors
    for shown in ("# train: 37 rows", "#   first prompt", "How many?", "# train: reference answers score 1"):
        assert shown in printed, (shown, printed)
    (folder / "kept.py").write_text(printed)
    program = "from kept import *; from megatron_fp8rl.cli import to_json; print(to_json(model_train()))"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    kept = subprocess.run([sys.executable, "-c", program], cwd=folder, env=environ, capture_output=True, text=True)
    assert kept.returncode == 0, kept.stderr
    cfg = json.loads(kept.stdout)
    assert cfg["data"]["environments"][0]["rewards"][0]["function"] == "number"
    assert cfg["sampling"]["max_completion_tokens"] == 12 and cfg["model"]["num_layers"] == 2
    status, fresh, errors = here(*own, "--name", "fresh", "--model.random", "True", "--dry-run")
    assert status == 0 and "random=True" in fresh and "hf_path" not in fresh, errors


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "--model = '': there is no model to train"),
        (("--model", "modle", "--data", "train.jsonl", "--reward", "number"), "did you mean model"),
        (("--model", "model", "--data", "trian.jsonl", "--reward", "number"), "did you mean train.jsonl"),
        (("--model", "model", "--data", "train.jsonl"), "--reward = '': nothing scores the answers to train.jsonl"),
        (("--model", "model", "--data", "train.jsonl", "--reward", "numbr"), "did you mean number"),
        (("--model", "model", "--data", "train.jsonl", "--reward", "reward.py:digit"), "did you mean digits"),
        (("--model", "model", "--data", "chain_sum", "--gpus", "-1"), "--gpus = -1: is below 0"),
        (
            ("--model", "model", "--data", "train.jsonl", "--reward", "exact", "--sampling.top_p", "2"),
            "--sampling.top_p = 2.0",
        ),
    ],
)
def test_mistakes_are_named_before_anything_starts(here: Callable, args, message):
    status, _, errors = here("grpo", *args)
    assert status == 2 and message in errors, errors


def test_data_that_cannot_be_used_stops_before_engines_start(folder: Path, here: Callable):
    own = ("--model", "model", "--data", "train.jsonl", "--reward", "number", *SHORT, "--name", "stopped")
    actual = _run(folder, "grpo", *own)
    assert (
        actual.returncode != 0 and "1 of 37 prompts cannot be used, more than data.max_dropped = 0.01" in actual.stderr
    )
    assert not (folder / "runs" / "stopped" / "logs").exists()
    status, _, errors = here("grpo", *own, "--dry-run")
    assert status == 2 and "ERROR: " in errors and "1 of 37 prompts cannot be used" in errors


def test_gpus_are_planned_for_without_any(here: Callable):
    own = tuple("--model model --data train.jsonl --reward number --gpus 8 --gpu h100 --dry-run".split())
    status, printed, errors = here("grpo", *own, "--data.max_dropped", "0.1")
    assert status == 0, errors
    assert "world_size=8" in printed and "H100" in printed and "GiB per GPU" in printed


def test_random_weights_are_trained_only_when_asked_for(here: Callable):
    status, _, errors = here("train", "grpo_qwen3_1_7b", "--parallel.world_size", "1")
    assert status == 2 and "grpo_qwen3_1_7b has no weights to start from" in errors, errors
