"""Failures of agents and roles: parts that die, full disks, and signals that come early or twice."""

import io
import json
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from launch import local, outcome
from launch.peers import Board, Place
from launch.spec import JobSpec, Role, endpoint_file, log_file
from megatron_fp8rl.runtime.stop import ChangeFlag
from tests.helpers.agents import FAKE, HOLD, Job, fake_processes, nothing_is_left, replica, trainer
from tests.helpers.launching import saved
from tests.helpers.processes import DEADLINE_S, until
from tests.helpers.role_processes import process_of

pytestmark = pytest.mark.slow


def spanning(*words: str, nodes: tuple[int, ...] = (1, 2)) -> Role:
    command = (FAKE, "serve", "--port", "{head_port}", "--parts", str(len(nodes)), *words)
    return Role(name="rollout-0", kind="replica", nodes=nodes, command=command, restart=True, essential=False)


def headers(job: Job, node: int) -> int:
    return job.log("rollout-0", node).count("=== job")


# ---- a replica on two nodes


@pytest.mark.parametrize("rank", [0, 1])
def test_all_parts_of_a_replica_begin_again_when_one_dies_and_meet_on_a_new_port(rank: int, tmp_path: Path):
    dies = ("--die-after", "0.3", "--on", str(rank), "--times", "2")
    job = Job(tmp_path, trainer("5000"), spanning(*dies), num_nodes=3)
    job.start(LAUNCH_RESTART_PAUSE_S="0.05")

    def ports() -> list[list[str]]:
        return [re.findall(r"port (\d+)", job.log("rollout-0", node)) for node in (1, 2)]

    job.until(lambda: headers(job, 1) == headers(job, 2) == 3 and [len(found) for found in ports()] == [3, 3])
    job.until(lambda: endpoint_file(job.run_dir, "rollout-0").exists())
    os.kill(job.agents[0].pid, signal.SIGINT)
    statuses, outputs = job.wait()
    assert statuses == {130}, outputs
    first, second = ports()
    assert first == second and len(set(first)) == 3, (first, second)
    assert "restart 2 of 5" in outputs[1 + rank] and "died" not in outputs[2 - rank]


def test_deaths_of_different_parts_add_up_and_all_parts_are_given_up(tmp_path: Path):
    """One node's part dies at every second start, the other's at the others: neither alone dies too often. Each dies
    once the other has begun, for a part that comes late passes a start over."""
    program = tmp_path / "dies_in_turn.py"
    program.write_text(
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "number, rank = int(os.environ['LAUNCH_INCARNATION']), int(os.environ['LAUNCH_ROLE_RANK'])\n"
        "Path(__file__).with_suffix(f'.{number}.{rank}').touch()\n"
        "if number % 2 == rank:\n"
        "    while not Path(__file__).with_suffix(f'.{number}.{1 - rank}').exists():\n"
        "        time.sleep(0.01)\n"
        "    sys.exit(7)\n"
        "time.sleep(1000)\n"
    )
    role = Role(name="rollout-0", kind="replica", nodes=(1, 2), command=(str(program),), restart=True, essential=False)
    job = Job(tmp_path, trainer("5000"), role, replica(1, 0), num_nodes=3)
    job.start(LAUNCH_RESTART_PAUSE_S="0.01")
    parts = [job.board / f"role-rollout-0.node{node}.json" for node in (1, 2)]
    job.until(lambda: all(part.exists() and "given up" in part.read_text() for part in parts))
    assert headers(job, 1) == headers(job, 2) == 6
    job.until(lambda: not any("dies_in_turn" in each for each in fake_processes(job.run_dir)))
    steps = len(job.steps())
    job.until(lambda: len(job.steps()) > steps + 2)  # with the other replica
    os.kill(job.agents[0].pid, signal.SIGINT)
    assert job.wait()[0] == {130}


# ---- signals


def test_a_cancellation_after_a_request_to_save_is_not_lost(tmp_path: Path):
    job = Job(tmp_path, trainer("5000", "--deaf"), num_nodes=1, save_signal_s=10)
    job.start()
    job.until(lambda: "step 3" in job.log("trainer", 0))
    os.kill(job.agents[0].pid, signal.SIGUSR1)
    job.until(lambda: (job.board / "stop.json").exists())
    os.kill(job.agents[0].pid, signal.SIGINT)
    statuses, outputs = job.wait()
    assert statuses == {130}, outputs


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 85), (signal.SIGINT, 130), (None, 130)])
def test_who_is_asked_to_end_before_all_are_there_has_not_failed(number: int | None, status: int, tmp_path: Path):
    job = Job(tmp_path, trainer("5", nodes=(0, 1)), num_nodes=2)
    job.start(nodes=(0,))
    job.agents = job.agents[:1]
    job.until(lambda: (job.board / "node-0.json").exists())
    if number is None:
        (job.board / "cancel").touch()  # as ``python -m launch cancel`` does
        ChangeFlag.mark(job.board)
    else:
        os.kill(job.agents[0].pid, number)
    statuses, outputs = job.wait()
    assert statuses == {status} and not (job.board / "first_error.txt").exists(), outputs


