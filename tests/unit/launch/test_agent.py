"""Agents as local processes, with small programs for trainer and replicas: what ends a job, and what does not."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from launch.spec import Role, endpoint_file, log_file
from tests.helpers.agents import HOLD, ROOT, Job, nothing_is_left, replica, trainer

pytestmark = pytest.mark.slow


def test_a_job_ends_when_its_trainer_has_finished_everywhere(tmp_path: Path):
    job = Job(tmp_path, trainer("5", nodes=(0, 1)), replica(0, 1), replica(1, 2), num_nodes=3)
    statuses, outputs = job.run()
    assert statuses == {0}, outputs
    assert job.log("trainer", 1).splitlines()[1:] == [
        "begins after step 0",
        *(f"step {n}" for n in range(1, 6)),
        "has finished",
    ]
    assert job.log("trainer", 0).startswith("=== job local-1, attempt 0, node 0 (")
    assert "listens" in job.log("rollout-1", 2)
    assert (job.board / "done").read_text() == "0\n" and not (job.board / "first_error.txt").exists()
    assert not endpoint_file(job.run_dir, "rollout-1").exists()
    assert nothing_is_left(job.run_dir)


def test_a_crash_on_another_node_is_shown_first_by_all_and_nothing_is_left(tmp_path: Path):
    job = Job(
        tmp_path,
        trainer("50", "--crash-at", "3", "--on", "1", nodes=(0, 1)),
        replica(0, 2),
        num_nodes=3,
        max_restarts=0,
    )
    statuses, outputs = job.run()
    assert statuses == {1}, outputs
    error = (job.board / "first_error.txt").read_text()
    assert error.startswith("role trainer, node 1 (") and str(log_file(job.run_dir, "trainer", 1)) in error
    assert error.endswith("RuntimeError: tensor layer.3 is not finite\n")
    assert all(f"first error: {error.rstrip()}" in output for output in outputs), outputs
    assert nothing_is_left(job.run_dir)


def test_a_replica_that_dies_is_started_again_while_the_trainer_goes_on(tmp_path: Path):
    job = Job(tmp_path, trainer("5000"), replica(0, 1, "--die-after", "0.2", "--times", "2"), num_nodes=2)
    job.start(LAUNCH_RESTART_PAUSE_S="0.05")
    job.until(lambda: endpoint_file(job.run_dir, "rollout-0").exists())
    endpoint = json.loads(endpoint_file(job.run_dir, "rollout-0").read_text())
    assert endpoint["incarnation"] == "2"
    then = len(job.steps())
    job.until(lambda: len(job.steps()) > then + 2)
    os.kill(job.agents[0].pid, signal.SIGINT)
    statuses, outputs = job.wait()
    assert statuses == {130}, outputs
    log = job.log("rollout-0", 1)
    assert [f"incarnation {n}, node 1" in log for n in range(4)] == [True, True, True, False]
    assert job.log("trainer", 0).count("=== job") == 1


def test_the_last_replica_given_up_ends_the_job_with_its_error(tmp_path: Path):
    job = Job(tmp_path, trainer("5000"), replica(0, 1, "--die-after", "0"), num_nodes=2, max_restarts=0)
    statuses, outputs = job.run(LAUNCH_RESTART_PAUSE_S="0.05")
    assert statuses == {1}, outputs
    error = (job.board / "first_error.txt").read_text()
    assert error.startswith("role rollout-0, node 1 (") and error.endswith("no memory for the KV cache\n")
    assert job.log("rollout-0", 1).count("=== job") == 6


@pytest.mark.parametrize(("number", "status"), [(signal.SIGUSR1, 85), (signal.SIGTERM, 85), (signal.SIGINT, 130)])
def test_a_signal_saves_everywhere_and_the_next_attempt_goes_on(number, status, tmp_path: Path):
    job = Job(tmp_path, trainer("20", *HOLD, nodes=(0, 1)), replica(0, 2), num_nodes=3)
    job.start()
    job.until(lambda: "step 3" in job.log("trainer", 0) and "listens" in job.log("rollout-0", 2))
    os.kill(job.agents[2].pid, number)  # Slurm reaches every process of every node; one is enough
    statuses, outputs = job.wait()
    assert statuses == {status}, outputs
    stopped_at = json.loads((job.board / "stopped.json").read_text())["step"]
    if status == 85:
        (job.run_dir / "go").touch()
        statuses, outputs = job.run(attempt=1)
        assert statuses == {0}, outputs
        assert f"begins after step {stopped_at}" in job.log("trainer", 0)
        assert job.steps() == list(range(1, 21))


def test_programs_of_the_roles_outlive_the_warning_of_the_time_limit(tmp_path: Path):
    job = Job(tmp_path, trainer("20", *HOLD), replica(0, 0), num_nodes=1)
    job.start()
    job.until(lambda: "step 3" in job.log("trainer", 0) and "listens" in job.log("rollout-0", 0))
    for name in ("trainer", "rollout-0"):
        os.kill(json.loads((job.board / f"role-{name}.node0.json").read_text())["pid"], signal.SIGUSR1)
    (job.run_dir / "go").touch()
    statuses, outputs = job.wait()
    assert statuses == {0} and "restart" not in outputs[0], outputs


def test_a_trainer_that_does_not_listen_is_ended_at_its_deadline(tmp_path: Path):
    job = Job(tmp_path, trainer("5000", "--deaf"), num_nodes=1, save_signal_s=1)
    job.start()
    job.until(lambda: "step 3" in job.log("trainer", 0))
    os.kill(job.agents[0].pid, signal.SIGUSR1)
    statuses, outputs = job.wait()
    assert statuses == {85} and "did not reach the end of a step" in outputs[0], outputs
    assert nothing_is_left(job.run_dir)


def test_nodes_that_do_not_come_are_named(tmp_path: Path):
    job = Job(tmp_path, trainer("5", nodes=(0, 1)), replica(0, 2), num_nodes=3)
    job.start(nodes=(0, 2), LAUNCH_JOIN_DEADLINE_S="8")
    statuses, outputs = job.wait()
    assert statuses == {1}
    assert all("node(s) 1 of 3 did not come" in output and "here are 0 (" in output for output in outputs), outputs


def test_a_crash_loop_ends_with_its_first_error(tmp_path: Path):
    job = Job(tmp_path, trainer("9", "--crash-at", "4", "--on", "1", nodes=(0, 1)), num_nodes=2, max_restarts=9)
    statuses, outputs = job.run()
    assert statuses == {85} and "to be tried again" in outputs[0], outputs
    first = (job.board / "first_error.txt").read_text()
    statuses, outputs = job.run(attempt=1)
    assert statuses == {1} and all("crash loop" in output for output in outputs), outputs
    assert (job.board / "first_error.txt").read_text() == first
    statuses, outputs = job.run(attempt=2)  # somebody requeues it all the same
    assert statuses == {1} and all("tensor layer.4 is not finite" in output for output in outputs), outputs
    assert job.log("trainer", 0).count("=== job") == 2


def test_a_crash_after_a_new_checkpoint_is_no_loop(tmp_path: Path):
    job = Job(tmp_path, trainer("9", "--crash-at", "4", "--times", "3"), num_nodes=1, max_restarts=9)
    (job.run_dir / "checkpoints" / "step_00000002").mkdir(parents=True)
    assert job.run()[0] == {85}
    (job.run_dir / "checkpoints" / "step_00000003").mkdir()
    assert job.run(attempt=1)[0] == {85}
    assert job.run(attempt=2)[0] == {1}


def test_what_never_made_a_step_is_not_tried_again(tmp_path: Path):
    job = Job(
        tmp_path, Role(name="task", kind="command", nodes=(0,), command=("-c", "import nothing_like_it")), num_nodes=1
    )
    statuses, outputs = job.run()
    assert statuses == {1} and "no step was ever finished" in outputs[0], outputs
    assert "ModuleNotFoundError: No module named 'nothing_like_it'" in (job.board / "first_error.txt").read_text()


def test_attempts_are_bounded(tmp_path: Path):
    job = Job(tmp_path, trainer("3"), num_nodes=1, max_restarts=2)
    statuses, outputs = job.run(attempt=3)
    assert statuses == {1} and "max_restarts = 2" in outputs[0], outputs


def test_a_number_of_nodes_that_is_not_the_plans_is_refused(tmp_path: Path):
    job = Job(tmp_path, trainer("3"), num_nodes=1)
    statuses, outputs = job.run(LAUNCH_NODES="2")
    assert statuses == {2} and "has 2 nodes, and its plan is for 1" in outputs[0], outputs


STILL_RANK = Path(__file__).parents[2] / "helpers" / "still_rank.py"


@pytest.mark.parametrize("fault", ["stop", "regex"])
def test_a_rank_of_another_node_that_stands_still_is_the_first_error(fault, tmp_path: Path):
    command = (str(STILL_RANK), fault, "300")
    ranks = Role(name="trainer", kind="torchrun", nodes=(0, 1), command=command, processes_per_node=1)
    job = Job(tmp_path, ranks, num_nodes=2, max_restarts=0)
    statuses, outputs = job.run(STILL_SCALE="0.01", PYTHONPATH=str(ROOT))
    assert statuses == {1}, outputs
    error = (job.board / "first_error.txt").read_text()
    assert re.match(r"role trainer, node 1 \(.*\), rank 1, at .*\ntrainer rank 1 \(process \d+\) ", error), error
    assert "was stopped by a signal" in error if fault == "stop" else "has run one call without a pause" in error
    assert nothing_is_left(job.run_dir)


RANKS = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("rank", dist.get_rank(), "node", os.environ["LAUNCH_NODE"], "sum", int(total), flush=True)
dist.barrier()
if dist.get_rank() == 3:
    raise RuntimeError("tensor layer.3 is not finite")
time.sleep(300)
"""


