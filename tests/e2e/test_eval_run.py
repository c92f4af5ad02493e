"""The eval command on a live engine: the same weights in two formats and two layouts give the same result."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fp8rl.algo.pass_at_k import pass_at_k, wilson

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 900
NUM_COMPLETIONS = 4


def run(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    return done.stdout


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a warm start only, in a folder with a blank in its name."""
    folder = tmp_path_factory.mktemp("runs") / "brief run"
    args = "sft tiny_qwen3_moe --warm_start.steps 20 --observe.eval_prompts 8 --observe.display none --output_dir"
    run("megatron_fp8rl", *args.split(), str(folder))
    return folder


def evaluate(run_dir: Path, checkpoint: Path, *words: str) -> tuple[dict, list[dict], str]:
    """(eval.json, problems.jsonl, what was printed)."""
    args = f"eval tiny_qwen3_moe --num_problems 16 --num_completions {NUM_COMPLETIONS} --ks 1 4".split()
    folders = ["--output_dir", str(run_dir), "--checkpoint", str(checkpoint)]
    shown = run("megatron_fp8rl", *args, *folders, *words)
    (folder,) = [Path(line).parent for line in shown.splitlines() if line.endswith("/eval.json")]
    problems = [json.loads(line) for line in (folder / "problems.jsonl").read_text().splitlines()]
    return json.loads((folder / "eval.json").read_text()), problems, shown


@pytest.mark.long
def test_an_evaluation_is_right_and_the_same_for_every_format_and_layout(run_dir: Path):
    hf = run_dir / "warm_start" / "hf"
    result, problems, shown = evaluate(run_dir, hf)
    assert result["name"] == "warm_start_hf" and result["step"] is None and result["precision"] == "blockwise"
    overall = result["overall"]
    assert overall == result["environments"]["chain_sum"] and overall["num_problems"] == len(problems) == 16
    assert len({problem["prompt_id"] for problem in problems}) == 16
    for problem in problems:
        assert len(problem["completions"]) == NUM_COMPLETIONS
        # Problems of this model read "4 - 5 = ", so that the judge can be judged.
        right = [item["text"].strip() == problem["answer"] for item in problem["completions"]]
        assert [item["reward"] >= 1 for item in problem["completions"]] == right
        assert problem["num_passed"] == sum(right)
    passed = [problem["num_passed"] for problem in problems]
    assert overall["accuracy"]["value"] == pytest.approx(sum(passed) / 64)
    assert overall["pass_at"]["4"]["value"] == pytest.approx(sum(pass_at_k(4, c, 4) for c in passed) / 16)
    widest, narrowest = wilson(sum(passed) / 4, 16), wilson(sum(passed), 64)
    assert widest.low <= overall["accuracy"]["low"] <= narrowest.low
    assert widest.high >= overall["accuracy"]["high"] >= narrowest.high
    assert "pass@4" in shown and "chain_sum" in shown
    page = (run_dir / "report.html").read_text()
    assert "Evaluations of checkpoints" in page and "warm_start_hf" in page

    converted = run_dir / "converted"
    run("checkpoint_tools", "hf_to_megatron", str(hf), str(converted))
    again, others, _ = evaluate(run_dir, converted, "--parallel.world_size", "2", "--parallel.expert", "2")
    assert again["weights_checksum"] == result["weights_checksum"]
    assert others == problems and again["overall"] == overall
    page = (run_dir / "report.html").read_text()
    assert "warm_start_hf" in page and "converted" in page
