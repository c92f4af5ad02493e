"""The comparison of whole runs: what is started, what is read back from their records, what the table says."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import grpo, grpo_rows, record, whole_runs
from benchmarks.results import Results
from megatron_fp8rl.cli import parse_overrides
from megatron_fp8rl.preflight import rules
from model_configs import small

SMALL = [small.small_qwen3, small.small_qwen3_8_layers, small.small_qwen3_moe, small.small_qwen3_moe_4_layers]


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


def _finished(folder, precision, rewards, seed=3):
    run = grpo.Run("small_qwen3", precision, "colocated", seed, folder)
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


def _row(run, num_steps=4, **more):
    keys = {"config": run.config, "layout": run.layout, "precision": run.precision, "seed": run.seed}
    said = {"num_steps": num_steps, "date": "2026-11-22", "machine": "1 NVIDIA H200", "command": "python -m x"}
    return keys | said | grpo_rows.numbers(run.data) | more


def test_numbers_come_from_the_records_of_finished_runs(tmp_path):
    found = _row(_finished(tmp_path, "fp8", [0.1] * 5 + [0.5] + [0.9] * 5))
    assert (found["reward_start"], found["reward_end"]) == (pytest.approx(0.1), pytest.approx(0.9))
    # Medians behind the first steps, of phases that every step has.
    assert found["phases_s"] == {"rollouts": 1.0, "update": 2.0} and found["step_s"] == 3.0
    assert (found["kv_tokens"], found["rollout_tokens_per_s"], found["is_done"]) == (4096, 500.0, True)
    curves = found["curves"]
    assert curves["step"] == list(range(1, 12)) and curves["reward"] == [0.1] * 5 + [0.5] + [0.9] * 5
    assert curves["abs_logprob_diff"] == [None] * 11
    assert curves["phases_s"] == {"rollouts": [1.0] * 11, "update": [10.0] * 2 + [2.0] * 9, "evaluate": [9.0] * 11}


def test_a_row_tells_of_how_many_steps_a_run_is(tmp_path):
    short = _row(_finished(tmp_path, "bf16", [0.25] * 3), num_steps=25)
    assert "| small_qwen3, colocated, bf16, seed 3 | A | 3 of 25 | 0.250 to 0.250 |" in grpo_rows.tables([short])
    none = _row(_finished(tmp_path, "fp8", []), num_steps=25)
    assert none["reward_end"] is None and "| A | 0 of 25 | - to - |" in grpo_rows.tables([none])


def test_section_and_plot_are_made_of_rows_alone(tmp_path):
    rows = [_row(_finished(tmp_path / "runs", precision, [0.1, 0.2, 0.3, 0.4])) for precision in ("bf16", "fp8")]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "grpo.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plot = tmp_path / "docs" / "plot.png"
    assert grpo.main(["--table", "--folder", str(tmp_path / "elsewhere"), "--plot", str(plot)]) == 0
    text = (tmp_path / "docs" / "measured" / "grpo.md").read_text()
    assert "](../plot.png)" in text and "fp8, seed 3 | A | 4 | 0.250 to 0.250" in text
    assert text.count("Measured 2026-11-22 on 1 NVIDIA H200: `python -m x`") == 1
    assert plot.stat().st_size > 10_000


def test_runs_with_the_same_letter_started_from_the_same_weights(tmp_path):
    run = _finished(tmp_path, "bf16", [0.5])
    name = grpo_rows.warm_start_name(run.run_dir)
    assert name and name != grpo_rows.warm_start_name(_finished(tmp_path, "fp8", [0.25]).run_dir)
    assert grpo_rows.warm_start_name(tmp_path) is None
    older = _row(run, warm_start=None)
    rows = [older, older | {"precision": "fp8"}, older | {"command": "another"}, older | {"warm_start": name}]
    rows += [rows[-1] | {"precision": "fp8"}, older | {"config": "small_qwen3_moe", "warm_start": name}]
    assert grpo_rows.warm_starts(rows) == ["A", "A", "B", "C", "C", "A"]


def test_a_run_is_there_if_it_is_complete_from_the_warm_start_that_is_there(tmp_path):
    run = _finished(tmp_path, "bf16", [0.5])
    results = Results(tmp_path / "grpo.jsonl", grpo_rows.KEYS)
    for steps, name in ((1, "another"), (2, "yet another")):
        results.add(_row(run, warm_start=name) | {"steps": steps, "is_done": steps == 2})
    assert grpo.row_of(run, results)["steps"] == 2  # there is none here
    warm_start = grpo.warm_start_dir(run).parent
    warm_start.mkdir(parents=True)
    (warm_start / "metrics.jsonl").write_text("{}")
    assert grpo.row_of(run, results) is None
    results.add(_row(run) | grpo.identity(run) | {"steps": 3})
    assert grpo.row_of(run, results)["steps"] == 3 and len(results.rows()) == 3


def test_the_difference_of_a_run_is_its_mean_and_its_largest(tmp_path):
    run = _finished(tmp_path, "fp8_invariant", [])
    key = "mismatch/abs_logprob_diff"
    lines = [{"step": i, f"{key}/mean": mean, f"{key}/max": 2 * mean} for i, mean in enumerate([0.0, 3e-7, 0.0], 1)]
    (run.run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = _row(run)
    assert (found["abs_logprob_diff"], found["abs_logprob_diff_max"]) == (pytest.approx(1e-7), 6e-7)
    assert found["curves"]["abs_logprob_diff"] == [0.0, 3e-7, 0.0]
    assert "| 1.0e-07 | 6.0e-07 |" in grpo_rows.tables([found])
    grpo_rows.draw([found], tmp_path / "plot.png")  # zeros have a place on its scale


def test_the_row_of_more_steps_stays_until_a_run_is_longer(tmp_path, capsys):
    options = grpo.parse(["--steps", "4", "--folder", str(tmp_path)])
    results = Results(tmp_path / "grpo.jsonl", grpo_rows.KEYS)
    for rewards, kept in (([0.1] * 3, 3), ([0.2] * 2, 3), ([0.3] * 4, 4)):
        run = grpo.Run("small_qwen3", "bf16", "colocated", 3, tmp_path)
        if run.run_dir.exists():
            grpo.shutil.rmtree(run.run_dir)
        _finished(tmp_path, "bf16", rewards)
        grpo.keep(run, options, results)
        assert grpo.row_of(run, results)["steps"] == kept
    assert "its row of 3 steps stays; this run has 2" in capsys.readouterr().out
    assert grpo.is_there(run, options, results)
    grpo.shutil.rmtree(run.run_dir)
    assert grpo.is_there(run, options, results), "on another machine as well"
    assert not grpo.is_there(run, grpo.parse(["--steps", "5", "--folder", str(tmp_path)]), results)
    assert not grpo.is_there(run, grpo.parse(["--steps", "4", "--again", "--folder", str(tmp_path)]), results)


# A run of 20 steps of 0.2 s, saved when asked to stop, and gone on with from there; a deaf one of 1 s does not stop.
_PRETENDED = """
import json, pathlib, signal, sys, time
run_dir, mode = pathlib.Path(sys.argv[1]), sys.argv[2]
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1) if mode != "deaf" else None)
run_dir.mkdir(parents=True, exist_ok=True)
path = run_dir / "metrics.jsonl"
begin = len(path.read_text().splitlines()) if path.exists() else 0
if mode == "fails":
    print("line before"); sys.exit("ValueError: no such thing")
