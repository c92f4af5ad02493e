"""A run with an agent, trainer and engine as they are: every turn is exact, and nothing is left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from megatron_fp8rl.observe.recording import read_steps
from megatron_fp8rl.types import Completion, Given

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 900
OPTIONS = {
    "--observe.display": "plain",
    "--observe.eval_prompts": "0",
    "--num_steps": "2",
    "--data.sft_steps": "0",
    "--model.random": "True",
    "--rollout.prompts_per_step": "4",
    "--rollout.completions_per_prompt": "4",
    "--algo.zero_variance": "keep",
    "--precision.exact": "True",
    "--checkpoint.export_hf": "False",
}


def test_two_turns_are_trained_exactly(tmp_path):
    words = [word for item in (OPTIONS | {"--output_dir": str(tmp_path)}).items() for word in item]
    done = subprocess.run(
        [sys.executable, "-m", "megatron_fp8rl", "train", "tiny_calculator", *words],
        cwd=ROOT, text=True, capture_output=True, timeout=DEADLINE_S,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "Traceback" not in done.stdout + done.stderr
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    trained = [line for line in lines if "mismatch/abs_logprob_diff/max" in line]
    assert len(trained) == 2 and any("mismatch/abs_logprob_diff_turn_2/max" in line for line in trained)
    for line in trained:
        assert all(value == 0.0 for key, value in line.items() if key.startswith("mismatch/abs_logprob_diff")), line
    rollouts = [one for _, groups in read_steps(tmp_path / "rollouts") for group in groups for one in group.rollouts]
    sessions = [one for one in rollouts if len(one.completions) == 2]
    assert sessions and all(one.status != "score_failed" for one in rollouts)
    for one in sessions:
        kinds = [type(segment) for segment in one.branches[0].segments]
        assert kinds == [Given, Completion, Given, Completion] and one.branches[0].segments[2].role == "tool"
    assert "policy, turn 2" in (tmp_path / "report.html").read_text()
