"""Reinforcement learning on a real Slurm: a small MoE model, its trainer on two nodes, its engine on a third.

Models are tiny and steps few: these tests are about nodes, limits and losses of both. Times are printed, and kept by
``--junitxml``: from the command to the first step, and from the loss of a node to the next step.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, last_job, lines_of, logs_of

from tests.helpers.slurm_jobs import cluster_file, last_step, nodes_of, run_dir

START_S = 420.0  # until a first step: imports, a warm start, an engine
RUN_S = 420.0
NUM_STEPS = 8
# With a constant learning rate each step changes the weights, the last one too.
CONFIG = """
    tiny_qwen3_moe --parallel.world_size 2 --parallel.expert 2 --engine.placement separate --weight_sync.transport gloo
    --observe.eval_prompts 8 --sampling.prompts_per_step 16 --warm_start.steps 20
    --checkpoint.every_steps 2 --checkpoint.keep 10 --optim.decay constant
""".split()
CURVE = ("reward/score/mean", "train/loss/mean", "train/grad_norm/max", "mismatch/abs_logprob_diff/mean")


def begin(slurm: SlurmCluster, folder: Path, *words: str | Path) -> tuple[str, Path]:
    """(number of the job, folder of the run)."""
    name = words[words.index("--name") + 1]
    launched = slurm.launch(*CONFIG, "--cluster", cluster_file(folder), *words)
    assert launched.status == 0, launched.output
    return last_job(run_dir(folder, name)), run_dir(folder, name)


@pytest.fixture(scope="module")
def shared_folder(slurm_session: SlurmCluster) -> Path:
    path = slurm_session.shared / f'training it\'s "here" {time.time_ns()}'
    path.mkdir(parents=True)
    return path


@pytest.fixture(scope="module")
def uninterrupted(slurm_session: SlurmCluster, shared_folder: Path, record_testsuite_property: Callable) -> Path:
    """A warm start and all steps in one go."""
    slurm_session.settle()
    began_s = time.monotonic()
    job, run = begin(slurm_session, shared_folder, "--name", "in one go", "--num_steps", str(NUM_STEPS))
    queued_s = time.monotonic()
    slurm_session.until(lambda: last_step(run) >= 1, "the first step", START_S, lambda: logs_of(run), job)
    first_s = time.monotonic()
    print(f"first step {first_s - began_s:.0f} s after the command, {first_s - queued_s:.0f} s after it was queued")
    record_testsuite_property("command_to_first_step_s", round(first_s - began_s, 1))
    assert slurm_session.wait(job, deadline_s=RUN_S) == "COMPLETED", logs_of(run)
    return run


def test_trainer_on_two_nodes_and_engine_on_a_third_learn_and_prove_their_weights(
    slurm: SlurmCluster, uninterrupted: Path
):
    assert last_step(uninterrupted) == NUM_STEPS
    job = last_job(uninterrupted)
    assert slurm.job(job)["NumNodes"] == "3" and slurm.job(job)["Restarts"] == "0"
    hosts = nodes_of(slurm, job)
    for role, node in (("trainer", 0), ("trainer", 1), ("rollout-0", 2)):
        assert f"node {node} ({hosts[node]})" in (uninterrupted / "logs" / f"{role}.node{node}.log").read_text()
    versions = [line["publish/version/max"] for line in lines_of(uninterrupted / "metrics.jsonl")]
    assert versions == list(range(NUM_STEPS + 1))
    checksums = [line["checksum"] for line in lines_of(uninterrupted / "details.jsonl")]
    assert len(set(checksums)) == NUM_STEPS + 1, "every update reached the engine"
    assert (uninterrupted / "report.html").exists() and (uninterrupted / "hf" / "config.json").exists()


def test_saved_by_request_and_cut_off_by_a_lost_node_the_curve_is_that_of_one_go(
    slurm: SlurmCluster, uninterrupted: Path, shared_folder: Path, record_property: Callable
):
    start = ("--job", "rl", "--model.hf_path", uninterrupted / "warm_start" / "hf")
    job, run = begin(slurm, shared_folder, *start, "--name", "in three parts", "--num_steps", str(NUM_STEPS))
    slurm.until(lambda: last_step(run) >= 2, "two steps", START_S, lambda: logs_of(run), job)
    slurm.command("scancel", "--signal=USR1", job)  # what Slurm sends save_signal_s before the limit
    slurm.until(lambda: slurm.job(job)["Restarts"] == "1", "the job to be queued again", 300, lambda: logs_of(run))
    saved = last_step(run)
    assert 2 <= saved < NUM_STEPS, "saved before its end"
    slurm.until(lambda: last_step(run) > saved, "a step after the save", START_S, lambda: logs_of(run), job)

    lost = nodes_of(slurm, job)[1]
    slurm.kill_node(int(lost.removeprefix("node")))
    lost_s, reached = time.monotonic(), last_step(run)
    assert reached < NUM_STEPS, "lost before its end"
    slurm.until(lambda: slurm.job(job)["Restarts"] == "2", "Slurm to notice the loss", 300, lambda: logs_of(run))
    noticed_s = time.monotonic() - lost_s
    slurm.until(lambda: last_step(run) > reached, "training to go on", START_S, lambda: logs_of(run), job)
    again_s = time.monotonic() - lost_s
    print(f"node lost: {noticed_s:.0f} s until Slurm queues the job again, {again_s:.0f} s until the next step")
    record_property("node_loss_to_requeue_s", round(noticed_s, 1))
    record_property("node_loss_to_next_step_s", round(again_s, 1))
    assert slurm.wait(job, deadline_s=RUN_S) == "COMPLETED", logs_of(run)
    assert lost not in nodes_of(slurm, job), "a node that is down is not used"

    expected, found = (lines_of(path / "metrics.jsonl") for path in (uninterrupted, run))
    assert [line["step"] for line in found] == list(range(NUM_STEPS + 1)), "each step once"
    for one, other in zip(expected[1:], found[1:], strict=True):
        for key in CURVE:
            assert other[key] == one[key], (one["step"], key)  # the layout is the same, so every bit is


@pytest.mark.long
def test_a_lost_replica_comes_back_with_the_current_weights_while_training_goes_on(
    slurm: SlurmCluster, uninterrupted: Path, shared_folder: Path
):
    start = ("--job", "rl", "--model.hf_path", uninterrupted / "warm_start" / "hf", "--engine.num_replicas", "2")
    job, run = begin(slurm, shared_folder, *start, "--name", "replica lost", "--num_steps", "100000")
    slurm.until(lambda: last_step(run) >= 2, "two steps", START_S, lambda: logs_of(run), job)
    endpoint = run / "replicas" / "rollout-1.json"
    before = json.loads(endpoint.read_text())
    on_its_node = ("srun", f"--jobid={job}", "--overlap", "-N1", "-n1", "-w", nodes_of(slurm, job)[3])
    slurm.command(*on_its_node, "kill", "-9", str(before["pid"]))
    step = last_step(run)
    slurm.until(lambda: last_step(run) >= step + 3, "three steps without it", 300, lambda: logs_of(run), job)

    def is_back() -> bool:
        return endpoint.exists() and json.loads(endpoint.read_text())["incarnation"] != before["incarnation"]

    def in_all_steps(key: str) -> float:
        return sum(line[key] for line in lines_of(run / "metrics.jsonl"))

    slurm.until(is_back, "the replica to be back", START_S, lambda: logs_of(run), job)
    slurm.until(lambda: in_all_steps("rollout/replicas_joined/sum"), "a step with it", 300, lambda: logs_of(run), job)
    step = last_step(run)
    slurm.until(lambda: last_step(run) > step, "the next step with it", 300, lambda: logs_of(run), job)
    log = (run / "logs" / "rollout-1.node3.log").read_text()
    assert "incarnation 1" in log
    assert in_all_steps("rollout/replicas_lost/sum") == in_all_steps("rollout/replicas_joined/sum") == 1
    with_it = [line["rollout/replicas/min"] for line in lines_of(run / "metrics.jsonl")]
    assert (with_it[2], with_it[step + 1]) == (2, 2) and min(with_it) == 1
    assert slurm.job(job)["JobState"] == "RUNNING" and slurm.job(job)["Restarts"] == "0"

    status = slurm.launch("status", run)
    assert status.status == 0 and "trainer" in status.stdout and "rollout-1" in status.stdout, status.output
    logs = slurm.launch("logs", run, "--role", "rollout-1")
    assert "incarnation 1" in logs.stdout, logs.output
    cancelled = slurm.launch("cancel", run)
    assert cancelled.status == 0, cancelled.output
    assert slurm.wait(job, deadline_s=300) == "CANCELLED"
    assert last_step(run) > step


@pytest.mark.long
def test_a_sweep_is_a_job_for_each_value_with_a_table_of_its_runs(slurm: SlurmCluster, folder: Path):
    words = "--job sft --over seed 1 2 --warm_start.steps 4 --weight_sync.transport auto --wait".split()
    launched = slurm.launch("tiny_qwen3_moe", "--cluster", cluster_file(folder), "--name", "two seeds", *words)
    swept = run_dir(folder, "two seeds_sweep")
    assert launched.status == 0 and launched.stdout.count(": COMPLETED") == 2, launched.output + logs_of(swept)
    table = slurm.command(sys.executable, "-m", "launch.sweep", swept)
    assert "| element-0 | 1 | finished" in table and "| element-1 | 2 | finished" in table, table