with path.open("a") as file:
    for step in range(begin + 1, 21):
        file.write(json.dumps({"step": step, "reward/score/mean": step / 20, "time/step/s": 0.2}) + "\\n"); file.flush()
        time.sleep({"quick": 0.0, "deaf": 1.0}.get(mode, 0.2))
        if asked:
            sys.exit(85)
(run_dir / "done.json").write_text("{}")
"""


@pytest.fixture
def pretended(tmp_path, monkeypatch):
    """A function that calls the program with pretended runs; it returns the kept row."""
    mode = {"run": "slow"}
    (tmp_path / "run.py").write_text(_PRETENDED)
    (tmp_path / "small_qwen3" / "warm_start" / "hf").mkdir(parents=True)
    words = lambda run, options: [sys.executable, str(tmp_path / "run.py"), str(run.run_dir), mode["run"]]  # noqa: E731
    monkeypatch.setattr(grpo, "command", words)
    monkeypatch.setattr(whole_runs, "STOP_S", 8.0)
    run = grpo.Run("small_qwen3", "bf16", "colocated", 1, tmp_path)

    def call(how, budget_s):
        mode["run"] = how
        words = ["--precision", "bf16", "--steps", "20", "--run-s", "1", "--budget-s", str(budget_s)]
        words += ["--folder", str(tmp_path), "--plot", str(tmp_path / "docs" / "plot.png")]
        assert grpo.main(words) == 0
        return grpo.row_of(run, Results(tmp_path / "grpo.jsonl", grpo_rows.KEYS))

    return call


def test_a_run_cut_by_the_budget_leaves_its_row_and_is_gone_on_with(pretended, tmp_path, capsys):
    row = pretended("slow", 10)
    said = capsys.readouterr().out
    assert 2 <= row["steps"] < 20 and not row["is_done"] and row["num_steps"] == 20
    assert row["curves"]["reward"] == [step / 20 for step in range(1, row["steps"] + 1)]
    assert f"bf16-colocated-seed1: step {row['steps']} of 20: 0.20 s" in said and "is asked to stop" in said
    assert f"{row['steps']} of 20 steps, and saved; 0 s are left; run the same command again" in said
    assert f"| {row['steps']} of 20 |" in (tmp_path / "docs" / "measured" / "grpo.md").read_text()
    assert (tmp_path / "docs" / "plot.png").exists()
    after = pretended("quick", 10)
    said = capsys.readouterr().out
    assert after["is_done"] and after["steps"] == 20 and "all 20 steps are done" in said
    assert f"step {row['steps']} of 20" not in said and f"step {row['steps'] + 1} of 20" in said
    assert "| 20 | 0.150 to 0.900 |" in (tmp_path / "docs" / "measured" / "grpo.md").read_text()


def test_a_run_that_does_not_stop_is_killed_and_leaves_its_row(pretended, monkeypatch, capsys):
    monkeypatch.setattr(whole_runs, "_KILL_S", 1.0)
    monkeypatch.setattr(whole_runs, "STOP_S", 4.0)  # the run is deaf from its start on
    row = pretended("deaf", 8)
    assert 1 <= row["steps"] < 20 and not row["is_done"]
    assert "steps, not saved; 0 s are left" in capsys.readouterr().out


def test_a_run_that_fails_shows_the_end_of_its_log(pretended, capsys):
    assert pretended("fails", 10) is None
    said = capsys.readouterr().out
    assert "FAILED small_qwen3 bf16-colocated-seed1 after 0 of 20 steps: ValueError: no such thing" in said
    assert "  | line before" in said and "The end of rollout-0.log:\n  | no such file" in said


def test_a_row_is_kept_when_the_program_is_asked_to_end(tmp_path):
    (tmp_path / "run.py").write_text(_PRETENDED)
    (tmp_path / "small_qwen3" / "warm_start" / "hf").mkdir(parents=True)
    program = (
        "import sys; from benchmarks import grpo\n"
        f"words = [sys.executable, {str(tmp_path / 'run.py')!r}]\n"
        "grpo.command = lambda run, options: [*words, str(run.run_dir), 'slow']\n"
        f"grpo.main(['--precision', 'bf16', '--folder', {str(tmp_path)!r}, '--plot', {str(tmp_path / 'p.png')!r}])"
    )
    root = Path(__file__).parents[3]
    process = subprocess.Popen([sys.executable, "-c", program], cwd=root, env=os.environ)
    metrics = tmp_path / "small_qwen3" / "bf16-colocated-seed1" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
        assert process.poll() is None and time.monotonic() < deadline, "the run does not begin"
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    row = json.loads((tmp_path / "grpo.jsonl").read_text())
    assert row["steps"] >= 2 and (tmp_path / "p.png").exists()


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
            _finished(folder, precision, [0.5], seed=1)
        return True

    def follow(name, command, run_dir, log, num_steps, left_s):
        return 0 if pretend(["rl"], None, left_s) else 1

    grpo.run_logged, grpo.follow = pretend, follow
    grpo.num_gpus = lambda: 1
    grpo.device_name = record.machine = lambda: "pretended"
    options = grpo.parse(["--precision", precision, "--folder", str(folder), "--steps", "1", "--run-s", "5"])
    grpo.run_all(options, Results(folder / "grpo.jsonl", grpo_rows.KEYS))


def test_programs_side_by_side_share_a_warm_start(tmp_path):
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_run_all, args=(tmp_path, precision)) for precision in ("bf16", "fp8")]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert (tmp_path / "warm_starts").read_text() == "one\n"
    assert len(Results(tmp_path / "grpo.jsonl", grpo_rows.KEYS).rows()) == 2
