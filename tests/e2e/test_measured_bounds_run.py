"""A run with FP8 engines and a BF16 trainer corrects the fraction of tokens that the configuration names."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUANTILE = 0.1
OPTIONS = (
    "--observe.display plain --observe.eval_prompts 0 --sampling.prompts_per_step 32 --warm_start.steps 20 "
    "--num_steps 2 --checkpoint.every_steps 1 --precision.trainer bf16 --precision.rollout blockwise "
    f"--algo.zero_variance keep --algo.correction mask --algo.correction_quantile {QUANTILE} --algo.loss own_loss:own"
)
OWN_LOSS = """
import torch
from megatron_fp8rl.algo.losses import dapo

def own(inputs):
    loss, metrics = dapo(inputs)
    bounds = {"low": inputs.cfg.correction_low, "high": inputs.cfg.correction_high}
    return loss, metrics | {f"loss/own_{k}/max": torch.tensor(v, dtype=torch.float64) for k, v in bounds.items()}
"""


def run(folder: Path, name: str, command: str, *more: str) -> dict[int, dict[str, float]]:
    args = [command, "tiny_qwen3", "--output_dir", str(folder / name), *OPTIONS.split(), *more]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    program = [sys.executable, "-m", "megatron_fp8rl", *args]
    done = subprocess.run(program, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    lines = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line for line in lines}


def test_the_configured_fraction_of_tokens_is_corrected_and_a_resume_computes_the_same_bounds(tmp_path):
    (tmp_path / "own_loss.py").write_text(OWN_LOSS)
    steps = run(tmp_path, "whole", "train")
    for line in (steps[1], steps[2]):
        assert line["mismatch/abs_logprob_diff/mean"] > 0 and line["train/num_tokens/sum"] > 300
        # Completions of a prompt begin with equal tokens, so many values are equal.
        assert line["correction/fraction_corrected/mean"] == pytest.approx(QUANTILE, abs=0.03)
        assert line["mismatch/fraction_corrected/mean"] == line["correction/fraction_corrected/mean"]
        low, high = line["correction/low/mean"], line["correction/high/mean"]
        assert 0.8 < low < 1 < high < 1.25 and line["correction/weight/max"] <= high
        assert (line["loss/own_low/max"], line["loss/own_high/max"]) == (low, high), "a user's loss gets the bounds"
        assert line["loss/update_ratio/max"] == 1, "old and updated policy are the trainer's"
    assert steps[1]["correction/high/mean"] != steps[2]["correction/high/mean"]

    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "step_00000002")
    start = ("--model.hf_path", str(tmp_path / "whole" / "warm_start" / "hf"))
    resumed = run(tmp_path, "resumed", "rl", *start, "--sampling.replay", str(tmp_path / "whole" / "rollouts"))
    same = ("correction/", "mismatch/", "loss/", "train/loss", "train/grad_norm")
    assert {k: v for k, v in resumed[2].items() if k.startswith(same)} == {
        k: v for k, v in steps[2].items() if k.startswith(same)
    }
