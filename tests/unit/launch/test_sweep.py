"""A sweep as an array: its elements, its word, its agent on a node, and its table."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from launch import jobs, sweep
from launch.batch_script import Link, setup_lines
from launch.cluster import Cluster
from launch.outcome import CANCELLED
from launch.plan import Plan, Request
from launch.spec import SAVED, JobSpec, read_jobs
from launch.sweep import JobArray
from megatron_fp8rl.cli import UsageError


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    root = tmp_path / "root's \"place\""
    return Cluster(gpu=None, gpus_per_node=0, ranks_per_node=2, partition="main", run_root=str(root))


def plan(cluster: Cluster, target: str, *words: str) -> Plan:
    found = jobs.read("sweep", target, words)
    return jobs.plan(
        Request(job="sweep", cluster=cluster, config_name=target, cfg=found.cfg, overrides=found.overrides, words=found.words)
    )


def value_of(spec: JobSpec, option: str) -> str:
    """The value that counts: the last of an option in the trainer's words."""
    words = spec.roles[0].command
    return words[max(i for i, word in enumerate(words) if word == option) + 1]


def test_elements_are_all_combinations_with_folders_of_their_own(cluster: Cluster):
    found = plan(
        cluster, "tiny_qwen3", "--over", "optim.lr", "1e-6", "3e-6", "--num_steps", "4", "--over", "seed", "1", "2", "3",
        "--at_once", "2",
    )  # fmt: skip
    array = found.spec
    assert isinstance(array, JobArray) and found.array == "0-5%2" and found.problems == ()
    assert [(value_of(e, "--optim.lr"), value_of(e, "--seed")) for e in array.elements] == [
        (lr, seed) for lr in ("1e-6", "3e-6") for seed in "123"
    ]
    assert array.run_dir == f"{cluster.run_root}/runs/tiny_qwen3_sweep"
    for index, element in enumerate(array.elements):
        assert element.run_dir == value_of(element, "--output_dir") == f"{array.run_dir}/element-{index}"
        assert value_of(element, "--num_steps") == "4" and element.problems() == []
        assert element.roles[0].command[:4] == ("-m", "megatron_fp8rl", "train", "tiny_qwen3")


def test_configurations_programs_and_values_of_several_words(cluster: Cluster):
    found = plan(
        cluster, "tiny_qwen3", "--over", "config", "tiny_qwen3", "tiny_qwen3_moe", "--program", "sft",
        "--over", "optim.offload", "optimizer", "optimizer gradients",
    )  # fmt: skip
    commands = [element.roles[0].command for element in found.spec.elements]
    assert [command[2:4] for command in commands] == [("sft", c) for c in ("tiny_qwen3", "tiny_qwen3_moe") for _ in "12"]
    at = commands[1].index("--optim.offload")
    assert commands[1][at : at + 3] == ("--optim.offload", "optimizer", "gradients")


def test_checkpoints_can_be_swept_by_evaluations(cluster: Cluster, tmp_path: Path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(b"")
    folders = [str(tmp_path / name) for name in "ab"]
    found = plan(cluster, "tiny_qwen3", "--program", "eval", "--over", "checkpoint", *folders, "--num_completions", "2")
    assert [value_of(element, "--checkpoint") for element in found.spec.elements] == folders


def test_problems_of_all_elements_are_said_once_with_where_they_are(cluster: Cluster):
    found = plan(cluster, "tiny_qwen3", "--over", "parallel.tensor", "1", "3", "--over", "seed", "1", "2", "--algo.clip_low", "-1")
    assert found.spec is None
    by_clip = [text for text in found.problems if "algo.clip_low" in text]
    assert len(by_clip) == 1 and not by_clip[0].startswith("elements"), "all have it"
    assert any(text.startswith("elements 2, 3 (parallel.tensor=3 seed=1; ") for text in found.problems)


def test_elements_of_unequal_size_are_refused(cluster: Cluster):
    found = plan(cluster, "tiny_qwen3_moe", "--over", "parallel.world_size", "2", "4", "--rollout.transport", "auto")
    assert found.spec is None
    assert "same number of nodes" in found.problems[0] and "parallel.world_size=4" in found.problems[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--over", "seed"), "name a field and its values"),
        (("--over", "seed", "1", "--over", "seed", "2"), "occurs twice"),
        (("--over", "seed", "1", "--program", "study"), "cannot be swept"),
        (("--over", "seed", "1", "--at_once", "no"), "is no number"),
    ],
)
def test_mistakes_have_a_message(words: tuple[str, ...], said: str):
    with pytest.raises(UsageError, match=said):
        jobs.read("sweep", "tiny_qwen3", words)


def test_an_unknown_field_is_refused_before_anything_is_planned():
    with pytest.raises(SystemExit):
        jobs.read("sweep", "tiny_qwen3", ("--over", "optim.learning_rate", "1", "2"))