def test_a_signal_that_comes_while_agents_start_is_heard(tmp_path: Path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    spec = JobSpec(name="fake", run_dir=str(run_dir), roles=(trainer("5000"),), nodes=1, env={"FAKE_RUN": str(run_dir)})
    assert local._attempt(spec, saved(spec), "local-1", 0, [signal.SIGUSR1]) == 85
    assert "saved step" in log_file(run_dir, "trainer", 0).read_text()


# ---- what is left behind


def test_a_job_that_was_suspended_goes_on(tmp_path: Path):
    """As by `scontrol suspend`: a wait for signals that is stopped beyond its time ends as if a signal had come."""
    job = Job(tmp_path, trainer("100", nodes=(0, 1)), num_nodes=2)
    job.start(LAUNCH_SILENT_S="3")
    job.until(lambda: "step 3\n" in job.log("trainer", 1))
    for number, pause_s in ((signal.SIGSTOP, 5.0), (signal.SIGCONT, 0.5)):  # longer than the silence of a dead agent
        for agent in job.agents:
            agent.send_signal(number)
        time.sleep(pause_s)
    statuses, outputs = job.wait()
    assert statuses == {0}, outputs


@pytest.mark.parametrize("node", [0, 1])
def test_roles_end_with_their_agent_and_the_agents_of_other_nodes_end_the_attempt(node: int, tmp_path: Path):
    """The trainer is on both nodes, so it cannot save. The attempt is repeated, although no step was saved."""
    job = Job(tmp_path, trainer("5000", nodes=(0, 1)), replica(0, 1), num_nodes=2)
    job.start(LAUNCH_SILENT_S="3")
    job.until(lambda: "step 3\n" in job.log("trainer", 0) and "listens" in job.log("rollout-0", 1))
    of_all = len(fake_processes(job.run_dir))
    job.agents.pop(node).kill()
    until(lambda: len(fake_processes(job.run_dir)) < of_all, "the end of the roles", 10)
    statuses, outputs = job.wait()
    assert statuses == {85}, outputs
    error = (job.board / "first_error.txt").read_text()
    assert re.match(rf"role agent, node {node} \(.*\), at .*:\nthe agent of node {node} sent no heartbeat for", error)
    assert f"failed: the agent of node {node} sent no heartbeat" in outputs[1 - node], outputs
    assert nothing_is_left(job.run_dir)


def test_if_an_agent_beside_the_trainer_dies_the_trainer_saves(tmp_path: Path):
    job = Job(tmp_path, trainer("5000", nodes=(0, 1)), replica(0, 2), num_nodes=3)
    job.start(LAUNCH_SILENT_S="3")
    job.until(lambda: "step 3\n" in job.log("trainer", 1) and "listens" in job.log("rollout-0", 2))
    job.agents.pop(2).kill()
    statuses, outputs = job.wait()
    assert statuses == {85} and "saved step" in job.log("trainer", 0), outputs
    assert re.search(r"saved: stopped on request at step \d+.*; the agent of node 2 sent no heartbeat", outputs[0])
    job.start(attempt=1)
    job.until(lambda: len(job.steps()) > 0 and "listens" in job.log("rollout-0", 2).partition("attempt 1")[2])
    os.kill(job.agents[0].pid, signal.SIGINT)
    assert job.wait()[0] == {130} and nothing_is_left(job.run_dir)


def test_agents_that_die_again_and_again_end_the_job(tmp_path: Path):
    """Three times without a new checkpoint. The error that is shown is the first."""
    spec = JobSpec(name="fake", run_dir=str(tmp_path), roles=(trainer("5"),), nodes=2)
    ends = []
    for attempt in range(3):
        board = Board(tmp_path, Place(job="7", attempt=attempt, node=0, num_nodes=2, is_slurm=True))
        board.note_lost(1, 1.0, f"the agent of node 1 died, attempt {attempt}")
        ends.append(outcome.conclude(spec, board, "failed", "it died"))
    assert [end.status for end in ends] == [85, 85, 1] and "a crash loop" in ends[2].reason
    assert "died, attempt 0" in ends[2].error


def test_what_a_killed_agent_left_is_ended_by_the_next_attempt(tmp_path: Path):
    """A process that does not end with its parent, in a session of its own."""
    job = Job(tmp_path, trainer("5000"), replica(0, 1), num_nodes=2)
    job.start()
    job.until(lambda: "listens" in job.log("rollout-0", 1))
    environment = {**os.environ, "LAUNCH_OWNER": f"{job.board}/rollout-0/1"}
    left = subprocess.Popen(["sleep", "600"], env=environment, start_new_session=True)
    for agent in job.agents:
        agent.kill()
        agent.wait(DEADLINE_S)
    assert nothing_is_left(job.run_dir) and left.poll() is None
    job.start(attempt=1)
    job.until(lambda: job.log("rollout-0", 1).count("listens") == 2)
    assert left.wait(DEADLINE_S) == -signal.SIGKILL
    os.kill(job.agents[0].pid, signal.SIGINT)
    assert job.wait()[0] == {130}
    assert nothing_is_left(job.run_dir)


def test_what_a_killed_agent_of_this_machine_left_is_ended_with_its_attempt(tmp_path: Path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    roles = (trainer("5000"), replica(0, 0))
    spec = JobSpec(name="fake", run_dir=str(run_dir), roles=roles, nodes=1, env={"FAKE_RUN": str(run_dir)})
    statuses = []
    attempt = threading.Thread(target=lambda: statuses.append(local._attempt(spec, saved(spec), "local-1", 0, [])))
    attempt.start()
    until(endpoint_file(run_dir, "rollout-0").exists, "the replica")
    board = Board(run_dir, Place(job="local-1", attempt=0, node=0, num_nodes=1, is_slurm=False))
    os.kill(board.get("node-0.json")["pid"], signal.SIGKILL)
    attempt.join(DEADLINE_S)
    assert statuses == [85] and nothing_is_left(run_dir), "another attempt may begin"
    assert "the agent of node 0 was killed by signal SIGKILL" in (board.folder / "first_error.txt").read_text()


# ---- files


def test_a_verdict_whose_judge_was_killed_is_carried_out_by_the_next(tmp_path: Path):
    """outcome.json is there, and the batch script still waits for done."""
    spec = JobSpec(name="fake", run_dir=str(tmp_path), roles=(trainer("5"),), nodes=2)
    boards = [Board(tmp_path, Place(job="7", attempt=0, node=node, num_nodes=2, is_slurm=True)) for node in (0, 1)]
    boards[0].put("error-x.json", {"time": 1.0, "role": "trainer", "node": 0, "rank": None, "text": "why", "log": "l"})
    first = outcome.conclude(spec, boards[0], "failed", "it broke")
    for name in ("done", "first_error.txt"):
        (boards[0].folder / name).unlink()
    assert outcome.conclude(spec, boards[1], "done", "all is well") == first
    assert (boards[0].folder / "done").read_text() == "1\n"
    assert (boards[0].folder / "first_error.txt").read_text().endswith("why\n")


def test_a_file_system_that_is_away_for_a_moment_ends_nothing(tmp_path: Path):
    job = Job(tmp_path, trainer("20", *HOLD), replica(0, 1), num_nodes=2)
    job.start()
    job.until(lambda: "step 3" in job.log("trainer", 0) and "listens" in job.log("rollout-0", 1))
    away = job.board.with_name("away")
    job.board.rename(away)
    job.until(lambda: all("trying again" in output.read_text() for output in job.outputs))
    away.rename(job.board)
    (job.run_dir / "go").touch()
    statuses, outputs = job.wait()
    assert statuses == {0} and not any("Traceback" in output for output in outputs), outputs


def test_a_file_system_that_stays_away_ends_all_and_leaves_nothing(tmp_path: Path):
    job = Job(tmp_path, trainer("5000"), replica(0, 1), num_nodes=2)
    job.start(LAUNCH_FILES_DEADLINE_S="1")
    job.until(lambda: "step 3" in job.log("trainer", 0) and "listens" in job.log("rollout-0", 1))
    job.board.rename(job.board.with_name("away"))
    statuses, outputs = job.wait()
    assert 0 not in statuses and 85 not in statuses, outputs
    assert nothing_is_left(job.run_dir)


def test_output_is_read_on_when_the_disk_of_the_log_is_full(tmp_path: Path):
    process = process_of(tmp_path)
    process.log = Path("/dev/full")
    output = io.BytesIO(b"step 1\n" * 10000)
    process._listen(output)
    assert output.closed and process._tracebacks == []


def test_an_error_that_a_full_disk_has_swallowed_is_a_failure_all_the_same(tmp_path: Path):
    process = process_of(tmp_path)
    process.start()
    until(lambda: process.exit_status() is not None, "the end of the process")
    process._tracebacks = [(time.time(), 10_000)]  # beyond the end of the log
    assert "lost" in process.failure().text


def test_what_could_not_be_told_is_told_again(tmp_path: Path):
    process = process_of(tmp_path)
    process.report("running")
    folder = process._board.folder
    folder.rename(tmp_path / "away")
    with pytest.raises(OSError):
        process.report("ended", 0)
    assert process.state == "running"
    (tmp_path / "away").rename(folder)
    process.report("ended", 0)
    assert json.loads((folder / "ended-rollout-0.node0.json").read_text()) == {"status": 0}


# ---- the network


def test_gloo_is_told_the_interface_of_the_nodes_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert process_of(tmp_path)._environment()["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in process_of(tmp_path, num_nodes=1)._environment()
    assert process_of(tmp_path, GLOO_SOCKET_IFNAME="ib0")._environment()["GLOO_SOCKET_IFNAME"] == "ib0"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert process_of(tmp_path)._environment()["GLOO_SOCKET_IFNAME"] == "eth7"
