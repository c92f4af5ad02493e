"""``status``, ``logs`` and ``cancel`` of runs on this machine, with small programs for the roles, and of a made-up Slurm."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import cli, local
from launch.peers import Board, Place
from launch.spec import JobSpec, Role, add_job, attempt_dir, log_file

FAKE = str(Path(__file__).with_name("fake_role.py"))
DEADLINE_S = 40.0


def job(run_dir: Path, *words: str, **how: int) -> JobSpec:
    roles = (
        Role(name="trainer", kind="command", nodes=(0,), command=(FAKE, "train", *words)),
        Role(name="rollout-0", kind="replica", nodes=(1,), command=(FAKE, "serve"), restart=True, essential=False),
    )
    run_dir.mkdir(exist_ok=True)
    return JobSpec(name="fake", run_dir=str(run_dir), roles=roles, nodes=2, env={"FAKE_RUN": str(run_dir)}, **how)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_run_under_way_is_shown_and_can_be_cancelled(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run_dir = tmp_path / "my run"
    job_id, process = local.start(job(run_dir, "5000"), cluster_name="here")
    until(lambda: (run_dir / "metrics.jsonl").exists() and log_file(run_dir, "rollout-0", 1).exists())
    until(lambda: "listens" in log_file(run_dir, "rollout-0", 1).read_text())
    assert cli.main(["status", str(run_dir)]) == 0
    shown = capsys.readouterr().out
    assert f"{job_id} on here: RUNNING, 2 node(s)" in shown and "attempt 0: under way" in shown
    assert "trainer     node 0 (" in shown and "rollout-0   node 1 (" in shown and shown.count(": running") == 2
    assert "0.1 s per step" in shown and ", reward " in shown and "report.html (not written yet" in shown

    assert cli.main(["logs", str(run_dir), "--role", "rollout-0"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["listens"]

    assert cli.main(["cancel", str(run_dir)]) == 0
    assert process.wait(DEADLINE_S) == 130
    capsys.readouterr()
    assert cli.main(["status", str(run_dir)]) == 1
    shown = capsys.readouterr().out
    assert f"{job_id} on here: CANCELLED" in shown and "checkpoint  step_" in shown and "attempt 1" not in shown
    assert cli.main(["cancel", str(run_dir)]) == 0
    assert "nothing runs" in capsys.readouterr().out


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
    _, process = local.start(job(run_dir, "12"), cluster_name="here")
    follow = subprocess.run(
        [sys.executable, "-m", "launch", "logs", str(run_dir), "--follow"],
        cwd=Path(__file__).resolve().parents[3], capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    assert process.wait(DEADLINE_S) == 0
    lines = follow.stdout.splitlines()
    assert any(line.endswith("has finished") for line in lines) and any(line.endswith("listens") for line in lines)
    assert lines[-1].endswith(": COMPLETED")
    assert [line for line in lines if line.startswith("[trainer.node0] step ")] or "step 12" in follow.stdout


def test_lines_of_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run_dir = tmp_path / "run"
    spec = job(run_dir, "1")
    add_job(run_dir, {"job_id": "local-0", "cluster": "here", "kind": "local", "name": "x", "nodes": 2,
                      "submitted_at": 0.0, "experiment": "", "script": "", "spec": spec.encode()})  # fmt: skip
    for node, text in ((0, "=== attempt 0 ===\n[rank 0] a\n[rank 1] b\n[rank 0] c\n"), (1, "[rank 2] d\n")):
        log_file(run_dir, "trainer", node).parent.mkdir(exist_ok=True)
        log_file(run_dir, "trainer", node).write_text(text)
    assert cli.main(["logs", str(run_dir), "--rank", "0", "--node", "0"]) == 0
    assert capsys.readouterr().out.splitlines() == ["=== attempt 0 ===", "a", "c"]
    assert cli.main(["logs", str(run_dir), "--role", "reward"]) == 2
    assert "There are: trainer.node0, trainer.node1" in capsys.readouterr().err


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
        add_job(run_dir, {"job_id": job_id, "cluster": "big", "kind": "slurm", "name": "x", "nodes": 2,
                          "submitted_at": 0.0, "experiment": "", "script": "", "spec": spec.encode()})  # fmt: skip
    board = Board(run_dir, Place(job="41", attempt=0, node=0, num_nodes=2, is_slurm=True))
    board.put("node-0.json", {"host": "n0", "address": "10.0.0.1", "port": 1, "pid": 1})
    board.put("role-trainer.node0.json", {"state": "running", "pid": 2, "incarnation": 0, "status": None})
    assert cli.main(["status", str(run_dir)]) == 0
    shown = capsys.readouterr().out
    assert "41 on big: RUNNING" in shown and "trainer     node 0 (n0): running" in shown
    assert cli.main(["cancel", str(run_dir)]) == 0
    assert (tmp_path / "cancelled").read_text().split() == ["41", "42"]
    assert (attempt_dir(run_dir, "41", 0) / "cancel").exists()


def test_what_is_no_run_is_refused_with_a_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["status", str(tmp_path / "nowhere")]) == 2
    assert "Give the output_dir of the run" in capsys.readouterr().err
    assert cli.main(["logs", str(tmp_path)]) == 2
    assert "was not launched" in capsys.readouterr().err
