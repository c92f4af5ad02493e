"""The data of `make demo-math`: held-out problems are new, every row can be used, and its answers are right."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fp8rl.commands.grpo import model_in
from megatron_fp8rl.config import DataConfig, EnvironmentConfig, RewardConfig, RunConfig, SamplingConfig
from megatron_fp8rl.data.inspection import inspect_sources
from megatron_fp8rl.data.tokenizer import load_tokenizer
from megatron_fp8rl.envs.rewards.configured import RowRewards

ROOT = Path(__file__).parents[3]


def numbers(row: dict[str, str]) -> tuple[frozenset[str], str]:
    return frozenset(re.findall(r"\d+", row["question"])), row["answer"]


@pytest.mark.slow
def test_the_demos_rows_can_be_used_and_held_out_problems_are_new(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_FP8RL_CACHE", str(tmp_path / "cache"))
    subprocess.run([sys.executable, ROOT / "tools" / "demo_math.py", tmp_path], check=True, timeout=120)
    train, held_out = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "test")
    )
    assert len(train) == 6000 and len(held_out) == 101
    assert not {numbers(row) for row in train} & {numbers(row) for row in held_out}
    for row in held_out:
        a, b = sorted(map(int, re.findall(r"\d+", row["question"])))
        assert int(row["answer"]) in (a + b, b - a), row
    source = EnvironmentConfig(
        dataset=str(tmp_path / "train.jsonl"),
        eval=str(tmp_path / "test.jsonl"),
        rewards=(RewardConfig(function="math"),),
    )
    cfg = RunConfig(
        name="x",
        model=model_in(tmp_path / "model"),
        data=DataConfig(environments=(source,)),
        sampling=SamplingConfig(max_prompt_tokens=64),
    )
    (report,) = inspect_sources(cfg, load_tokenizer(str(tmp_path / "model")))
    assert not report.dropped and not report.num_equal and max(report.lengths) <= 48
    rewards = RowRewards(source.rewards)
    for prompt in report.prompts:
        assert rewards.score(prompt, prompt.answer)["reward"] == 1.0
        assert rewards.score(prompt, str(int(prompt.answer) + 1))["reward"] == 0.0
