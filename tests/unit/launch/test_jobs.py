"""Plans of every kind of job, without Slurm: roles, nodes and refusals."""

import dataclasses
from pathlib import Path

import pytest

from launch import jobs
from launch.cluster import Cluster
from launch.plan import Plan, Request
from megatron_fp8rl.__main__ import COMMANDS
from megatron_fp8rl.cli import UsageError, parse
from megatron_fp8rl.report.study import StudyOptions
from tests.helpers.checkpoints import write_checkpoint, write_hf


def cluster_of(tmp_path: Path, **changes) -> Cluster:
    return Cluster(gpu=None, gpus_per_node=0, ranks_per_node=2, partition="main", run_root=str(tmp_path), **changes)


def plan(cluster: Cluster, job: str, target: str, *args: str, nodes: int | None = None) -> Plan:
    read = jobs.read(job, target, args)
    fields = {"cfg": read.cfg, "overrides": read.overrides, "args": read.args}
    return jobs.plan(Request(job=job, cluster=cluster, config_name=target, nodes=nodes, **fields))


def test_training_jobs_are_those_of_the_plan(tmp_path: Path):
    result = plan(cluster_of(tmp_path), "train", "tiny_qwen3", "--num_steps", "3")
    assert result.problems == () and result.spec is not None
    assert result.spec.role("trainer").command[:4] == ("-m", "megatron_fp8rl", "train", "tiny_qwen3")
    assert plan(cluster_of(tmp_path), "sft", "tiny_qwen3").spec.role("trainer").command[2] == "sft"


def test_an_evaluation_has_the_roles_of_training_and_words_that_parse_again(tmp_path: Path):
    checkpoint = write_checkpoint(tmp_path / "runs" / "tiny_qwen3" / "checkpoints", 40)
    args = "--ks 1 4 --num_completions 4 --engine.num_replicas 2 --engine.placement separate --seed 7".split()
    args += ["--weight_sync.transport", "gloo", "--checkpoint", str(checkpoint)]
    result = plan(cluster_of(tmp_path), "eval", "tiny_qwen3", *args, nodes=2)
    assert result.problems == ()
    spec = result.spec
    assert spec.name == "tiny_qwen3_eval"
    assert [role.name for role in spec.roles] == ["trainer", "rollout-0", "rollout-1"]
    command = spec.role("trainer").command
    assert command[:4] == ("-m", "megatron_fp8rl", "eval", "tiny_qwen3")
    again = parse(command[2:], {c.name: dataclasses.replace(c, checks_config=True) for c in COMMANDS})
    assert again.options.checkpoint == (str(checkpoint),) and again.options.ks == (1, 4)
    assert again.cfg.seed == 7 and again.cfg.engine.placement == "remote"
    assert again.cfg.run_dir == str(tmp_path / "runs" / "tiny_qwen3")
    replica = spec.role("rollout-0").command
    assert replica[1:3] == ("megatron_fp8rl", "replica") and "--checkpoint" not in replica and "--seed" in replica


def test_a_relative_checkpoint_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write_hf(tmp_path / "my models" / "hf")
    result = plan(cluster_of(tmp_path), "eval", "tiny_qwen3", "--checkpoint", "my models/hf")
    args = result.spec.role("trainer").command
    hf = str(tmp_path / "my models" / "hf")
    assert args[args.index("--checkpoint") + 1] == hf
    assert args[args.index("--model.hf_path") + 1] == hf, "replicas begin with its config.json and tokenizer"


def test_an_evaluation_is_refused_with_everything_at_once(tmp_path: Path):
    args = ["--checkpoint", str(tmp_path / "none"), *"--num_completions 2 --ks 8 --parallel.tensor 3".split()]
    result = plan(cluster_of(tmp_path, save_signal_s=10**6), "eval", "tiny_qwen3", *args)
    assert result.spec is None
    for part in ("--checkpoint = ", "is not a folder", "pass@8", "--parallel.tensor = 3", "save_signal_s"):
        assert part in "\n".join(result.problems), part


def test_the_tokenizer_of_another_run_is_not_found_by_chance(tmp_path: Path):
    other = tmp_path / "runs" / "other"
    checkpoint = write_checkpoint(other / "checkpoints", 1)
    (other / "model").mkdir()
    (other / "model" / "config.json").write_text("{}")
    (other / "versions.json").write_text("{}")
    result = plan(cluster_of(tmp_path), "eval", "tiny_qwen3", "--checkpoint", str(checkpoint))
    assert result.spec is None and f"Use --output_dir {other}" in result.problems[0]
    own = plan(cluster_of(tmp_path), "eval", "tiny_qwen3", "--checkpoint", str(checkpoint), "--output_dir", str(other))
    assert own.problems == ()


def test_a_study_is_one_program_on_one_node(tmp_path: Path):
    chosen = ["--seeds", "4", "5", "--arms", "bf16/bf16", "exact", "--corrected_only"]
    result = plan(cluster_of(tmp_path), "study", "tiny_qwen3_moe", *chosen, "--num_steps", "2")
    (role,) = result.spec.roles
    assert (role.name, role.kind, result.spec.nodes) == ("task", "command", 1)
    again = parse(role.command[2:], {c.name: c for c in COMMANDS})
    assert again.options == StudyOptions(seeds=(4, 5), arms=("bf16/bf16", "exact"), corrected_only=True)
    assert again.cfg.num_steps == 2
    assert again.cfg.run_dir == str(tmp_path / "runs" / "tiny_qwen3_moe")
    assert result.spec.run_dir == again.cfg.run_dir + "_study"


def test_a_study_that_one_node_cannot_hold_is_refused(tmp_path: Path):
    args = "--parallel.world_size 4 --parallel.expert 4 --algo.correction off".split()
    slots, correction = plan(cluster_of(tmp_path), "study", "tiny_qwen3_moe", *args).problems
    assert "takes 4 slots, and a study runs on one node of 2" in slots and "algo.correction" in correction
    assert "--nodes 2" in plan(cluster_of(tmp_path), "study", "tiny_qwen3_moe", nodes=2).problems[0]


def test_a_conversion_gets_absolute_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write_hf(tmp_path / "in put")
    result = plan(cluster_of(tmp_path), "convert", "hf_to_megatron", "in put", "out", "--workers", "2")
    (role,) = result.spec.roles
    folders = (str(tmp_path / "in put"), str(tmp_path / "out"))
    assert role.command == ("-m", "checkpoint_tools", "hf_to_megatron", *folders, "--workers", "2")
    assert result.spec.run_dir == str(tmp_path / "runs" / "hf_to_megatron_out")
    result = plan(cluster_of(tmp_path), "convert", "megatron_to_hf", "gone", "out", "--hf_config", "in put")
    assert result.spec is None and "SOURCE = " in result.problems[0]


@pytest.mark.parametrize(
    ("job", "target", "args", "said"),
    [
        ("evl", "tiny_qwen3", (), "did you mean eval"),
        ("convert", "hf_to_megatro", ("a", "b"), "did you mean hf_to_megatron"),
        ("convert", "hf_to_fp8", ("--workers", "1"), "before its options"),
        ("eval", "tiny_qwen", (), "did you mean"),
    ],
)
def test_mistakes_have_a_message(job: str, target: str, args: tuple[str, ...], said: str):
    with pytest.raises(UsageError, match=said):
        jobs.read(job, target, args)
