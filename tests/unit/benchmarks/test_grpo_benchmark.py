"""The comparison of whole runs: what is started, what is read back from their records, what the table says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import grpo, grpo_rows, runner
from megatron_fp8rl.cli import parse_overrides
from megatron_fp8rl.preflight import rules
from megatron_fp8rl.report.run_data import RunData
from model_configs import small

SMALL = [small.small_qwen3, small.small_qwen3_8_layers, small.small_qwen3_moe, small.small_qwen3_moe_4_layers]
GRPO = grpo.Grpo()


@pytest.mark.parametrize("function", SMALL)
@pytest.mark.parametrize("precision", grpo.PRECISIONS)
@pytest.mark.parametrize("layout", ["colocated", "sleep", "separate"])
def test_every_arm_is_a_run_without_mistakes(function, precision, layout):
    cfg = function()
    words = [*grpo.PRECISIONS[precision], *grpo.layout_overrides(layout, is_moe=cfg.model.is_moe)]
    cfg = parse_overrides(cfg, words)
    assert rules.check(cfg, accelerator="hopper") == []
    assert cfg.rollout.placement == ("separate" if layout == "separate" else "colocated")
    used = cfg.parallel.world_size + (cfg.rollout.tensor if layout == "separate" else 0)
    assert used == grpo.gpus_of(layout)


def _finished(run_dir: Path, rewards: list[float], **more) -> Path:
    (run_dir / "logs").mkdir(parents=True)
    lines = [
        {"step": step, "reward/score/mean": reward, "time/update/s": 10.0 if step < 3 else 2.0, "time/rollouts/s": 1.0,
         "time/evaluate/s": 9.0, "rollout/tokens_per_s/mean": 500.0, **more}
        for step, reward in enumerate(rewards, 1)
    ]  # fmt: skip
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run_dir / "logs" / "rollout-0.log").write_text("GPU KV cache size: 4,096 tokens\n")
    (run_dir / "done.json").write_text("{}")
    return run_dir


def _row(run_dir: Path, precision: str = "fp8", num_steps: int = 4, **more) -> dict:
    keys = {"config": "small_qwen3", "layout": "colocated", "precision": precision, "seed": 3, "warm_start": "w"}
    return keys | {"num_steps": num_steps} | grpo_rows.numbers(RunData(run_dir)) | more


def test_numbers_come_from_the_records_of_finished_runs(tmp_path):
    found = _row(_finished(tmp_path / "run", [0.1] * 5 + [0.5] + [0.9] * 5))
    assert (found["reward_start"], found["reward_end"]) == (pytest.approx(0.1), pytest.approx(0.9))
    # Medians behind the first steps, of phases that every step has.
    assert found["phases_s"] == {"rollouts": 1.0, "update": 2.0} and found["step_s"] == 3.0
    assert (found["kv_tokens"], found["rollout_tokens_per_s"], found["is_done"]) == (4096, 500.0, True)
    curves = found["curves"]
    assert curves["step"] == list(range(1, 12)) and curves["reward"] == [0.1] * 5 + [0.5] + [0.9] * 5
    assert curves["abs_logprob_diff"] == [None] * 11
    assert curves["phases_s"] == {"rollouts": [1.0] * 11, "update": [10.0] * 2 + [2.0] * 9, "evaluate": [9.0] * 11}


def test_a_row_tells_of_how_many_steps_a_run_is(tmp_path):
    short = _row(_finished(tmp_path / "short", [0.25] * 3), "bf16", num_steps=25)
    assert "| small_qwen3, colocated, bf16, seed 3 | A | 3 of 25 | 0.250 to 0.250 |" in grpo_rows.tables([short])
    none = _row(_finished(tmp_path / "none", []), num_steps=25)
    assert none["reward_end"] is None and "| A | 0 of 25 | - to - |" in grpo_rows.tables([none])


def test_section_and_picture_are_made_of_rows_alone(tmp_path):
    rows = [_row(_finished(tmp_path / precision, [0.1, 0.2, 0.3, 0.4]), precision) for precision in ("bf16", "fp8")]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "grpo.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert runner.main(GRPO, ["--table", "--folder", str(tmp_path / "elsewhere")]) == 0
    text = (tmp_path / "elsewhere" / "measured" / "grpo.md").read_text()
    assert "](../grpo_h200.png)" in text and "fp8, seed 3 | A | 4 | 0.250 to 0.250" in text
    assert (tmp_path / "elsewhere" / "grpo_h200.png").stat().st_size > 10_000


def test_runs_with_the_same_letter_started_from_the_same_weights(tmp_path):
    name = grpo_rows.warm_start_name(_finished(tmp_path / "one", [0.5]))
    assert name and name != grpo_rows.warm_start_name(_finished(tmp_path / "other", [0.25]))
    assert grpo_rows.warm_start_name(tmp_path) is None
    rows = [{"config": "a", "warm_start": start} for start in ("x", "x", name)] + [{"config": "b", "warm_start": name}]
    assert grpo_rows.warm_starts(rows) == ["A", "A", "B", "A"]


def test_the_difference_of_a_run_is_its_mean_and_its_largest(tmp_path):
    run_dir, key = _finished(tmp_path / "run", []), "mismatch/abs_logprob_diff"
    lines = [{"step": i, f"{key}/mean": mean, f"{key}/max": 2 * mean} for i, mean in enumerate([0.0, 3e-7, 0.0], 1)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = _row(run_dir)
    assert (found["abs_logprob_diff"], found["abs_logprob_diff_max"]) == (pytest.approx(1e-7), 6e-7)
    assert found["curves"]["abs_logprob_diff"] == [0.0, 3e-7, 0.0]
    assert "| 1.0e-07 | 6.0e-07 |" in grpo_rows.tables([found])
    grpo_rows.draw([found], tmp_path / "plot.png")  # zeros have a place on its scale


# A run of 20 steps of 0.2 s; a slow one of 3 s a step is killed at its limit.
_PRETENDED = """
import json, pathlib, sys, time
run_dir, mode = pathlib.Path(sys.argv[1]), sys.argv[2]
run_dir.mkdir(parents=True, exist_ok=True)
if mode == "fails":
    print("line before"); sys.exit("ValueError: no such thing")
