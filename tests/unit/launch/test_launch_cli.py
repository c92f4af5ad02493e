"""The command line of the launcher: one command, every mistake at once, and an exit status that tells the truth."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch import cli, local, slurm
from launch.cluster import Cluster
from launch.slurm import SubmitError
from launch.spec import JobSpec, Role, add_job, read_jobs
from megatron_fp8rl.preflight.findings import Finding
from tests.helpers.launching import saved

CPU = "CLUSTER = Cluster(gpu=None, gpus_per_node=0, ranks_per_node=4, run_root={root!r}, time_limit='10:00'{more})\n"
LOCAL = (
    "from launch.cluster import Cluster\nCLUSTER = Cluster(kind='local', gpu=None, gpus_per_node=0, ranks_per_node=4"
)


@pytest.fixture
def cluster_file(tmp_path):
    """Writes a file of a cluster whose runs are below the test's folder; returns its path, which has odd marks."""

    def write(more: str = "") -> str:
        path = tmp_path / "it's my cluster.py"
        (tmp_path / "the runs").mkdir(exist_ok=True)
        text = "from launch.cluster import Cluster\n" + CPU.format(root=str(tmp_path / "the runs"), more=more)
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def submitted(monkeypatch):
    """What would have been queued; nothing is."""
    calls: list[tuple[JobSpec, dict]] = []

    def submit(spec, cluster, **how) -> str:
        calls.append((spec, how))
        return str(6 + len(calls))

    monkeypatch.setattr(slurm, "submit", submit)
    return calls


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tiny_qwen3_moe"], "--cluster is missing"),
        (["tiny_qwen3_moe", "--cluster", "pyxsi"], "did you mean pyxis"),
        (["tiny_qwen3_mo", "--cluster", "local"], "tiny_qwen3_moe"),
        (["--cluster", "local"], "CONFIG is missing"),
        (["tiny_qwen3_moe", "--cluster", "local", "--job", "trian"], "--job 'trian' is unknown"),
        (["tiny_qwen3_moe", "--cluster", "local", "--nodes", "two"], "--nodes 'two' is not a number"),
        (["tiny_qwen3_moe", "--cluster"], "--cluster needs a value"),
        (["tiny_qwen3_moe", "--cluster", "local", "--id", "a b"], "--id 'a b'"),
        (["tiny_qwen3_moe", "--cluster", "local", "--over", "seed"], "name a field and its values"),
        (["tiny_qwen3_moe", "--cluster", "local", "--over", "seed", "1", "--over", "seed", "2"], "occurs twice"),
        (["tiny_qwen3_moe", "--cluster", "local", "--job", "study", "--over", "seed", "1"], "cannot be swept"),
    ],
)
def test_a_mistake_in_the_words_is_status_2(words, said, capsys, submitted):
    assert cli.main(words) == 2
    assert said in capsys.readouterr().err and not submitted


def test_an_unknown_field_is_refused(submitted, cluster_file, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["tiny_qwen3_moe", "--cluster", cluster_file(), "--parallel.tensr", "2"])
    assert caught.value.code == 2 and "tensr" in capsys.readouterr().err and not submitted


def test_help_is_status_0_and_no_words_are_a_mistake(capsys):
    assert cli.main(["--help"]) == 0
    assert "--cluster NAME" in capsys.readouterr().out
    assert cli.main([]) == 2


def test_every_problem_is_shown_and_nothing_is_queued(submitted, cluster_file, capsys):
    words = ["--parallel.tensor", "3", "--algo.clip_low", "-1", "--nodes", "9"]
    assert cli.main(["tiny_qwen3_moe", "--cluster", cluster_file(", max_restarts=-1"), *words]) == 2
    text = capsys.readouterr().err
    for part in ("--parallel.tensor = 3", "--algo.clip_low = -1", "CLUSTER.max_restarts = -1", "nothing is queued"):
        assert part in text
    assert not submitted


