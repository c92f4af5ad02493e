"""The study of README: from its warm start over every run to table, plot and numbers, and once more in no time."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
ARGS = "study tiny_qwen3_moe --seeds 1 --arms fp8/fp8 exact --corrected_only --at_once 2"
ARGS += " --num_steps 2 --warm_start.steps 20 --evaluate 12 --evaluate_completions 2"


def test_a_study_runs_from_its_warm_start_to_its_plot(tmp_path):
    command = [sys.executable, "-m", "megatron_fp8rl", *ARGS.split(), "--observe.display", "plain"]
    environ = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MEGATRON_FP8RL_CACHE": str(tmp_path / "c"),
    }

    def study() -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    assert "[2/2] exact, seed 1" in study()
    folder = tmp_path / "runs" / "tiny_qwen3_moe_study"
    actual = json.loads((folder / "study.json").read_text())
    assert list(actual) == ["fp8/fp8 corrected", "exact"]
    assert all(arm["max abs diff"]["mean"] == 0 and arm["s/step"]["mean"] > 0 for arm in actual.values())
    first, second = actual.values()  # equal bits trained them: equal weights answer equally
    assert second["accuracy"] == first["accuracy"] and second["difference"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    results = [json.loads(path.read_text()) for path in folder.glob("evaluation/evaluations/*/eval.json")]
    assert len(results) == 2 and {result["precision"] for result in results} == {"bf16"}
    assert len({result["weights_checksum"] for result in results}) == 1
    assert (folder / "study.png").read_bytes().startswith(b"\x89PNG")
    began = time.monotonic()
    assert "[2/2]" not in study() and time.monotonic() - began < 60
