"""The jobs beside GRPO: commands that preflight accepts for one H200, and rows from folders of runs."""

import json
import sys

import pytest

from benchmarks import jobs
from benchmarks.runner import parse
from megatron_fp8rl import cli
from megatron_fp8rl.__main__ import COMMANDS
from megatron_fp8rl.report.run_data import RunData
from tests.helpers.own_model import make_model


@pytest.fixture
def inputs(tmp_path):
    """Arguments of the program for a tiny model and three rows."""
    model = tmp_path / "tiny"
    make_model(model, ["What is 1 + 1?"])
    text = (model / "config.json").read_text()
    (model / "config.json").write_text(
        text.replace('"max_position_embeddings": 512', '"max_position_embeddings": 2048')
    )
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(3)]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = {"model": model, "data": tmp_path, "folder": tmp_path / "out"}
    return [str(word) for name, path in paths.items() for word in (f"--{name}", path)]


def _parsed(command):
    """The checked configuration of a command."""
    return cli.parse(command[3:], {known.name: known for known in COMMANDS}).cfg


def test_preflight_accepts_every_command_for_one_h200(inputs):
    found = jobs.commands(parse(jobs.Jobs(), [*inputs, "--plan", "h200"]))
    assert list(found) == list(jobs.JOBS)
    cfgs = {job: _parsed(command) for job, command in found.items()}
    assert cfgs["lora"].lora.merge and not cfgs["lora_unmerged"].lora.merge
    assert (cfgs["muon"].optim.optimizer, cfgs["adam_fp8"].optim.states) == ("muon", "fp8")
    assert (cfgs["ngram"].engine.speculation, cfgs["mtp"].engine.speculation) == ("ngram", "mtp")
    assert (cfgs["sft"].algo.loss, cfgs["dpo"].algo.loss) == ("sft", "dpo")
    assert cfgs["distill"].data.environments[0].teacher and cfgs["distill"].algo.teacher_kl == "full"
    with_engines = [cfg for job, cfg in cfgs.items() if job not in ("sft", "dpo")]
    assert {cfg.engine.gpu_memory_utilization for cfg in with_engines} == {0.05}  # runs share a GPU
    assert {cfg.num_steps for cfg in cfgs.values()} == {21}  # one more than is measured
    of_shape = jobs.commands(parse(jobs.Jobs(), [*inputs, "--plan", "h200", "--shape", "0.6b"]))
    assert all(_parsed(command).model.random for command in of_shape.values()) and "dpo" not in of_shape


def test_the_rejected_answer_is_wrong(inputs, tmp_path):
    (line, *_) = jobs.pairs(tmp_path / "train.jsonl", tmp_path).read_text().splitlines()
    assert json.loads(line) == {"prompt": "What is 0 + 1?", "chosen": "1", "rejected": "2"}


def test_a_row_has_medians_after_the_second_step_and_the_largest_memory(tmp_path):
    values = {"time/step/s": [9, 9, 9, 3, 1, 2], "speculation/acceptance/mean": [None, 0.1, 0.1, 0.5, 0.7, 0.6]}
    values |= {"memory/train_allocated/max": [1, 3 << 30, 2, 2, 2, 9 << 30], "publish/bytes/sum": [5, 6, 6, 6, 7, 6]}
    values |= {"memory/rollout_allocated/max": [None, 1 << 29, 1 << 29, 1 << 28, 1 << 29, 9 << 30]}
    values |= {"publish/pause/s": [9, 9, 9, 0.25, 0.75, 9], "rollout/tokens_per_s/mean": [None, 9, 9, 20, 40, 9]}
    values |= {
        "mismatch/abs_logprob_diff/mean": [None, 0.1, 0.2, 0.3, 0.4, 9],
        "mismatch/abs_logprob_diff/max": [0] * 6,
    }
    values |= {"reward/score/mean": [None, 0.1, 0.3, 0.5, 0.7, 9]}
    records = [{"step": step} | {key: of[step] for key, of in values.items()} for step in range(6)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    row = jobs.row_of("ngram", RunData(tmp_path), last=4)
    assert row == {
        "job": "ngram",
        "steps": 2,
        "metric": "reward/score/mean",
        "step_s": 2,
        "publish_bytes": 6.5,
        "pause_s": 0.5,
        "tokens_per_s": 30,
        "accepted_drafts": pytest.approx(0.6),
        "held_gib": 0.5,  # without activations
        "peak_gib": 3,
        "mean_d": pytest.approx(0.25),
        "max_d": 0,
        "first": pytest.approx(0.2),  # of two steps
        "last": pytest.approx(0.6),
    }
    shown = jobs.Jobs().line(row | {"model": "m"})
    assert shown["accepted drafts"] == pytest.approx(0.6) and shown["publish s"] is None
    assert "first" not in jobs.row_of("sft", RunData(tmp_path), last=4)  # without evaluations


def test_drafts_that_no_engine_verified_are_wrong():
    benchmark, row = jobs.Jobs(), {"model": "m", "job": "mtp", "step_s": 1.0}
    assert benchmark.is_wrong(row) and not benchmark.is_wrong(row | {"job": "glm"})
    assert not benchmark.is_wrong(row | {"accepted_drafts": 0.0})
    assert [line["job"] for line in benchmark.order([row, row | {"job": "sft"}])] == ["sft", "mtp"]
    assert benchmark.line(row)["model"] == "tiny_glm4_moe"


def test_a_run_that_fails_is_an_error_and_the_others_have_rows(inputs, tmp_path, monkeypatch):
    program = (
        "import json, sys; from pathlib import Path; folder = Path(sys.argv[1]); folder.mkdir(parents=True)\n"
        "if folder.name == 'muon': raise ValueError('no such optimizer')\n"
        "steps = [{'step': i, 'time/step/s': 1.0} for i in range(5)]\n"
        "(folder / 'metrics.jsonl').write_text(''.join(json.dumps(step) + '\\n' for step in steps))"
    )
    chosen = [*inputs, "--steps", "4", "--job", "distill", "muon", "grpo", "--at-once", "2"]
    options = parse(jobs.Jobs(), chosen)
    folder = options.folder / "model"
    folder.mkdir(parents=True)
    planned = {job: [sys.executable, "-c", program, str(folder / job)] for job in options.job}
    monkeypatch.setattr(jobs, "commands", lambda options: planned)
    (arm,) = jobs.Jobs().arms(options)
    *first, last = jobs.Jobs().rows_of(arm, options, tmp_path / "log")
    rows = {row["job"]: row for row in first}
    assert rows["muon"]["error"] == "ValueError: no such optimizer" and rows["grpo"]["step_s"] == 1.0
    assert last["job"] == "distill"  # its teacher is a result of another run
    assert {row["model"] for row in [*first, last]} == {"tiny"}