def test_a_run_is_submitted_with_where_to_look(submitted, cluster_file, capsys, tmp_path):
    path = cluster_file()
    assert cli.main(["tiny_qwen3_moe", "--cluster", path, "--num_steps", "3", "--id", "abc"]) == 0
    [(spec, how)] = submitted
    assert spec.run_dir == str(tmp_path / "the runs" / "runs" / "tiny_qwen3_moe")
    assert how == {"cluster_name": path, "id": "tiny-qwen3-moe_abc"}
    assert "--num_steps" in spec.role("trainer").command
    out = capsys.readouterr().out
    assert "job 7 is queued" in out and f"{spec.run_dir}/report.html" in out and "launch cancel" in out


@pytest.mark.slow
@pytest.mark.parametrize(("states", "status"), [({"7": "COMPLETED"}, 0), ({"7": "FAILED"}, 1), ({"7": "TIMEOUT"}, 1)])
def test_waiting_tells_the_truth(submitted, cluster_file, capsys, monkeypatch, tmp_path, states, status):
    monkeypatch.setattr(slurm, "job_state", states.get)
    error = tmp_path / "the runs" / "runs" / "tiny_qwen3_moe" / "launch" / "7.0" / "first_error.txt"
    error.parent.mkdir(parents=True)
    error.write_text("role trainer, node 0: out of memory\n")
    assert cli.main(["tiny_qwen3_moe", "--cluster", cluster_file(), "--wait"]) == status
    said = capsys.readouterr()
    assert f"job 7: {states['7']}" in said.out
    assert ("out of memory" in said.err) == bool(status)


def test_a_refusal_of_slurm_is_status_2(cluster_file, capsys, monkeypatch):
    def refuse(*_, **__):
        raise SubmitError("Slurm refused the job: invalid partition")

    monkeypatch.setattr(slurm, "submit", refuse)
    assert cli.main(["tiny_qwen3_moe", "--cluster", cluster_file()]) == 2
    assert "invalid partition" in capsys.readouterr().err


def test_a_machine_without_slurm_is_told(cluster_file, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert cli.main(["tiny_qwen3_moe", "--cluster", cluster_file()]) == 2
    assert "no sbatch" in capsys.readouterr().err


@pytest.mark.slow
def test_a_folder_where_a_job_runs_is_refused(submitted, cluster_file, capsys, monkeypatch, tmp_path):
    run_dir = tmp_path / "the runs" / "runs" / "tiny_qwen3_moe"
    role = Role(name="trainer", kind="torchrun", nodes=(0,), command=())
    word = saved(JobSpec(name="x", run_dir=str(run_dir), roles=(role,), nodes=1))
    add_job(run_dir, {"job_id": "5", "kind": "slurm", "cluster": "c", "spec": word})
    monkeypatch.setattr(slurm, "job_state", {"5": "PENDING"}.get)
    assert cli.main(["tiny_qwen3_moe", "--cluster", cluster_file()]) == 2
    assert "job 5 of cluster 'c' is PENDING" in capsys.readouterr().err and not submitted
    monkeypatch.setattr(slurm, "job_state", {"5": "CANCELLED"}.get)
    assert cli.main(["tiny_qwen3_moe", "--cluster", cluster_file()]) == 0


def test_a_local_dry_run_shows_roles_and_starts_nothing(capsys, tmp_path):
    words = ["--output_dir", str(tmp_path / "a b"), "--nodes", "3", "--engine.placement", "separate"]
    words += ["--weight_sync.transport", "gloo", "--parallel.world_size", "2", "--parallel.expert", "2"]
    cluster = tmp_path / "here.py"
    cluster.write_text(LOCAL + ")\n")
    assert cli.main(["tiny_qwen3_moe", "--cluster", str(cluster), "--dry-run", *words]) == 0
    out = capsys.readouterr().out
    assert "trainer (torchrun): nodes 0-1, 1 ranks on each" in out and "3 agents on this machine" in out
    assert "rollout-0 (replica): node 2, restarted when it dies" in out
    assert not (tmp_path / "a b").exists()


def test_what_is_shown_cannot_leave_its_comment(capsys, tmp_path):
    cluster = tmp_path / "here.py"
    cluster.write_text(LOCAL + ", env={'A': 'x\\nrm -rf y'})\n")
    assert cli.main(["tiny_qwen3_moe", "--cluster", str(cluster), "--dry-run"]) == 0
    assert all(line.startswith("#") for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        ("sbatch: error: Invalid account or account/partition combination specified", "CLUSTER.account = 'acc'"),
        ("sbatch: error: invalid partition specified: p", "CLUSTER.partition = 'p'"),
        ("sbatch: error: Batch job submission failed: Requested time limit is invalid", "CLUSTER.time_limit"),
        ("sbatch: error: Invalid generic resource (gres) specification", "CLUSTER.gpus_per_node"),
        ("sbatch: error: Batch job submission failed: Invalid qos specification", "CLUSTER.sbatch['qos']"),
        (
            "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's "
            "size and/or time limits)",
            "a limit of the QOS or account is reached",
        ),
        ("sbatch: error: Memory specification can not be satisfied", "CLUSTER.sbatch['mem']"),
        ("sbatch: error: CPU count per node can not be satisfied", "CLUSTER.cpus_per_node"),
        ("sbatch: error: Batch job submission failed: Node count specification invalid", "--nodes"),
        ("sbatch: error: Batch job submission failed: Requested node configuration is not available", "--nodes"),
        ("sbatch: error: Batch job submission failed: Invalid feature specification", "CLUSTER.sbatch['constraint']"),
        ("sbatch: unrecognized option '--nice-day'\nsbatch: error: Try", "CLUSTER.sbatch: `sbatch --help`"),
        (
            "sbatch: error: Batch job submission failed: Requested reservation is invalid",
            "CLUSTER.sbatch['reservation']",
        ),
    ],
)
def test_what_slurm_says_leads_to_the_field(stderr, said):
    text = slurm._submit_error_text(f"some warning\n{stderr}\n", Cluster(account="acc", partition="p"))
    assert said in text and "some warning" not in text
    assert len(text.splitlines()) == 2, "one hint, for the cause that Slurm names"


