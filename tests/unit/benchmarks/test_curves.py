"""Runs from one warm start: what a row says of a run whose steps are known, and which runs there are."""

import json

import pytest

from benchmarks import curves, runner
from megatron_fp8rl.report.run_data import RunData

CURVES = curves.Curves()


def test_a_row_has_both_ends_of_the_curve_the_worst_difference_and_seconds_without_the_first_step(tmp_path):
    steps = [
        {
            "step": number,
            "reward/score/mean": number / 20,
            "time/step/s": seconds,
            "time/update/s": seconds / 2,
            "mismatch/abs_logprob_diff/mean": 1e-3,
            "mismatch/abs_logprob_diff/max": number / 100,
            "rollout/num_tokens/sum": 50.0,
        }
        for number, seconds in zip(range(1, 13), [40.0] + 11 * [2.0], strict=True)
    ]
    steps = [{"step": 0, "eval/pass_rate/mean": 0.25}, *steps[:-1], steps[-1] | {"eval/pass_rate/mean": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    row = curves.row_of(RunData(tmp_path))
    assert (row["num_steps"], row["held_out"], row["sampled_tokens"]) == (12, [0.25, 0.5], 600)
    assert row["reward"] == pytest.approx([sum(range(1, 11)) / 200, sum(range(3, 13)) / 200])
    assert (row["mean_d"], row["max_d"]) == (pytest.approx(1e-3), 0.12)
    assert (row["median_step_s"], row["phases_s"]) == (2.0, {"update": 1.0})
    line = CURVES.line(row | {"config": "c", "fields": ["--x", "1"], "arm": "exact", "seed": 1, "at_once": 1})
    assert line["configuration"] == "c --x 1" and line["held-out pass rate"] == "0.250 to 0.500"
    assert CURVES.is_wrong(row | {"arm": "exact"}) and not CURVES.is_wrong(row | {"arm": "fp8/fp8 corrected"})


def test_its_runs_are_those_of_the_study_that_it_starts(tmp_path):
    options = runner.parse(CURVES, ["--folder", str(tmp_path), "--config", "tiny_qwen3_moe", "--", "--num_steps", "4"])
    folder, runs = curves.planned(options)
    assert [run.arm for run in runs] == ["bf16/bf16 corrected", "fp8/fp8 corrected", "exact"]
    assert {run.run_dir.parent for run in runs} == {folder} == {tmp_path / "run_study"}
    assert curves.study_args(options)[:4] == ["--num_steps", "4", "--output_dir", str(tmp_path / "run")]


def test_a_configuration_that_is_refused_ends_before_anything_runs(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        runner.parse(CURVES, ["--config", "tiny_qwen3_moe", "--folder", str(tmp_path), "--", "--parallel.tensor", "3"])
    assert end.value.code == 2 and "does not divide the 4 attention heads" in capsys.readouterr().err