def test_ranks_follow_the_order_of_the_roles_nodes_and_the_first_that_fails_is_named(tmp_path: Path):
    program = tmp_path / "ranks.py"
    program.write_text(RANKS)
    ranks = Role(name="trainer", kind="torchrun", nodes=(1, 0), command=(str(program),), processes_per_node=2)
    job = Job(tmp_path, ranks, num_nodes=2, max_restarts=0)
    statuses, outputs = job.run(LAUNCH_GRACE_S="10")
    assert statuses == {1}, outputs
    for node, first in ((1, 0), (0, 2)):
        for rank in (first, first + 1):
            assert f"[rank {rank}] rank {rank} node {node} sum 4\n" in job.log("trainer", node)
    error = (job.board / "first_error.txt").read_text()
    assert re.match(r"role trainer, node 0 \(.*\), rank 3, at ", error), error
    assert "RuntimeError: tensor layer.3 is not finite" in error and "[rank" not in error
    assert nothing_is_left(job.run_dir)


SENTENCE = """
import os, sys, time
import torch.distributed as dist
if os.environ["RANK"] == "3":
    print("python -m megatron_fp8rl: /data/train.jsonl: no such file", file=sys.stderr)
    sys.exit(2)
dist.init_process_group("gloo")
"""


def test_the_sentence_of_a_rank_without_a_traceback_is_the_first_error_of_all_nodes(tmp_path: Path):
    """The ranks of the other node fail later, with a traceback, because they cannot connect."""
    program = tmp_path / "ranks.py"
    program.write_text(SENTENCE)
    ranks = Role(name="trainer", kind="torchrun", nodes=(0, 1), command=(str(program),), processes_per_node=2)
    job = Job(tmp_path, ranks, num_nodes=2, max_restarts=0)
    statuses, outputs = job.run(LAUNCH_GRACE_S="3")
    assert statuses == {1}, outputs
    where, *error = (job.board / "first_error.txt").read_text().splitlines()
    assert re.match(r"role trainer, node 1 \(.*\), rank 3, at ", where), where
    assert error == ["python -m megatron_fp8rl: /data/train.jsonl: no such file"]


def test_an_error_whose_process_takes_its_time_to_end_is_still_the_first(tmp_path: Path):
    """The other node fails because of it, and is ready to end at once."""
    slow = (
        "import signal, sys, time, traceback; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "sys.stderr.write('Traceback (most recent call last):\\nRuntimeError: the cause\\n'); sys.stderr.flush(); "
        f"open({str(tmp_path / 'told')!r}, 'w').close(); time.sleep(2); sys.exit(1)"
    )
    quick = (
        f"import os, time\nwhile not os.path.exists({str(tmp_path / 'told')!r}): time.sleep(0.05)\n"
        "time.sleep(0.3)\nraise ConnectionError('a consequence')"
    )
    roles = [
        Role(name=f"task-{i}", kind="command", nodes=(i,), command=("-c", text)) for i, text in enumerate([quick, slow])
    ]
    job = Job(tmp_path, *roles, num_nodes=2, max_restarts=0)
    assert job.run()[0] == {1}
    where, *error = (job.board / "first_error.txt").read_text().splitlines()
    assert where.startswith("role task-1, node 1 (") and error[-1] == "RuntimeError: the cause"