@pytest.mark.parametrize(
    ("shown", "accounted", "state"),
    [
        ("JobId=1 JobState=RUNNING Reason=None", None, "RUNNING"),
        (None, "COMPLETED\n", "COMPLETED"),
        (None, "CANCELLED by 0\n", "CANCELLED"),
        (None, None, None),
    ],
)
def test_the_state_of_a_job_with_and_without_accounting(monkeypatch, shown, accounted, state):
    monkeypatch.setattr(slurm, "slurm_output", lambda *words: shown if words[0] == "scontrol" else accounted)
    assert slurm.job_state("1") == state


def test_waiting_for_a_silent_slurm_ends(monkeypatch):
    monkeypatch.setattr(slurm, "job_state", lambda _: None)
    monkeypatch.setattr(slurm, "_SILENCE_S", 0.05)
    with pytest.raises(SubmitError, match="no answer from Slurm about job 7"):
        slurm.wait(["7"], poll_s=0.01)


@pytest.mark.parametrize(("reason", "is_refused"), [("PartitionTimeLimit", True), ("BadConstraints", False)])
def test_a_job_that_can_never_start_is_refused_and_a_drained_node_is_a_warning(monkeypatch, capsys, reason, is_refused):
    monkeypatch.setattr(slurm, "slurm_output", lambda *words: f"{reason}\n")
    monkeypatch.setattr(slurm, "_REASON_S", 0)
    if is_refused:
        with pytest.raises(SubmitError, match=r"PartitionTimeLimit.*CLUSTER.time_limit"):
            slurm._reject_impossible("7", "c")
    else:
        slurm._reject_impossible("7", "c")
        assert "warning: job 7 waits (BadConstraints)" in capsys.readouterr().err


@pytest.mark.slow
def test_jobs_that_slurm_keeps_apart_may_share_a_folder(submitted, cluster_file, monkeypatch):
    """``singleton``: for clusters that do not requeue, the same command several times."""
    monkeypatch.setattr(slurm, "job_state", lambda job_id: "PENDING")
    path = cluster_file(", sbatch={'dependency': 'singleton'}")
    for _ in range(3):
        assert cli.main(["tiny_qwen3_moe", "--cluster", path]) == 0
    assert len(submitted) == 3 and "#SBATCH --dependency=singleton" in slurm.dry_run(submitted[0][0], cluster_of(path))


def cluster_of(path: str) -> Cluster:
    from launch import cluster

    return cluster.load(path)


