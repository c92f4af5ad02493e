"""The word of a job survives whatever stands in it, and a wrong job says what is wrong."""

import os
import stat

import pytest

from launch import spec
from launch.spec import JobSpec, Role

ODD = "it's \"odd\" $HOME `id` \\ %j {x} 'nemo_run'\nnext"


def role(**changes) -> Role:
    values = {"name": "trainer", "kind": "torchrun", "nodes": (0, 1), "command": ("-m", "program")} | changes
    return Role(**values)


def job(*roles: Role, **changes) -> JobSpec:
    values = {"name": "run", "run_dir": "/shared/run", "roles": roles or (role(),), "nodes": 2} | changes
    return JobSpec(**values)


def test_loading_returns_the_same_job(tmp_path):
    one = role(command=("-m", ODD), gpus=(0, 3), env={"lower": ODD}, restart=True, essential=False)
    whole = job(role(), one, name=ODD, run_dir=f"/a b/{ODD}", env={"A": ODD}, max_restarts=7, save_signal_s=11)
    assert JobSpec.load(whole.save(tmp_path / ODD.replace("/", "_"))) == whole


def test_the_file_is_its_owners_alone_and_replaces_nothing(tmp_path):
    path = tmp_path / "launch" / "jobs" / "a.json"
    before = os.umask(0)
    try:
        job(env={"WANDB_API_KEY": "s3cret"}).save(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        job().save(path)


@pytest.mark.parametrize("text", ["", "abc", "{}", "[1]", '{"roles": 3}'])
def test_another_file_is_refused(tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ValueError, match="other.json is not a job file"):
        JobSpec.load(tmp_path / "other.json")
    with pytest.raises(ValueError, match="nowhere is not a job file"):
        JobSpec.load(tmp_path / "nowhere")


def test_words_name_the_head_of_the_role_and_the_rank_in_it():
    command = ("--node_rank", "{node_rank}", "tcp://{head_address}:{head_port}")
    spanning = role(kind="replica", nodes=(2, 5), command=command)
    assert spanning.args(5, head_address="10.0.0.3", head_port=123) == ("--node_rank", "1", "tcp://10.0.0.3:123")
    with pytest.raises(ValueError):
        spanning.args(3, head_address="", head_port=0)


def test_a_command_with_other_braces_stays():
    assert role(command=('{"a": {node_rank}}',)).args(1, head_address="", head_port=0) == ('{"a": 1}',)


def test_every_problem_is_named_at_once():
    wrong = job(role(nodes=(0, 4), essential=False), role(essential=False), nodes=3, run_dir="relative")
    text = "\n".join(wrong.problems())
    for part in ("two roles are named 'trainer'", "[0, 4]", "nodes [2] have no role", "never end", "'relative'"):
        assert part in text
    assert job().problems() == []


def test_roles_of_a_node_and_by_name():
    both = job(role(nodes=(0,)), role(name="rollout-0", nodes=(0, 1)))
    assert [r.name for r in both.on_node(0)] == ["trainer", "rollout-0"]
    assert [r.name for r in both.on_node(1)] == ["rollout-0"]
    assert both.role("rollout-0").nodes == (0, 1)
    with pytest.raises(KeyError, match="trainer, rollout-0"):
        both.role("score")
    with pytest.raises(ValueError, match="no node 2"):
        both.on_node(2)


def test_jobs_are_remembered_in_order(tmp_path):
    assert spec.read_jobs(tmp_path) == []
    spec.add_job(tmp_path, {"job_id": "1", "name": ODD})
    spec.add_job(tmp_path, {"job_id": "2"})
    assert [one["job_id"] for one in spec.read_jobs(tmp_path)] == ["1", "2"]
    assert spec.read_jobs(tmp_path)[0]["name"] == ODD


def test_nodes_in_words():
    assert [spec.format_nodes(nodes) for nodes in ((3,), (0, 1, 2), (0, 2))] == ["node 3", "nodes 0-2", "nodes 0, 2"]
