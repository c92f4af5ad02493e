"""Rows of the study on real weights: from run folders, as the page shows them, and paired by question."""

import argparse
import json
import shutil
import sys

import pytest

from benchmarks import accuracy
from megatron_fp8rl import cli
from megatron_fp8rl.preflight import rules
from megatron_fp8rl.report.run_data import RunData
from model_configs import small


def _run(folder, num_steps, passed):
    """A run folder ARM_SEED, and the evaluation of its weights in ``evaluation``."""
    folder.mkdir(parents=True)
    records = [{"step": 0, "eval/pass_rate/mean": 0.25}]
    for step in range(1, num_steps + 1):
        record = dict.fromkeys(accuracy.CURVES.values(), float(step)) | {
            "mismatch/abs_logprob_diff/max": step / 10,
            "time/update/s": step,
        }
        records.append({"step": step} | record)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    versions = {"packages": {"vllm": "1"}, "gpus": ["GPU"], "num_cpus": 2, "started_unix_s": 0.0}
    (folder / "versions.json").write_text(json.dumps(versions))
    result = folder.parent / "evaluation" / "evaluations" / folder.name
    result.mkdir(parents=True)
    (result / "eval.json").write_text(json.dumps({"checkpoint": str(folder / "hf"), "step": None, "name": ""}))
    rows = [{"prompt_id": f"p{i}", "num_completions": 4, "num_passed": n} for i, n in enumerate(passed)]
    (result / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _options(folder, **more):
    paths = {"runs": folder, "model": folder / "model", "data": folder}
    return argparse.Namespace(**paths | {"at_once": 2, "fields": "", "names": []} | more)


def test_a_row_has_curves_and_results_by_question(tmp_path):
    _run(tmp_path / "fp8_rollouts_off_2", 11, [0, 4, 1])
    (rates,) = RunData(tmp_path / "evaluation").pass_rates.values()
    row = accuracy.row_of(tmp_path / "fp8_rollouts_off_2", rates, "abc")
    assert (row["arm"], row["seed"], row["steps"], row["passed"]) == ("fp8_rollouts_off", 2, 11, "041")
    assert row["curves"]["d"] == [3.0, 8.0]  # the eleventh step fills no point
    assert row["max_d"] == pytest.approx(1.1) and row["held_out"] == {"0": 0.25}
    assert row["update_s"] == {"median": 6.5, "largest": 11.0}  # without the first step


def test_arms_are_compared_question_by_question(tmp_path, monkeypatch):
    monkeypatch.setattr(accuracy, "ROWS", tmp_path / "rows.jsonl")
    for name, passed in (("bf16_1", [4, 0, 2]), ("exact_1", [4, 1, 3])):
        _run(tmp_path / name, 5, passed)
        (tmp_path / name / "done.json").write_text("{}")
    accuracy.add(_options(tmp_path, commit="abc"))
    arms = accuracy.by_arm(accuracy._rows())
    estimates = accuracy.differences(arms)["exact"]
    assert estimates["accuracy"]["value"] == pytest.approx(8 / 12)
    assert estimates["difference"]["value"] == pytest.approx(2 / 12)
    assert "| exact, BF16 cache | 1 | 0.667" in accuracy.section(arms)


def test_a_named_run_that_ended_early_has_curves_and_no_accuracy(tmp_path, monkeypatch):
    monkeypatch.setattr(accuracy, "ROWS", tmp_path / "rows.jsonl")
    for name, steps, done in (("bf16_1", 10, True), ("mxfp8_1", 5, False), ("mxfp8_2", 10, False)):
        _run(tmp_path / name, steps, [4, 0])
        if done:
            (tmp_path / name / "done.json").write_text("{}")
        else:
            shutil.rmtree(tmp_path / "evaluation" / "evaluations" / name)
    accuracy.add(_options(tmp_path, commit="abc", names=["mxfp8_1"]))
    arms = accuracy.by_arm(accuracy._rows())
    assert [row["seed"] for row in arms["mxfp8"]] == [1] and "mxfp8" not in accuracy.differences(arms)
    assert "| MXFP8, emulated | 1* |  |  | 3.000 |" in accuracy.section(arms)
    for curves in accuracy.PICTURES.values():
        accuracy.draw(arms, tmp_path / "curves.png", curves)


def test_the_fields_of_every_arm_are_valid():
    for arm, (_, _, fields) in accuracy.ARMS.items():
        model = small.small_qwen3_moe() if arm in accuracy.EXPERTS else small.small_qwen3()
        cfg = cli.parse_overrides(model, [*accuracy.SETTINGS.split(), *fields.split()])
        assert [error for error in rules.check(cfg) if "precision" in error.field or "algo" in error.field] == [], arm


def test_missing_runs_start_once_and_failures_are_counted(tmp_path, monkeypatch, capsys):
    program = "import sys; from pathlib import Path; Path(sys.argv[1]).mkdir(); sys.exit(sys.argv[1].endswith('_2'))"
    command = lambda name, options: [sys.executable, "-c", program, str(options.runs / name)]  # noqa: E731
    monkeypatch.setattr(accuracy, "command_of", command)
    _run(tmp_path / "fp8_1", 5, [1])
    (tmp_path / "fp8_1" / "done.json").write_text("{}")
    assert accuracy.train(_options(tmp_path, names=["bf16_1", "fp8_1", "bf16_2", "fp8_2"])) == 2  # both of seed 2
    assert (tmp_path / "bf16_1").is_dir() and not (tmp_path / "fp8_1.log").exists()
    assert "fp8_2 FAILED" in capsys.readouterr().out


def test_the_page_shows_the_rows():
    page = accuracy.PAGE.read_text(encoding="utf-8")
    for arms in accuracy.TABLES.values():
        if found := accuracy.by_arm(accuracy._rows(), arms):
            assert accuracy.section(found) in page