def test_the_file_holds_all_elements_and_is_a_job_to_whoever_knows_no_arrays(cluster: Cluster, tmp_path: Path):
    array = plan(cluster, "tiny_qwen3", "--over", "seed", "1", "2").spec
    one = array.elements[0]
    many = [replace(one, run_dir=f"{array.run_dir}/element-{i}", name=f"{one.name}_{i}") for i in range(500)]
    array = replace(array, elements=tuple(many), labels=tuple((("z", str(i)), ("a", "b")) for i in range(500)))
    path = array.save(tmp_path / "array.json")
    assert JobArray.load(path) == array and JobSpec.load(path).run_dir == array.run_dir
    one.save(tmp_path / "one.json")
    with pytest.raises(ValueError, match="one.json is not the file of a job"):
        JobArray.load(tmp_path / "one.json")


def test_the_batch_script_looks_into_the_folder_of_its_element(cluster: Cluster, tmp_path: Path):
    array = plan(cluster, "tiny_qwen3", "--over", "seed", "1", "2").spec
    lines = setup_lines(array, Link(chain="c"), log_dir=str(tmp_path), setup=())
    assignment = next(line for line in lines.splitlines() if line.startswith("launch_folder="))
    shown = subprocess.run(
        ["sh", "-c", f'{assignment}\nprintf %s "$launch_folder"'],
        env={"SLURM_ARRAY_TASK_ID": "1"}, capture_output=True, text=True, check=True, timeout=300,
    ).stdout  # fmt: skip
    assert shown == f"{array.elements[1].run_dir}/launch"


def test_a_node_is_the_agent_of_its_element_and_keeps_the_table(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    array = plan(replace(cluster, env={"A": "1"}), "tiny_qwen3", "--over", "seed", "5", "6").spec
    array = replace(array, env={**array.env, "PYTHONPATH": "/code copy"})  # as the launcher adds it to all
    ran = []

    class FakeAgent:
        def __init__(self, spec, place):
            ran.append((spec, place))

        def run(self):
            spec = ran[-1][0]
            metrics = [{"step": s, "reward/score/mean": s / 4, "eval/pass_rate/mean": s / 10} for s in (1, 2)]
            Path(spec.run_dir, "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))
            Path(spec.run_dir, "done.json").write_text("{}")
            return 0

    monkeypatch.setattr("launch.agent.Agent", FakeAgent)
    slurm = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "18", "SLURM_NODEID": "0", "SLURM_JOB_NUM_NODES": "1"}
    assert sweep.run(array, slurm) == 0
    spec, place = ran[0]
    assert spec.run_dir == array.elements[1].run_dir and spec.env["PYTHONPATH"] == "/code copy" and spec.env["A"] == "1"
    assert place.job == "18" and [job["job_id"] for job in read_jobs(spec.run_dir)] == ["18"]
    assert JobSpec.load(read_jobs(spec.run_dir)[0]["spec"]).run_dir == spec.run_dir
    lines = Path(array.run_dir, "sweep.md").read_text().splitlines()
    assert lines[0] == "| run | seed | state | held-out start | held-out end | reward, last 10 |"
    assert lines[2].startswith("| element-0 | 5 | not begun |")
    assert lines[3] == "| element-1 | 6 | finished | 0.1 | 0.2 | 0.375 |"


@pytest.mark.parametrize(
    ("statuses", "num_begun"),
    [((0, 0, 0), 3), ((1, 0, 0), 3), ((0, SAVED, 0), 2), ((CANCELLED, 0, 0), 1)],
    ids=["done", "failed", "asked to save", "cancelled"],
)
def test_on_this_machine_an_element_that_was_asked_to_end_is_the_last(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, statuses: tuple[int, ...], num_begun: int
):
    array = plan(cluster, "tiny_qwen3", "--over", "seed", "5", "6", "7").spec
    begun = []

    def supervise(spec: JobSpec, job: str) -> int:
        assert JobSpec.load(job) == spec
        begun.append(spec.run_dir)
        return statuses[len(begun) - 1]

    monkeypatch.setattr("launch.local.supervise", supervise)
    assert sweep.run_here(array) == next((status for status in statuses if status), 0)
    assert begun == [element.run_dir for element in array.elements[:num_begun]]


def test_the_table_says_how_runs_failed_and_what_evaluations_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    labels = [[["checkpoint", name]] for name in "abcd"]
    (tmp_path / "sweep.json").write_text(json.dumps({"labels": labels, "name": "s"}))
    one = {"value": 0.25, "low": 0.1, "high": 0.5}
    evaluated = {"name": "hf", "step": None, "overall": {"accuracy": one, "pass_at": {"1": one, "4": one}}}
    for path, content in {
        "element-0/evaluations/hf/eval.json": evaluated,
        "element-1/failure.json": {"error": "EngineDeadError"},
        "element-2/launch/7.0/first_error.txt": "no such account",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(json.dumps(content))
    assert sweep.main([str(tmp_path)]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert rows[0] == "| element-0 | a | finished | 0.250 [0.100, 0.500] | 0.250 [0.100, 0.500] |"
    assert "failed: EngineDeadError" in rows[1] and "element-2/launch/7.0/first_error.txt" in rows[2]
    assert "not begun" in rows[3]
    assert sweep.main([str(tmp_path / "element-0")]) == 2
