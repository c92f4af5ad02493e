"""Rows of the study on real weights: from run folders, as the page shows them, and paired by question."""

import json

import pytest

from benchmarks import accuracy
from megatron_fp8rl.report.run_data import RunData


def _run(folder, num_steps, passed):
    """A run folder ARM_SEED, and the evaluation of its weights in ``evaluation``."""
    folder.mkdir(parents=True)
    records = [{"step": 0, "eval/pass_rate/mean": 0.25}]
    for step in range(1, num_steps + 1):
        record = dict.fromkeys(accuracy.CURVES.values(), float(step)) | {"mismatch/abs_logprob_diff/max": step / 10}
        records.append({"step": step} | record)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    versions = {"packages": {"vllm": "1"}, "gpus": ["GPU"], "num_cpus": 2, "started_unix_s": 0.0}
    (folder / "versions.json").write_text(json.dumps(versions))
    result = folder.parent / "evaluation" / "evaluations" / folder.name
    result.mkdir(parents=True)
    (result / "eval.json").write_text(json.dumps({"checkpoint": str(folder / "hf"), "step": None, "name": ""}))
    rows = [{"prompt_id": f"p{i}", "num_completions": 4, "num_passed": n} for i, n in enumerate(passed)]
    (result / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_row_has_curves_and_results_by_question(tmp_path):
    _run(tmp_path / "fp8_rollouts_off_2", 11, [0, 4, 1])
    row = accuracy.row_of(tmp_path / "fp8_rollouts_off_2", RunData(tmp_path / "evaluation"), "abc")
    assert (row["arm"], row["seed"], row["steps"], row["passed"]) == ("fp8_rollouts_off", 2, 11, "041")
    assert row["curves"]["d"] == [3.0, 8.0]  # the eleventh step fills no point
    assert row["max_d"] == pytest.approx(1.1) and row["held_out"] == {"0": 0.25}


def test_arms_are_compared_question_by_question(tmp_path):
    for name, passed in (("bf16_1", [4, 0, 2]), ("exact_1", [4, 1, 3])):
        _run(tmp_path / name, 5, passed)
    evaluation = RunData(tmp_path / "evaluation")
    rows = [accuracy.row_of(tmp_path / name, evaluation, "abc") for name in ("exact_1", "bf16_1")]
    estimates = accuracy.differences(accuracy.by_arm(rows))["exact"]
    assert estimates["accuracy"]["value"] == pytest.approx(8 / 12)
    assert estimates["difference"]["value"] == pytest.approx(2 / 12)
    assert "| exact, BF16 cache | 1 | 0.667" in accuracy.section(rows)


def test_the_page_shows_the_rows():
    assert accuracy.section(accuracy._rows()) in accuracy.PAGE.read_text(encoding="utf-8")
