"""``status``, ``logs`` and ``cancel`` of runs on this machine, with small programs for roles, and of a fake Slurm."""

import os
import re
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from launch import cli, local, watch
from launch.outcome import Outcome
from launch.peers import Board, Place
from launch.spec import JobSpec, Role, add_job, attempt_dir, log_file
from tests.helpers.launching import saved
from tests.helpers.processes import DEADLINE_S, until

FAKE = str(Path(__file__).resolve().parents[2] / "helpers" / "fake_role.py")
ROOT = Path(__file__).resolve().parents[3]


def job(run_dir: Path, *args: str, **options: int) -> JobSpec:
    roles = (
        Role(name="trainer", kind="command", nodes=(0,), command=(FAKE, "train", *args)),
        Role(name="rollout-0", kind="replica", nodes=(1,), command=(FAKE, "serve"), restart=True, essential=False),
    )
    run_dir.mkdir(exist_ok=True)
    return JobSpec(name="fake", run_dir=str(run_dir), roles=roles, nodes=2, env={"FAKE_RUN": str(run_dir)}, **options)


def record(run_dir: Path, spec: JobSpec, job_id: str, cluster: str, kind: str) -> None:
    job = {"job_id": job_id, "cluster": cluster, "kind": kind, "name": "x", "nodes": 2, "submitted_at": 0.0}
    add_job(run_dir, job | {"script": "", "spec": saved(spec)})


