"""The reward ``model``: a served model's scores against those of transformers, its server's end, and a run with it."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_fp8rl.config import EnvironmentConfig, RewardConfig, ScoringConfig
from megatron_fp8rl.envs.rewards import configured, scalar
from megatron_fp8rl.envs.scoring import ScorePool
from megatron_fp8rl.net.endpoint import Endpoint
from megatron_fp8rl.rollout import reward_server
from megatron_fp8rl.types import Prompt
from model_configs.tiny import tiny_qwen3
from tests.helpers.own_model import make_model
from tests.helpers.processes import is_running, until

ROOT = Path(__file__).parents[2]
ASKED = ({"role": "user", "content": "What is 1 plus 2?"},)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A policy, a reward model with the same tokenizer, and rows."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, Qwen3ForSequenceClassification

    path = tmp_path_factory.mktemp("reward_model")
    rows = [{"question": f"What is {i} plus 2?", "answer": str(i + 2)} for i in range(20)]
    (path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    make_model(path / "model", [row["question"] for row in rows])
    config = AutoConfig.from_pretrained(path / "model", num_labels=1, initializer_range=0.2)
    torch.manual_seed(0)
    Qwen3ForSequenceClassification(config).bfloat16().save_pretrained(path / "judge")
    AutoTokenizer.from_pretrained(path / "model").save_pretrained(path / "judge")
    return path


def expected(folder: Path, completion: str) -> float:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "judge")
    messages = [*ASKED, {"role": "assistant", "content": completion}]
    token_ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=False)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "judge", dtype="float32")
    return float(model(token_ids).logits)


def test_scores_are_those_of_transformers_and_a_lost_server_comes_back(folder: Path, tmp_path):
    reward = RewardConfig(function="model", options={"folder": str(folder / "judge"), "deadline_s": 280.0})
    source = EnvironmentConfig(dataset=str(folder / "train.jsonl"), rewards=(reward,))
    cfg = tiny_qwen3()
    data, scoring = replace(cfg.data, environments=(source,)), replace(cfg.scoring, deadline_s=300.0)
    cfg = replace(cfg, data=data, scoring=scoring, output_dir=str(tmp_path / "run"))
    prompt = Prompt(
        prompt_id="train/0", environment="train", token_ids=(1,), text="rendered", answer="3", messages=ASKED
    )
    with reward_server.serving(cfg), ScorePool.build(scoring, data.environments) as pool:
        actual = {text: pool.submit(prompt, text).result() for text in ("3", "I do not know", "<think>so</think>3")}
        assert all(score.status == "scored" for score in actual.values()), actual
        for text in ("3", "I do not know"):
            assert actual[text].reward == pytest.approx(expected(folder, text), abs=0.05), text
        assert actual["<think>so</think>3"].reward == actual["3"].reward != actual["I do not know"].reward
        (file,) = Path(scalar.servers_of(cfg.run_dir)).glob("*.json")
        first = Endpoint.read(file)
        assert file.stat().st_mode & 0o077 == 0
        os.killpg(first.pid, signal.SIGKILL)
        again = pool.submit(prompt, "3").result()
        assert again.status == "scored" and again.reward == actual["3"].reward, again
        assert Endpoint.read(file).pid != first.pid
        last = Endpoint.read(file).pid
    until(lambda: not is_running(last), "the server of a reward model to end")
    assert not file.exists()


def test_a_run_with_a_reward_model_by_one_command(folder: Path):
    args = tuple(
        (
            "grpo --model model --data train.jsonl --reward model:judge --num_steps 1 "
            "--sampling.prompts_per_step 2 --sampling.completions_per_prompt 2 --sampling.max_prompt_tokens "
            "64 --sampling.max_completion_tokens 8 --observe.display plain --name judged "
            "--checkpoint.export_hf False"
        ).split()
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MEGATRON_FP8RL_CACHE": str(folder / "c")}
    command = [sys.executable, "-m", "megatron_fp8rl", *args]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    (step,) = [
        json.loads(line)
        for line in (folder / "runs" / "judged" / "metrics.jsonl").read_text().splitlines()
        if json.loads(line)["step"] == 1
    ]
    assert step["reward/part_model/mean"] == pytest.approx(step["reward/score/mean"]) != 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs one of the options folder and url"),
        ({"folder": "a", "url": "http://b"}, "needs one of the options folder and url"),
        ({"folder": "missing"}, "has no readable config.json"),
        ({"folder": "model"}, "is a Qwen3ForCausalLM and gives no score"),
        ({"url": "http://b", "precision": "int4"}, "neither bf16 nor fp8"),
        ({"url": "http://b", "temperature": 1}, "has no option 'temperature'"),
    ],
)
def test_mistakes_are_named(folder: Path, options, message, monkeypatch):
    monkeypatch.chdir(folder)
    assert message in configured.problem(RewardConfig(function="model", options=options))


def test_a_server_that_is_gone_costs_the_completion_its_score(folder: Path):
    options = {"url": "http://127.0.0.1:9", "deadline_s": 1.0}
    source = EnvironmentConfig(dataset="train.jsonl", rewards=(RewardConfig(function="model", options=options),))
    prompt = Prompt(prompt_id="train/0", environment="train", token_ids=(1,), text="x", answer="")
    with ScorePool.build(ScoringConfig(), (source,)) as pool:
        score = pool.submit(prompt, "3").result()
    assert score.status == "score_failed" and "http://127.0.0.1:9" in score.detail and "refused" in score.detail