with (run_dir / "metrics.jsonl").open("a") as file:
    for step in range(1, 21):
        file.write(json.dumps({"step": step, "reward/score/mean": step / 20, "time/step/s": 0.2}) + "\\n"); file.flush()
        time.sleep(3.0 if mode == "slow" else 0.0)
(run_dir / "done.json").write_text("{}")
"""


@pytest.fixture
def pretended(tmp_path, monkeypatch):
    """A function that calls the program with a pretended run; it returns (exit status, rows)."""
    (tmp_path / "run.py").write_text(_PRETENDED)

    def call(mode: str):
        python = [sys.executable, str(tmp_path / "run.py")]
        monkeypatch.setattr(grpo, "command", lambda arm, run_dir, *_: [*python, str(run_dir), mode])
        words = ["--precision", "bf16", "--steps", "20", "--run-limit-s", "4", "--folder", str(tmp_path / "out")]
        status = runner.main(GRPO, words)
        rows = tmp_path / "out" / "grpo.jsonl"
        return status, [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []

    return call


def _trained(tmp_path, monkeypatch):
    (tmp_path / "out" / "small_qwen3" / "warm_start" / "hf").mkdir(parents=True)
    monkeypatch.setattr(grpo, "run_logged", lambda *_: pytest.fail("the warm start is there"))


def test_whole_runs_are_followed_and_end_at_their_limit_with_the_row_of_their_steps(pretended, tmp_path, monkeypatch, capsys):
    _trained(tmp_path, monkeypatch)
    status, (row,) = pretended("quick")
    assert status == 0 and row["is_done"] and row["steps"] == 20 and row["run"] == "A"
    assert "bf16-colocated-seed1: step 20: 0.20 s" in capsys.readouterr().out
    status, (_, row) = pretended("slow")
    assert status == 1 and 1 <= row["steps"] < 20 and not row["is_done"] and row["run"] == "B"
    assert row["curves"]["reward"] == [step / 20 for step in range(1, row["steps"] + 1)]
    assert f"FAILED small_qwen3 colocated bf16 1: {row['steps']} of 20 steps: no result within 4 s" in capsys.readouterr().out
    status, rows = pretended("fails")
    assert status == 1 and len(rows) == 2
    assert "0 of 20 steps: ValueError: no such thing" in capsys.readouterr().out


def test_a_warm_start_that_fails_is_told(pretended, monkeypatch, capsys):
    def fails(command, log, limit_s):
        assert command[3] == "sft"
        log.write_text("RuntimeError: no memory\n")
        return False

    monkeypatch.setattr(grpo, "run_logged", fails)
    assert pretended("quick") == (1, [])
    assert "the warm start: RuntimeError: no memory" in capsys.readouterr().out