def test_a_run_under_way_is_shown_and_can_be_cancelled(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run_dir = tmp_path / "my run"
    job_id, process = local.start(job(run_dir, "5000"), cluster_name="here")
    until(lambda: (run_dir / "metrics.jsonl").exists() and log_file(run_dir, "rollout-0", 1).exists(), "both roles")
    until(lambda: "listens" in log_file(run_dir, "rollout-0", 1).read_text(), "the replica")
    assert cli.main(["status", str(run_dir)]) == 0
    shown = capsys.readouterr().out
    assert f"{job_id} on here: RUNNING, 2 node(s)" in shown and "attempt 0: in progress" in shown
    assert "trainer     node 0 (" in shown and "rollout-0   node 1 (" in shown and shown.count(": running") == 2
    assert "0.1 s per step" in shown and ", reward " in shown and "report.html (not written yet" in shown

    assert cli.main(["logs", str(run_dir), "--role", "rollout-0"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "listens"

    assert cli.main(["cancel", str(run_dir)]) == 0
    said = capsys.readouterr().out
    assert f"job {job_id} is asked to save and to end; it was RUNNING" in said
    assert f"job {job_id}: CANCELLED (stopped on request at step " in said, said
    assert process.wait(DEADLINE_S) == 130
    assert cli.main(["status", str(run_dir)]) == 1
    shown = capsys.readouterr().out
    assert f"{job_id} on here: CANCELLED" in shown and "checkpoint  step_" in shown and "attempt 1" not in shown
    assert cli.main(["cancel", str(run_dir)]) == 0
    assert "no job runs or waits" in capsys.readouterr().out


def test_a_failed_run_shows_its_first_error_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run_dir = tmp_path / "run"
    _, process = local.start(job(run_dir, "50", "--crash-at", "2", max_restarts=3), cluster_name="here")
    assert process.wait(DEADLINE_S) == 1
    assert cli.main(["logs", str(run_dir)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("=== first error, from ")
    assert shown.index("RuntimeError: tensor layer.2 is not finite") < shown.index("=== trainer.node0: ")
    assert cli.main(["status", str(run_dir)]) == 1
    shown = capsys.readouterr().out
    assert "FAILED" in shown and "attempt 0: failed" in shown and "a crash loop" in shown and "attempt 2" not in shown
    assert "RuntimeError: tensor layer.2 is not finite" in shown


def test_following_ends_with_the_job_and_says_whose_each_line_is(tmp_path: Path):
    run_dir = tmp_path / "run"
    words = ("12", "--hold-at", "5", "--for", "replicas/rollout-0.json")
    _, process = local.start(job(run_dir, *words), cluster_name="here")
    follow = subprocess.run(
        [sys.executable, "-m", "launch", "logs", str(run_dir), "--follow"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert process.wait(DEADLINE_S) == 0
    lines = follow.stdout.splitlines()
    assert any(line.endswith("has finished") for line in lines) and any(line.endswith("listens") for line in lines)
    assert lines[-1].endswith(": COMPLETED")
    assert [line for line in lines if line.startswith("[trainer.node0] step ")] or "step 12" in follow.stdout


def test_lines_of_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run_dir = tmp_path / "run"
    record(run_dir, job(run_dir, "1"), "local-0", "here", "local")
    for node, text in ((0, "=== attempt 0 ===\n[rank 0] a\n[rank 1] b\n[rank 0] c\n"), (1, "[rank 2] d\n")):
        log_file(run_dir, "trainer", node).parent.mkdir(exist_ok=True)
        log_file(run_dir, "trainer", node).write_text(text)
    assert cli.main(["logs", str(run_dir), "--rank", "0", "--node", "0"]) == 0
    assert capsys.readouterr().out.splitlines() == ["=== attempt 0 ===", "a", "c"]
    assert cli.main(["logs", str(run_dir), "--role", "reward"]) == 2
    assert "Logs: trainer.node0, trainer.node1" in capsys.readouterr().err


def test_slurm_is_asked_for_the_state_and_to_cancel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "scontrol").write_text('#!/bin/sh\necho "JobId=$5 JobState=RUNNING Reason=None"\n')
    (tools / "scancel").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/cancelled\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    run_dir = tmp_path / "run"
    spec = job(run_dir, "1")
    for job_id in ("41", "42"):
        record(run_dir, spec, job_id, "big", "slurm")
    board = Board(run_dir, Place(job="41", attempt=0, node=0, num_nodes=2, is_slurm=True))
    board.put("node-0.json", {"host": "n0", "address": "10.0.0.1", "port": 1, "pid": 1})
    board.put("role-trainer.node0.json", {"state": "running", "pid": 2, "incarnation": 0, "status": None})
    assert cli.main(["status", str(run_dir)]) == 0
    shown = capsys.readouterr().out
    assert "41 on big: RUNNING" in shown and "trainer     node 0 (n0): running" in shown
    assert cli.main(["cancel", str(run_dir), "--now"]) == 0
    assert (tmp_path / "cancelled").read_text().split() == ["42", "41"], "those that wait for another first"
    assert (attempt_dir(run_dir, "41", 0) / "cancel").exists()


@pytest.fixture
def without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No program of Slurm on the PATH."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def slurm_job(run_dir: Path, **options: int) -> Board:
    """Job 41 of Slurm, running on one node."""
    record(run_dir, job(run_dir, "1", **options), "41", "big", "slurm")
    board = Board(run_dir, Place(job="41", attempt=0, node=0, num_nodes=1, is_slurm=True))
    board.put("node-0.json", {"host": "n0", "address": "10.0.0.1", "port": 1, "pid": 1})
    return board


def end(board: Board, run_dir: Path, result: str, status: int) -> None:
    outcome = Outcome(attempt=0, result=result, status=status, reason="it ended", checkpoint="")
    board.put("outcome.json", asdict(outcome))


@pytest.mark.parametrize(
    ("result", "status", "state", "exit_status"),
    [
        ("done", 0, "COMPLETED", 0),
        ("cancelled", 130, "CANCELLED", 1),
        ("failed", 1, "FAILED", 1),
        ("saved", 85, "UNKNOWN", 0),
    ],
)
def test_where_slurm_is_missing_the_files_of_a_job_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], without_slurm: None, result, status, state, exit_status
):
    run_dir = tmp_path / "run"
    board = slurm_job(run_dir)
    assert cli.main(["status", str(run_dir)]) == 0
    shown = capsys.readouterr().out
    assert "41 on big: RUNNING" in shown and "; last heartbeat of an agent" in shown
    node = board.folder / "node-0.json"
    os.utime(node, (time.time() - 100, time.time() - 100))
    assert cli.main(["status", str(run_dir)]) == 0
    shown = capsys.readouterr().out
    assert "41 on big: UNKNOWN" in shown and re.search(r"no heartbeat of an agent for 1\d\d s", shown)
    end(board, run_dir, result, status)
    assert cli.main(["status", str(run_dir)]) == exit_status
    assert f"41 on big: {state}" in capsys.readouterr().out


def test_a_job_that_does_not_save_in_its_time_is_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], without_slurm: None, monkeypatch: pytest.MonkeyPatch
):
    run_dir = tmp_path / "run"
    slurm_job(run_dir, save_signal_s=1)
    for name, value in (("_CANCEL_END_S", 2.0), ("_CANCEL_POLL_S", 0.1), ("_CANCEL_REPORT_S", 0.2)):
        monkeypatch.setattr(watch, name, value)
    tool = tmp_path / "bin" / "scancel"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/cancelled\n')
    tool.chmod(0o755)
    assert cli.main(["cancel", str(run_dir)]) == 0
    said = capsys.readouterr().out
    assert "is saving or ending, for at most" in said and "job 41 has not ended within" in said
    assert (tmp_path / "cancelled").read_text() == "41\n"


def test_an_interrupt_leaves_the_request_standing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], without_slurm: None, monkeypatch: pytest.MonkeyPatch
):
    run_dir = tmp_path / "run"
    board = slurm_job(run_dir)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", interrupt)
    assert cli.main(["cancel", str(run_dir)]) == 0
    assert watch.NOT_WAITING in capsys.readouterr().out and (board.folder / "cancel").exists()
    # Where there is no scancel, that is said, and the request stands too.
    os.utime(board.folder / "node-0.json", (0, 0))
    assert cli.main(["cancel", str(run_dir), "--now"]) == 2
    assert "job 41 cannot be ended from here" in capsys.readouterr().err


