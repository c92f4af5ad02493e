"""The comparison of whole runs: what is started, what is read back from their records, what the table says."""

from __future__ import annotations

import json
import multiprocessing
import time

import pytest

from benchmarks import grpo
from megatron_fp8rl import config_check
from megatron_fp8rl.cli import parse_overrides
from model_configs import small


@pytest.mark.parametrize("function", [small.small_qwen3, small.small_qwen3_8_layers, small.small_qwen3_moe])
@pytest.mark.parametrize("precision", grpo.PRECISIONS)
@pytest.mark.parametrize("layout", ["colocated", "sleep", "separate"])
def test_every_arm_is_a_run_without_mistakes(function, precision, layout):
    cfg = function()
    words = [*grpo.PRECISIONS[precision], *grpo.layout_overrides(layout, is_moe=cfg.model.is_moe)]
    cfg = parse_overrides(cfg, words)
    assert config_check.check(cfg, accelerator="hopper") == []
    assert cfg.rollout.placement == ("separate" if layout == "separate" else "colocated")
    used = cfg.parallel.world_size + (cfg.rollout.tensor if layout == "separate" else 0)
    assert used == grpo.gpus_of(layout)


def _finished(folder, precision, rewards):
    run = grpo.Run("small_qwen3", precision, "colocated", 3, folder)
    (run.run_dir / "logs").mkdir(parents=True)
    lines = [
        {"step": step, "reward/score/mean": reward, "time/update/s": 10.0 if step < 3 else 2.0, "time/rollouts/s": 1.0,
         "time/evaluate/s": 9.0, "rollout/tokens_per_s/mean": 500.0}
        for step, reward in enumerate(rewards, 1)
    ]  # fmt: skip
    (run.run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run.run_dir / "logs" / "rollout-0.log").write_text("GPU KV cache size: 4,096 tokens\n")
    (run.run_dir / "done.json").write_text("{}")
    return run


def test_numbers_come_from_the_records_of_finished_runs(tmp_path):
    run = _finished(tmp_path, "fp8", [0.1] * 5 + [0.5] + [0.9] * 5)
    assert grpo.found_runs(tmp_path) == [run]
    found = grpo.summary(run)
    assert (found["reward_start"], found["reward_end"]) == (pytest.approx(0.1), pytest.approx(0.9))
    # Medians behind the first steps, of phases that every step has.
    assert found["phases_s"] == {"rollouts": 1.0, "update": 2.0} and found["step_s"] == 3.0
    assert (found["kv_tokens"], found["rollout_tokens_per_s"], found["is_done"]) == (4096, 500.0, True)


def test_a_run_that_is_cut_short_has_a_row_too(tmp_path):
    found = grpo.summary(_finished(tmp_path, "bf16", []))
    assert found["steps"] == 0 and found["reward_end"] is None
    assert "| small_qwen3, colocated, bf16, seed 3 | 0 | - to - |" in grpo.tables([found])


def test_section_and_plot_are_written_side_by_side(tmp_path):
    for precision in ("bf16", "fp8"):
        _finished(tmp_path / "runs", precision, [0.1, 0.2, 0.3, 0.4])
    grpo.write_section(tmp_path / "runs", tmp_path / "docs" / "plot.png")
    text = (tmp_path / "docs" / "measured.md").read_text()
    assert "](plot.png)" in text and "fp8, seed 3 | 4 | 0.250 to 0.250" in text
    assert (tmp_path / "docs" / "plot.png").stat().st_size > 10_000


def test_the_difference_of_a_run_is_its_mean_and_its_largest(tmp_path):
    run = _finished(tmp_path, "fp8_invariant", [])
    key = "mismatch/abs_logprob_diff"
    lines = [{"step": i, f"{key}/mean": mean, f"{key}/max": 2 * mean} for i, mean in enumerate([0.0, 3e-7, 0.0], 1)]
    (run.run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = grpo.summary(run)
    assert (found["abs_logprob_diff"], found["abs_logprob_diff_max"]) == (pytest.approx(1e-7), 6e-7)
    assert "| 1.0e-07 | 6.0e-07 |" in grpo.tables([found])
    grpo.draw([run], tmp_path / "plot.png")  # zeros have a place on its scale


def test_a_warm_start_can_be_made_alone(tmp_path, monkeypatch, capsys):
    started = []

    def pretend(command, log, deadline_s):
        started.append(command[3])
        curve = tmp_path / "small_qwen3" / "warm_start"
        (curve / "hf").mkdir(parents=True)
        line = {"step": 1, "train/loss/mean": 2.0, "sft/expected_pass_rate/mean": 0.5}
        (curve / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        return True

    monkeypatch.setattr(grpo, "run_logged", pretend)
    words = ["--warm-start", "--folder", str(tmp_path), "--plot", str(tmp_path / "docs" / "plot.png")]
    for _ in range(2):
        assert grpo.main(words) == 0
    assert started == ["sft"] and not (tmp_path / "docs").exists()
    assert "small_qwen3 is there: 1 steps, pass rate 0.500" in capsys.readouterr().out


def _run_all(folder, precision):
    """``grpo.run_all`` with processes that only leave what is looked for."""

    def pretend(command, log, deadline_s):
        run = grpo.Run("small_qwen3", precision, "colocated", 1, folder)
        if "sft" in command:
            with (folder / "warm_starts").open("a") as file:
                file.write("one\n")
            time.sleep(0.3)
            grpo.warm_start_dir(run).mkdir(parents=True)
        else:
            assert grpo.warm_start_dir(run).exists()
            _finished(folder, precision, [0.5])
        return True

    grpo.run_logged = pretend
    grpo.num_gpus = lambda: 1
    grpo.run_all(grpo.parse(["--precision", precision, "--folder", str(folder), "--run-s", "5"]))


def test_programs_side_by_side_share_a_warm_start(tmp_path):
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_run_all, args=(tmp_path, precision)) for precision in ("bf16", "fp8")]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert (tmp_path / "warm_starts").read_text() == "one\n"
    assert len(grpo.found_runs(tmp_path)) == 2
