"""Sweeps: a job of its own for each combination of values, checked as a whole, and a table of what came of them."""

import json
from pathlib import Path

import pytest

from launch import cli, slurm, sweep
from launch.spec import JobSpec


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    (tmp_path / "the runs").mkdir()
    how = f"gpu=None, gpus_per_node=0, ranks_per_node=2, partition='main', run_root={str(tmp_path / 'the runs')!r}"
    path.write_text(f"from launch.cluster import Cluster\nCLUSTER = Cluster({how})\n")
    return str(path)


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[JobSpec]:
    specs: list[JobSpec] = []

    def submit(spec: JobSpec, cluster, **how) -> str:
        specs.append(spec)
        return str(len(specs))

    monkeypatch.setattr(slurm, "submit", submit)
    return specs


def value_of(spec: JobSpec, option: str) -> str:
    """The value that counts: the last of an option in the trainer's words."""
    words = spec.roles[0].command
    return words[max(i for i, word in enumerate(words) if word == option) + 1]


@pytest.mark.slow
def test_runs_are_all_combinations_with_folders_of_their_own(cluster: str, submitted: list[JobSpec], tmp_path: Path):
    axes = ["--over", "optim.lr", "1e-6", "3e-6", "--num_steps", "4", "--over", "seed", "1", "2", "3"]
    assert cli.main(["tiny_qwen3", "--cluster", cluster, *axes]) == 0
    assert [(value_of(spec, "--optim.lr"), value_of(spec, "--seed")) for spec in submitted] == [
        (lr, seed) for lr in ("1e-6", "3e-6") for seed in "123"
    ]
    folder = tmp_path / "the runs" / "runs" / "tiny_qwen3_sweep"
    for index, spec in enumerate(submitted):
        assert spec.run_dir == value_of(spec, "--output_dir") == f"{folder}/element-{index}"
        assert value_of(spec, "--num_steps") == "4" and spec.problems() == []
    assert "| element-5 | 3e-6 | 3 | not begun |" in sweep.write_table(folder).replace("begun", "not begun").replace(
        "not not", "not"
    )


def test_configurations_programs_and_values_of_several_words(cluster: str, submitted: list[JobSpec]):
    axes = ["--over", "config", "tiny_qwen3", "tiny_qwen3_moe"]
    axes += ["--over", "optim.offload", "optimizer", "optimizer gradients"]
    assert cli.main(["tiny_qwen3", "--cluster", cluster, "--job", "sft", *axes]) == 0
    commands = [spec.roles[0].command for spec in submitted]
    assert [command[2:4] for command in commands] == [
        ("sft", c) for c in ("tiny_qwen3", "tiny_qwen3_moe") for _ in "12"
    ]
    at = commands[1].index("--optim.offload")
    assert commands[1][at : at + 3] == ("--optim.offload", "optimizer", "gradients")


def test_checkpoints_can_be_swept_by_evaluations(cluster: str, submitted: list[JobSpec], tmp_path: Path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(b"")
    folders = [str(tmp_path / name) for name in "ab"]
    words = ["--job", "eval", "--over", "checkpoint", *folders, "--num_completions", "2"]
    assert cli.main(["tiny_qwen3", "--cluster", cluster, *words]) == 0
    assert [value_of(spec, "--checkpoint") for spec in submitted] == folders


def test_problems_of_all_runs_are_said_and_none_is_queued(cluster: str, submitted: list[JobSpec], capsys):
    axes = "--over parallel.tensor 1 3 --over seed 1 2".split()
    assert cli.main(["tiny_qwen3", "--cluster", cluster, *axes]) == 2
    said = capsys.readouterr().err
    assert "parallel.tensor=3 seed=2: --parallel" in said and "parallel.tensor=1" not in said and not submitted


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
    assert "begun" in rows[3]
    assert sweep.main([str(tmp_path / "element-0")]) == 2


@pytest.mark.slow
def test_a_sweep_that_slurm_refuses_leaves_nothing(cluster: str, monkeypatch, tmp_path: Path):
    def refuse(*args: object, **how: object) -> str:
        raise slurm.SubmitError("Slurm rejected the job")

    monkeypatch.setattr(slurm, "submit", refuse)
    assert cli.main(["tiny_qwen3_moe", "--cluster", cluster, "--over", "seed", "1", "2"]) == 2
    assert list((tmp_path / "the runs").iterdir()) == [] or not list((tmp_path / "the runs" / "runs").iterdir())
