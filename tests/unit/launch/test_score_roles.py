"""Score servers of a launched job: on which nodes they are, what starts them, and what their deaths cost."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path

import pytest

from launch import cli as launch_cli
from launch import jobs
from launch.layout import Layout, Place, with_scorers
from launch.plan import plan_training
from launch.spec import Role, endpoint_file
from megatron_fp8rl import cli
from megatron_fp8rl.net.endpoint import scorer_name, scorer_path
from tests.helpers.agents import FAKE, Job, replica, trainer
from tests.helpers.launch_requests import CPU, SMALL, request

SERVERS = "--data.score_servers"


def scorer(index: int, node: int, *words: str) -> Role:
    command = (FAKE, "serve", *words)
    return Role(name=f"score-{index}", kind="scorer", nodes=(node,), command=command, restart=True, essential=False)


@pytest.mark.parametrize(
    ("count", "own_nodes", "nodes", "total"),
    [
        (1, 0, (3,), 4),
        (2, 0, (3, 1), 4),
        (3, 0, (3, 1, 2), 4),
        (6, 0, (3, 1, 2, 0, 3, 1), 4),
        (3, 2, (4, 5, 4), 6),
        (0, 0, (), 4),
    ],
)
def test_servers_go_where_processors_have_least_to_do(count, own_nodes, nodes, total):
    layout = Layout(nodes=4, trainer_nodes=(0, 1, 2), ranks_per_node=1, replicas=(Place(nodes=(3,), slots=(0,)),))
    found = with_scorers(layout, count, own_nodes)
    assert (found.scorers, found.nodes, found.replicas) == (nodes, total, layout.replicas)


def test_roles_of_score_servers():
    """The launcher takes a placement that the program by itself would refuse, and tells every role where all are."""
    found = plan_training(request("tiny_qwen3_moe", *SMALL, "gloo", SERVERS, "3", cluster=CPU, nodes=3))
    spec = found.spec
    assert spec is not None, found.problems
    assert spec.problems() == []
    scorers = [role for role in spec.roles if role.kind == "scorer"]
    assert [(role.name, role.nodes) for role in scorers] == [("score-0", (2,)), ("score-1", (1,)), ("score-2", (0,))]
    for index, role in enumerate(scorers):
        assert role.restart and not role.essential and role.gpus == ()
        assert role.env == {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        module, command, config, *words = role.command[1:]
        assert (module, command) == ("megatron_fp8rl", "score_server")
        *overrides, server, number, endpoint, path = words
        assert (server, number, endpoint) == ("--server", str(index), "--endpoint")
        cfg = cli.parse_overrides(cli.load_config(config), overrides)
        assert (cfg.data.score_servers, cfg.run_dir) == (3, spec.run_dir)
        # What the server writes is what the trainer reads and the agent removes.
        assert path == str(scorer_path(spec.run_dir, index)) == str(endpoint_file(spec.run_dir, role.name, role.kind))
        assert role.name == scorer_name(index)
    words = spec.role("trainer").command
    assert cli.parse_overrides(cli.load_config(words[3]), words[4:]).data.score_servers == 3


def test_nodes_of_their_own_are_further_ones():
    wanted = request("tiny_qwen3_moe", *SMALL, "gloo", SERVERS, "2", cluster=CPU, nodes=3, score_nodes=2)
    spec = plan_training(wanted).spec
    assert spec is not None and spec.nodes == 5
    assert [role.nodes for role in spec.roles] == [(0, 1), (2,), (3,), (4,)]
    bounded = dataclasses.replace(wanted, cluster=dataclasses.replace(CPU, max_nodes=4))
    assert any("takes 5 nodes" in problem for problem in plan_training(bounded).problems)


def test_colocated_engines_leave_the_servers_to_the_job():
    """The engines of one node are rank 0's own, the score servers are not."""
    spec = plan_training(request("tiny_qwen3_moe", SERVERS, "1", cluster=CPU)).spec
    assert spec is not None
    assert [(role.name, role.nodes) for role in spec.roles] == [("trainer", (0,)), ("score-0", (0,))]


def test_threads_are_those_of_the_clusters_file_if_it_says():
    cluster = dataclasses.replace(CPU, env={"OMP_NUM_THREADS": "2"})
    spec = plan_training(request("tiny_qwen3_moe", SERVERS, "1", cluster=cluster)).spec
    assert spec.role("score-0").env["OMP_NUM_THREADS"] == "2"


