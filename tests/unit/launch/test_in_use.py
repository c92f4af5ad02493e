"""Two jobs in one run folder: the second is refused by every way to start it, and the first notices nothing."""

import dataclasses
import json
import os
import socket
import time
from pathlib import Path

import pytest

from launch import in_use, local, slurm
from launch.spec import JobSpec, Role, add_job, attempt_dir, endpoint_file, launch_dir
from megatron_fp8rl.commands import train
from megatron_fp8rl.data import folder_lock
from model_configs.tiny import tiny_qwen3
from tests.helpers.agents import HOLD, Job, nothing_is_left, replica, trainer
from tests.helpers.launching import saved
from tests.helpers.processes import holds, until

TRAINS = Role(name="trainer", kind="torchrun", nodes=(0,), command=("-m", "megatron_fp8rl", "train", "tiny_qwen3"))
EVALUATES = dataclasses.replace(TRAINS, command=("-m", "megatron_fp8rl", "eval", "tiny_qwen3"))


@pytest.fixture
def run_dir(tmp_path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def training(run_dir):
    """A process that trains in the run folder, as `train`, `grpo` and an own torchrun do."""
    with holds(run_dir) as process:
        yield process


def spec_of(run_dir: Path, role: Role = TRAINS) -> JobSpec:
    return JobSpec(name="second", run_dir=str(run_dir), roles=(role,), nodes=1, max_restarts=2)


@pytest.mark.slow
def test_a_second_job_ends_before_it_touches_files_of_the_first(tmp_path):
    first = Job(tmp_path, trainer("8", *HOLD), replica(0, 1), num_nodes=2)
    first.start()
    first.until(lambda: "begins" in first.log("trainer", 0) and "port" in first.log("rollout-0", 1))
    first.until(lambda: (first.run_dir / "metrics.jsonl").exists())  # a failed attempt would be tried again
    endpoint = endpoint_file(first.run_dir, "rollout-0")
    endpoint.parent.mkdir(exist_ok=True)
    endpoint.write_text("of the first job")
    logs = {path: path.read_text().count("=== job") for path in (first.run_dir / "logs").glob("*.log")}
    second = Job(tmp_path, trainer("8"), replica(0, 1), num_nodes=2)
    second.start(LAUNCH_JOB="local-2")
    statuses, outputs = second.wait()
    assert statuses == {1}, outputs
    expected = f"another run uses {first.run_dir}: process {first.agents[0].pid} on {socket.gethostname()}, since 20"
    assert expected in outputs[0] and "Traceback" not in "".join(outputs)
    board = attempt_dir(first.run_dir, "local-2", 0)
    assert json.loads((board / "outcome.json").read_text())["result"] == "refused"
    assert (board / "done").read_text() == "1\n" and expected in (board / "first_error.txt").read_text()
    assert endpoint.read_text() == "of the first job"
    assert {path: path.read_text().count("=== job") for path in logs} == logs, "no role of the second job has started"
    (first.run_dir / "go").touch()
    statuses, outputs = first.wait()
    assert statuses == {0}, outputs
    assert first.steps() == [*range(1, 9)] and nothing_is_left(first.run_dir)
    third = Job(tmp_path, trainer("10"), num_nodes=1)
    statuses, outputs = third.run(LAUNCH_JOB="local-3")
    assert statuses == {0}, outputs


@pytest.mark.slow
def test_of_two_jobs_that_start_at_once_one_runs(tmp_path):
    jobs = [Job(tmp_path, trainer("8", *HOLD), num_nodes=1) for _ in range(2)]
    for number, job in enumerate(jobs):
        job.start(LAUNCH_JOB=f"local-{number}")
        job.outputs[0] = job.outputs[0].rename(job.run_dir / f"job {number}.out")
    agents = [job.agents[0] for job in jobs]
    until(lambda: any(agent.poll() is not None for agent in agents), "one of two jobs to end")
    assert sorted(map(str, (agent.poll() for agent in agents))) == ["1", "None"]
    (jobs[0].run_dir / "go").touch()
    ends = [job.wait() for job in jobs]
    assert sorted(status for statuses, _ in ends for status in statuses) == [0, 1], ends
    assert jobs[0].steps() == [*range(1, 9)]


def test_a_job_is_refused_beside_a_run_that_no_job_started(run_dir, training):
    (sentence,) = in_use.problems(spec_of(run_dir), {})
    who = f"process {training.pid} on {socket.gethostname()}, since 20"
    assert f"another run uses {run_dir}: {who}" in sentence and sentence.endswith("choose another --output_dir.")
    assert in_use.problems(spec_of(run_dir), {"dependency": "singleton"}) == []
    assert in_use.problems(spec_of(run_dir, EVALUATES), {}) == [], "an evaluation writes to a folder of its own"
    assert local.supervise(spec_of(run_dir), saved(spec_of(run_dir))) == 1
    (board,) = (path for path in launch_dir(run_dir).glob("local-*") if path.is_dir())
    assert who in (board / "first_error.txt").read_text() and not (run_dir / "logs").exists()
    training.kill()
    training.wait()
    assert in_use.problems(spec_of(run_dir), {}) == []


@pytest.mark.parametrize("rank", [None, "0"])
def test_a_command_that_trains_is_refused_before_it_starts_ranks(run_dir, training, rank, monkeypatch, capsys):
    """``train``, ``grpo``, ``rl`` and ``sft``, by themselves and as rank 0 of an own torchrun."""
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    cfg = dataclasses.replace(tiny_qwen3(), output_dir=str(run_dir))
    cfg = dataclasses.replace(cfg, parallel=dataclasses.replace(cfg.parallel, world_size=2))
    assert train.start(cfg) == 2
    errors = capsys.readouterr().err
    assert f"--output_dir = '{run_dir}': another run uses it: process {training.pid} on " in errors
    assert len(errors.splitlines()) == 2


def agent_files(run_dir: Path, job_id: str, host: str, age_s: float = 0.0) -> None:
    folder = attempt_dir(run_dir, job_id, 0)
    folder.mkdir(parents=True)
    (folder / "node-0.json").write_text(json.dumps({"host": host, "address": "x", "port": 1, "pid": 1}))
    os.utime(folder / "node-0.json", (time.time() - age_s,) * 2)


@pytest.mark.parametrize(
    ("kind", "state", "host", "age_s", "expected"),
    [
        ("slurm", "PENDING", None, 0, "PENDING"),
        ("slurm", "SUSPENDED", None, 0, "SUSPENDED"),
        ("slurm", "COMPLETED", "elsewhere", 0, None),
        ("slurm", None, None, 0, None),
        ("slurm", None, "elsewhere", 2, "RUNNING"),  # Slurm does not answer, and the agents live
        ("slurm", None, "elsewhere", 600, None),
        ("local", None, "elsewhere", 2, "RUNNING"),  # a job of another machine
        ("local", None, "elsewhere", 600, None),
        ("local", None, socket.gethostname(), 2, None),  # it was killed a moment ago
    ],
)
def test_the_state_of_a_job_in_the_folder(run_dir, monkeypatch, kind, state, host, age_s, expected):
    monkeypatch.setattr(slurm, "job_state", {"local-999999999": state}.get)
    job = {"job_id": "local-999999999", "kind": kind, "cluster": "c", "spec": saved(spec_of(run_dir))}
    add_job(run_dir, job)
    if host is not None:
        agent_files(run_dir, job["job_id"], host, age_s)
    actual = in_use.problems(spec_of(run_dir), {})
    assert len(actual) == (expected is not None)
    if expected:
        assert f"job {job['job_id']} of cluster 'c' is {expected} in {run_dir}. Cancel it by" in actual[0]


def test_an_experiment_of_nemo_run_is_refused_beside_a_job_or_a_run(tmp_path, monkeypatch, training, run_dir):
    run = pytest.importorskip("nemo_run")
    from launch import nemo

    monkeypatch.setenv("NEMORUN_HOME", str(tmp_path / "nemo"))
    cfg = dataclasses.replace(tiny_qwen3(), output_dir=str(run_dir))
    executor = run.SlurmExecutor(account="research", partition="main", time="00:10:00")
    made = {"job": "sft", "ranks_per_node": 2, "run_root": str(tmp_path)}
    with pytest.raises(nemo.PlanError, match=f"another run uses {run_dir}: process {training.pid} on "):
        nemo.experiment(cfg, executor, **made)
    add_job(run_dir, {"job_id": "5", "kind": "slurm", "cluster": "c", "spec": "job.json"})
    monkeypatch.setattr(slurm, "job_state", {"5": "RUNNING"}.get)
    with pytest.raises(nemo.PlanError, match=r"job 5 of cluster 'c' is RUNNING in .*choose another --output_dir"):
        nemo.experiment(cfg, executor, **made)
    assert sorted(path.name for path in launch_dir(run_dir).iterdir()) == ["jobs.jsonl"], "nothing was written"


def test_a_dead_job_on_another_node_does_not_block_the_folder(run_dir, monkeypatch):
    monkeypatch.setattr(folder_lock, "SILENT_S", 1.0)
    run_dir.mkdir()
    (run_dir / "run.lock").write_text(json.dumps({"host": "elsewhere", "pid": "7", "job": "12"}))
    assert in_use.problems(spec_of(run_dir), {}) == []
    launch_dir(run_dir).mkdir()
    (launch_dir(run_dir) / "job.lock").write_text(json.dumps({"host": "elsewhere", "pid": "7", "job": "12"}))
    with in_use.claimed(spec_of(run_dir), on_loss=lambda: None):
        assert json.loads((launch_dir(run_dir) / "job.lock").read_text())["pid"] == str(os.getpid())