def test_a_cluster_says_where_a_name_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run_dir = tmp_path / "root" / "runs" / "mine"
    run_dir.parent.mkdir(parents=True)
    _, process = local.start(job(run_dir, "1"), cluster_name="here")
    assert process.wait(DEADLINE_S) == 0
    file = tmp_path / "here.py"
    file.write_text(
        "from launch.cluster import Cluster\n"
        f"CLUSTER = Cluster(kind='local', gpu=None, gpus_per_node=0, ranks_per_node=1,\n"
        f"    run_root={str(tmp_path / 'root')!r})\n"
    )
    assert cli.main(["status", "mine", "--cluster", str(file)]) == 0
    assert "COMPLETED" in capsys.readouterr().out
    assert cli.main(["status", "yours", "--cluster", str(file)]) == 2
    assert "runs/: mine" in capsys.readouterr().err
    assert cli.main(["status", "mine", "--cluster", "no_such_cluster"]) == 2
    assert "unknown cluster" in capsys.readouterr().err


def test_looking_after_a_run_needs_no_third_party_module():
    """A login node's Python has none, and is older than what the roles run in: configurations need Python 3.12."""
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import launch.watch; print(*sys.modules)"
    words = [sys.executable, "-I", "-S", "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    assert not {"megatron_fp8rl.config", "launch.cluster"} & set(done.stdout.split())


def test_what_is_no_run_is_refused_with_a_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["status", str(tmp_path / "nowhere")]) == 2
    assert "Give the output_dir of the run" in capsys.readouterr().err
    assert cli.main(["logs", str(tmp_path)]) == 2
    assert "was not launched" in capsys.readouterr().err