def test_a_job_without_rollouts_has_no_score_servers():
    spec = plan_training(request("tiny_qwen3_moe", SERVERS, "2", cluster=CPU, job="sft")).spec
    assert spec is not None and [role.name for role in spec.roles] == ["trainer"]


@pytest.mark.parametrize(
    ("words", "changes", "said"),
    [
        ((SERVERS, "-1"), {}, "--data.score_servers = -1: is below 0. Set it to 0 or more."),
        ((), {"score_nodes": 1}, "--score-nodes 1: the job has no score server. Set --data.score_servers, or leave"),
        ((SERVERS, "1"), {"score_nodes": 2}, "--score-nodes 2: --data.score_servers = 1 leaves some of them without"),
        ((SERVERS, "2"), {"job": "study"}, "--data.score_servers = 2: study scores on its one node by itself. Set 0."),
        ((), {"job": "study", "score_nodes": 1}, "--score-nodes 1: study runs on one node. Leave it out."),
    ],
)
def test_what_cannot_be_is_refused_by_name(words, changes, said):
    found = jobs.plan(request("tiny_qwen3_moe", *words, cluster=CPU, **changes))
    assert found.spec is None
    assert [problem for problem in found.problems if problem.startswith(said)], found.problems


@pytest.mark.parametrize("option", ["--score-nodes", "--score_nodes"])
def test_the_option_of_the_command_line(option, capsys):
    options = launch_cli.parse(["tiny_qwen3_moe", "--cluster", "local", option, "2", SERVERS, "2"])
    assert options.score_nodes == 2 and options.words == (SERVERS, "2")
    for wrong in ("0", "-1", "two"):
        assert launch_cli.main(["tiny_qwen3_moe", "--cluster", "local", f"{option}={wrong}"]) == 2
        assert "--score" in capsys.readouterr().err


def test_a_server_that_dies_is_started_again_and_its_old_file_is_removed(tmp_path: Path):
    job = Job(tmp_path, trainer("5000"), scorer(0, 1, "--die-after", "0.2", "--times", "1"), num_nodes=2)
    stale = endpoint_file(job.run_dir, "score-0", "scorer")
    stale.parent.mkdir()
    stale.write_text("of an attempt before")
    job.start(LAUNCH_RESTART_PAUSE_S="0.05")
    job.until(lambda: stale.exists() and stale.read_text().startswith("{"))
    assert json.loads(stale.read_text())["incarnation"] == "1"
    os.kill(job.agents[0].pid, signal.SIGINT)
    statuses, outputs = job.wait()
    assert statuses == {130}, outputs
    assert not stale.exists(), "nobody is to ask a server that is gone"


@pytest.mark.slow
def test_the_last_server_given_up_ends_the_job_with_its_error(tmp_path: Path):
    """One of two does not, nor do replicas that live."""
    roles = (trainer("5000"), replica(0, 0), scorer(0, 0, "--die-after", "0.1"), scorer(1, 1, "--die-after", "0.1"))
    job = Job(tmp_path, *roles, num_nodes=2, max_restarts=0)
    statuses, outputs = job.run(LAUNCH_RESTART_PAUSE_S="0.01")
    assert statuses == {1}, outputs
    assert sum(output.count("times in a row and is given up") for output in outputs) == 2
    error = (job.board / "first_error.txt").read_text()
    assert error.startswith("role score-") and error.endswith("MemoryError: no memory for the KV cache\n")


def test_a_job_outlives_one_of_its_servers(tmp_path: Path):
    roles = (trainer("5000"), scorer(0, 0), scorer(1, 1, "--die-after", "0.05"))
    job = Job(tmp_path, *roles, num_nodes=2, max_restarts=0)
    job.start(LAUNCH_RESTART_PAUSE_S="0.01")
    told = job.board / "role-score-1.node1.json"
    job.until(lambda: told.exists() and json.loads(told.read_text())["state"] == "given up")
    then = len(job.steps())
    job.until(lambda: len(job.steps()) > then + 2)
    os.kill(job.agents[0].pid, signal.SIGINT)
    statuses, outputs = job.wait()
    assert statuses == {130}, outputs
