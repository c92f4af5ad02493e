"""GRPO from a folder of Gemma 3 that also sees images: its text part is trained exactly and exported."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import inprocess
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3ForConditionalGeneration

from megatron_fp8rl.commands.grpo import model_in
from megatron_fp8rl.config import PrecisionConfig, RunConfig, SamplingConfig
from tests.helpers.gemma3 import published
from tests.helpers.own_model import make_tokenizer
from tests.tolerances import ENGINE_FP8_LOGPROB_MEDIAN, ENGINE_LOGPROB_MAX, ENGINE_LOGPROB_MEAN

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 600


def _run(folder: Path, module: str, *args: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "MEGATRON_FP8RL_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", module, *args]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=DEADLINE_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gemma")
    rows = [{"question": f"What is {i} plus {j}?", "answer": str(i + j)} for i in range(8) for j in range(4)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text("def mixed(completion, answer):\n    return sum(map(ord, completion)) % 7 / 6\n")
    published(folder / "whole", **make_tokenizer(folder / "whole", [row["question"] for row in rows]))
    for command in ("hf_to_megatron whole mcore", "megatron_to_hf mcore text", "hf_to_fp8 whole fp8"):
        done = _run(folder, "checkpoint_tools", *command.split(), "--workers", "1")
        assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.core
def test_grpo_of_the_text_part_is_exact(folder: Path):
    job = "grpo --model whole --data train.jsonl --reward reward.py:mixed --gpus 0 --num_steps 2 --optim.lr 1e-3 "
    short = "--sampling.max_prompt_tokens 64 --sampling.max_completion_tokens 12 --observe.display plain "
    short += "--observe.eval_prompts 0 --checkpoint.every_steps 2 --output_dir run"
    done = _run(folder, "megatron_fp8rl", *(job + short).split())
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("tensors are part of the vision tower") == 1
    run_dir = folder / "run"
    config = json.loads((run_dir / "config.json").read_text())
    assert config["precision"]["exact"] is not False and config["model"]["family"] == "gemma3_text"
    assert config["model"]["rope_scaling"]["factor"] == 8 and config["model"]["local_rope_theta"] == 10_000
    assert json.loads((run_dir / "versions.json").read_text())["precision.exact"].startswith("on: ")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["publish/version/max"] for line in lines] == [0, 1, 2] and config["weight_sync"]["verify_every"] == 1
    for line in lines[1:]:
        assert line["publish/num_fp8_tensors/sum"] == 6 * 7
        assert line["mismatch/abs_logprob_diff/max"] == 0 and line["mismatch/ratio/max"] == 1
        assert line["train/grad_norm/max"] > 0 and line["rollout/surprisal/mean"] > 1
    fields = "--data.environments.0.eval train.jsonl --num_problems 2 --num_completions 1 --output_dir evaluation"
    done = _run(folder, "megatron_fp8rl", "eval", "run", "--checkpoint", "whole", *fields.split())
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    exported, report = AutoModelForCausalLM.from_pretrained(run_dir / "hf", output_loading_info=True)
    assert type(exported).__name__ == "Gemma3ForCausalLM"
    assert not report["missing_keys"] and not report["unexpected_keys"]


def load_and_score(folder: Path, rollout: Literal["bf16", "blockwise"]) -> torch.Tensor:
    """Log-probabilities by an engine that loads a folder."""
    precision = PrecisionConfig(trainer=rollout, rollout=rollout)
    cfg = RunConfig(name="text", model=model_in(folder), precision=precision, sampling=SamplingConfig())
    return inprocess.prompt_logprobs(inprocess.build_engine(cfg, folder, load_format="auto"))


def test_vllm_loads_the_text_part_and_computes_what_transformers_whole_model_does(folder: Path):
    plain = inprocess.call(load_and_score, folder / "text", "bf16")
    in_fp8 = inprocess.call(load_and_score, folder / "fp8", "blockwise")
    whole = Gemma3ForConditionalGeneration.from_pretrained(
        folder / "whole", dtype=torch.bfloat16, attn_implementation="eager"
    )
    expected = []
    for prompt in inprocess.PROMPTS:
        with torch.no_grad():
            logits = whole(input_ids=torch.tensor([prompt])).logits[0, :-1].float()
        expected.append(logits.log_softmax(-1).gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0])
    difference = (plain - torch.cat(expected)).abs()
    assert torch.cat(expected).std() > 0.5
    assert difference.mean() < ENGINE_LOGPROB_MEAN and difference.max() < ENGINE_LOGPROB_MAX
    assert 0 < (in_fp8 - torch.cat(expected)).abs().median() < ENGINE_FP8_LOGPROB_MEDIAN