def test_the_copied_code_is_whole_and_stays(tmp_path):
    slurm.copy_code(tmp_path / "a b")
    program = "import launch.cli, megatron_fp8rl.cli, model_configs; print(launch.cli.__file__)"
    environment = {**os.environ, "PYTHONPATH": ""}
    assert not list(tmp_path.rglob("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path / "a b",
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip() == str(tmp_path / "a b" / "launch" / "cli.py"), done.stderr


def local_job(tmp_path, code: str, *, max_restarts: int = 2, nodes: int = 1) -> JobSpec:
    role = Role(name="task", kind="command", nodes=tuple(range(nodes)), command=("-c", code))
    env = {"ODD": 'it\'s "x" $HOME\nb', "COUNT": str(tmp_path / "count")}
    return JobSpec(
        name="x y", run_dir=str(tmp_path / "a 'run'"), roles=(role,), nodes=nodes, max_restarts=max_restarts, env=env
    )


def run_locally(spec: JobSpec) -> tuple[int, str]:
    job_id, process = local.start(spec, cluster_name="here")
    return process.wait(timeout=300), job_id


def test_a_local_job_runs_its_roles_on_every_node(tmp_path):
    code = "import os; open(os.environ['COUNT'] + os.environ['LAUNCH_NODE'], 'w').write(os.environ['ODD'])"
    spec = local_job(tmp_path, code, nodes=2)
    status, job_id = run_locally(spec)
    assert status == 0
    assert [(tmp_path / f"count{node}").read_text() for node in (0, 1)] == ['it\'s "x" $HOME\nb'] * 2
    [job] = read_jobs(spec.run_dir)
    assert (job["job_id"], job["kind"], job["cluster"]) == (job_id, "local", "here")
    assert JobSpec.load(job["spec"]) == spec and json.dumps(job)


def test_a_local_job_that_saved_is_started_again(tmp_path):
    code = (
        "import os, sys; path = os.environ['COUNT']; n = os.path.getsize(path) if os.path.exists(path) else 0\n"
        "open(path, 'a').write('x'); sys.exit(85 if n < 2 else 0)"
    )
    status, _ = run_locally(local_job(tmp_path, code))
    assert status == 0 and (tmp_path / "count").read_text() == "xxx"


def test_the_attempts_of_a_local_job_are_bounded(tmp_path):
    code = "import os, sys; open(os.environ['COUNT'], 'a').write('x'); sys.exit(85)"
    status, _ = run_locally(local_job(tmp_path, code, max_restarts=1))
    assert status != 0 and (tmp_path / "count").read_text() == "xx"


def test_a_local_job_that_fails_says_so(tmp_path):
    spec = local_job(tmp_path, "raise SystemExit('no such data')")
    status, job_id = run_locally(spec)
    assert status not in (0, 85)
    assert "no such data" in (Path(spec.run_dir) / "launch" / f"{job_id}.0" / "first_error.txt").read_text()


def test_a_local_job_outlives_who_started_it(tmp_path):
    """It has a session of its own, so that no terminal's end reaches it."""
    spec = local_job(tmp_path, "import time; time.sleep(1)")
    _, process = local.start(spec, cluster_name="here")
    assert os.getsid(process.pid) == process.pid != os.getsid(0)
    assert process.wait(timeout=300) == 0


@pytest.mark.parametrize(("is_terminal", "variable"), [(True, ""), (True, "1"), (False, "")])
def test_a_doubtful_reward_is_red_on_a_terminal_as_in_the_program(
    submitted, cluster_file, capsys, monkeypatch, is_terminal, variable
):
    doubtful = Finding("warning", "--data.environments.rewards", "wrong answers are rewarded")
    other = Finding("warning", "--seed", "another doubt")
    monkeypatch.setattr(cli.data_check, "look_at_data", lambda cfg: ([], [doubtful, other]))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setenv("NO_COLOR", variable)
    assert cli.main(["tiny_qwen3_moe", "--cluster", cluster_file()]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    red = is_terminal and not variable
    text = "WARNING: wrong answers are rewarded"
    assert lines == [f"\x1b[31m{text}\x1b[0m" if red else text, "WARNING: another doubt"]
    assert len(submitted) == 1
