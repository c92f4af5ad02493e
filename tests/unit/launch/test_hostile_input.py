"""What users write and do that nobody meant: fields of the wrong kind, shells with a will of their own, interrupts."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from launch import cli, cluster, run_state, slurm
from launch.cluster import Cluster, ClusterError
from launch.slurm import SubmitError
from launch.spec import JobSpec, Role, add_job, launch_dir, read_jobs, submission_dir
from tests.helpers.launching import saved

HEAD = "from pathlib import Path\nfrom launch.cluster import Cluster\n"
CPU = {"gpu": None, "gpus_per_node": 0, "ranks_per_node": 4, "time_limit": "10:00", "save_signal_s": 60}


@pytest.fixture(autouse=True)
def nobody_else_rules(monkeypatch: pytest.MonkeyPatch):
    for name in ("SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_TIMELIMIT"):
        monkeypatch.delenv(name, raising=False)


def written(folder: Path, text: str) -> str:
    path = folder / "it's my cluster.py"
    path.write_text(f"{HEAD}CLUSTER = Cluster({text})\n")
    return str(path)


def job(run_dir: Path, role: str = "task") -> JobSpec:
    return JobSpec(
        name="run", run_dir=str(run_dir), nodes=1, roles=(Role(name=role, kind="command", nodes=(0,), command=("x",)),)
    )


def record(run_dir: Path) -> dict:
    """A line of the run's file of jobs, without the number."""
    return {"cluster": "c", "kind": "slurm", "name": "x", "nodes": 1, "submitted_at": 0.0, "spec": saved(job(run_dir))}


# ---- cluster files


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("time_limit=240", "CLUSTER.time_limit = 240: is of type int. Write text"),
        ("gpus_per_node='8'", "CLUSTER.gpus_per_node = '8': is of type str. Write a whole number"),
        ("max_nodes=True", "CLUSTER.max_nodes = True"),
        ("run_root=Path('/a')", "CLUSTER.run_root = PosixPath('/a')"),
        # As letters, each a line of the script, it would be queued.
        ("setup='module load cuda'", "CLUSTER.setup = 'module load cuda': is of type str. Write (\"first\""),
        ("srun=('--mpi=none', 3)", "CLUSTER.srun = ('--mpi=none', 3)"),
        ("env=[('A', 'b')]", "CLUSTER.env = [('A', 'b')]"),
        ("kind='slrum'", 'Choose "slurm" or "local"'),
    ],
)
def test_a_value_of_the_wrong_kind_is_named_with_what_to_write(tmp_path: Path, text: str, said: str):
    with pytest.raises(ClusterError) as caught:
        cluster.load(written(tmp_path, f"account='kept', {text}"))
    assert said in str(caught.value) and "it's my cluster.py" in str(caught.value) and "kept" not in str(caught.value)


def test_all_values_of_the_wrong_kind_are_named_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["tiny_qwen3_moe", "--cluster", written(tmp_path, "account=1, partition=2, max_restarts='3'")]) == 2
    error = capsys.readouterr().err
    assert all(f"CLUSTER.{name} = " in error for name in ("account", "partition", "max_restarts"))


def test_lists_and_none_are_taken(tmp_path: Path):
    text = "setup=['a', 'b'], account=None"
    assert list(cluster.load(written(tmp_path, text)).setup) == ["a", "b"]


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("sbatch['time']", {"sbatch": {"time": "5"}}),
        ("sbatch['exclusive']", {"sbatch": {"exclusive": False}}),
        ("sbatch['qos']", {"sbatch": {"qos": None}}),
        ("sbatch['comment']", {"sbatch": {"comment": "a\n#SBATCH --nodes=9"}}),
        ("partition", {"partition": "a\nb"}),
        ("srun[0]", {"srun": ("a\nb",)}),
        ("save_signal_s", {"save_signal_s": -5}),
        ("save_signal_s", {"save_signal_s": 70000, "time_limit": "2-0"}),
    ],
)
def test_what_sbatch_would_refuse_or_obey_is_refused(field: str, changes: dict):
    [found] = Cluster(**(CPU | changes)).violations()
    assert found.field == f"CLUSTER.{field}" and found.remedy


def test_options_of_sbatch_are_taken_as_they_are():
    options = {"exclusive": True, "mem": 0, "nice": "10", "comment": 'it\'s "a" $b'}
    assert Cluster(**CPU, sbatch=options).violations() == []


# ---- the shell and the folder of the run


def test_variables_that_overrule_the_script_are_refused_unless_they_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    mine = Cluster(**CPU, partition="main")
    monkeypatch.setenv("SBATCH_PARTITION", "main")
    monkeypatch.setenv("SBATCH_ACCOUNT", "team")  # CLUSTER.account is None: the shell's is wanted
    assert slurm.problems(job(tmp_path), mine) == []
    monkeypatch.setenv("SBATCH_PARTITION", "debug")
    [found] = slurm.problems(job(tmp_path), mine)
    assert "SBATCH_PARTITION = 'debug'" in found and "CLUSTER.partition = 'main'" in found and "Unset" in found


@pytest.mark.parametrize("role", ["trainer", "task"])
@pytest.mark.parametrize("kind", ["train", "study"])
def test_no_two_jobs_of_any_kind_work_in_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str, role: str
):
    """An evaluation's engines would take the endpoints of the training's."""
    folder = tmp_path / "runs" / ("tiny_qwen3_moe_study" if kind == "study" else "tiny_qwen3_moe")
    add_job(folder, {"job_id": "5", "kind": "slurm", "cluster": "c", "spec": saved(job(folder, role))})
    monkeypatch.setattr(slurm, "job_state", lambda job_id, **how: "RUNNING")
    file = written(tmp_path, f"run_root={str(tmp_path)!r}, **{CPU!r}")
    assert cli.main(["tiny_qwen3_moe", "--cluster", file, "--job", kind]) == 2
    assert "job 5 of cluster 'c' is RUNNING in" in capsys.readouterr().err


# ---- submission


@dataclass
class Queue:
    """A Slurm that takes every job, and what it was asked to cancel."""

    cancelled: list[str] = field(default_factory=list)

    def ask(self, *words: str) -> str:
        self.cancelled += words[1:] if words[0] == "scancel" else ()
        return ""


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    found = Queue()
    monkeypatch.setattr(slurm, "_sbatch", lambda script, cluster, name: "7")
    monkeypatch.setattr(slurm.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(slurm, "_REASON_S", 0.0)
    monkeypatch.setattr(slurm, "slurm_output", found.ask)
    return found


def submit(run_dir: Path) -> str:
    return slurm.submit(job(run_dir), Cluster(**CPU), cluster_name="c", id="run_one")


def test_a_submission_is_noted_and_its_name_is_not_taken_twice(tmp_path: Path, queue: Queue):
    assert submit(tmp_path) == "7"
    assert [one["job_id"] for one in read_jobs(tmp_path)] == ["7"] and not queue.cancelled
    with pytest.raises(SubmitError, match="'run_one' already exists in .*choose another --id"):
        submit(tmp_path)
    assert (submission_dir(tmp_path, "run_one") / "code" / "launch").is_dir() and not queue.cancelled


def test_an_interrupt_leaves_no_job_of_which_nobody_was_told(
    tmp_path: Path, queue: Queue, monkeypatch: pytest.MonkeyPatch
):
    def interrupt(*words: str) -> str:
        if words[0] == "squeue":
            raise KeyboardInterrupt
        return queue.ask(*words)

    monkeypatch.setattr(slurm, "slurm_output", interrupt)
    with pytest.raises(KeyboardInterrupt):
        submit(tmp_path)
    assert queue.cancelled == ["7"]
    assert not submission_dir(tmp_path, "run_one").exists()


def test_an_interrupt_is_a_line_and_not_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def interrupt(*args: object, **how: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(slurm, "submit", interrupt)
    assert cli.main(["tiny_qwen3_moe", "--cluster", written(tmp_path, f"run_root={str(tmp_path)!r}, **{CPU!r}")]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "python -m launch: interrupted, nothing is queued"


@pytest.mark.parametrize("name", ["copy_code", "record_job"])
def test_a_full_disk_queues_nothing_and_is_said_with_the_folder(
    tmp_path: Path, queue: Queue, monkeypatch: pytest.MonkeyPatch, name: str
):
    def full(*args: object, **_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(slurm, name, full)
    with pytest.raises(SubmitError, match="folder .* cannot be written: .*No space left"):
        submit(tmp_path)
    assert queue.cancelled == ([] if name == "copy_code" else ["7"])


@pytest.mark.parametrize("at", ["sbatch", "reason"])
@pytest.mark.parametrize("has_run", [False, True])
def test_a_refused_submission_leaves_no_file(
    tmp_path: Path, queue: Queue, monkeypatch: pytest.MonkeyPatch, at: str, has_run: bool
):
    """Neither folders nor an entry of jobs.jsonl. Files that were there before stay."""
    run_dir = tmp_path / "runs" / "mine"
    if has_run:
        add_job(run_dir, {"job_id": "5", **record(run_dir)})
    before = sorted(path for path in tmp_path.rglob("*"))

    def refuse(*args: object) -> str:
        raise SubmitError("no")

    monkeypatch.setattr(slurm, *(("_sbatch", refuse) if at == "sbatch" else ("_reject_impossible", refuse)))
    with pytest.raises(SubmitError):
        submit(run_dir)
    assert sorted(path for path in tmp_path.rglob("*")) == before
    assert [job["job_id"] for job in read_jobs(run_dir)] == ["5"] * has_run


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("CANCELLED", "attempt 0: cancelled, before its agents could record an outcome"),
        ("TIMEOUT", "attempt 0: ended by the time limit, before the trainer had saved"),
        ("FAILED", "attempt 0: ended without an outcome (a node was lost"),
    ],
)
def test_an_attempt_without_an_outcome_is_explained_by_the_state(tmp_path: Path, monkeypatch, capsys, state, said):
    monkeypatch.setattr(run_state, "job_state", lambda job_id: state)
    add_job(tmp_path, {"job_id": "5", **record(tmp_path)})
    (launch_dir(tmp_path) / "5.0").mkdir()
    (launch_dir(tmp_path) / "5.0" / "first_error.txt").write_text("srun: error: task 0: Terminated\n")
    assert cli.main(["status", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert said in shown and ("Terminated" in shown) == (state != "CANCELLED")


# ---- jobs of which little is known


def test_a_job_that_wrote_nothing_is_explained(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(run_state, "job_state", lambda job_id: "FAILED")
    how = record(tmp_path)
    add_job(tmp_path, {"job_id": "5", **how})
    assert cli.main(["status", str(tmp_path)]) == 1
    assert f"it wrote nothing into {tmp_path}: check that its nodes see this folder" in capsys.readouterr().out
    assert cli.main(["logs", str(tmp_path)]) == 2
    assert "job 5 is FAILED, and has written nothing" in capsys.readouterr().err
    add_job(tmp_path, {"job_id": "6", "folder": str(tmp_path), **how})
    (tmp_path / "sbatch-6.out").write_text("launch: attempt 4 is not started\n")
    assert cli.main(["status", str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("it wrote nothing into") == 1, "of the second there is its own output"


def test_logs_name_what_is_not_there(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]):
    """Also of a run whose folder was moved: its jobs' own output moved with it."""
    monkeypatch.setattr(run_state, "job_state", lambda job_id: "COMPLETED")
    how = record(tmp_path)
    add_job(tmp_path, {"job_id": "5", "folder": "/where/it/was/before", **how})
    logs, output = tmp_path / "logs", launch_dir(tmp_path) / "jobs" / "x" / "sbatch-5.out"
    logs.mkdir()
    output.parent.mkdir(parents=True)
    output.write_text("said by the batch script\n")
    (logs / "trainer.node0.log").write_text("=== job 5, attempt 0 ===\n[rank 0] step 1\n")
    assert cli.main(["logs", str(tmp_path), "--role", "job"]) == 0
    assert capsys.readouterr().out == "said by the batch script\n"
    for words, said in (
        (("--role", "cook"), "there is no log of role cook. Logs: trainer.node0, job\n"),
        (("--rank", "7"), f"--rank 7 has written nothing. Logs: {logs / 'trainer.node0.log'}\n"),
    ):
        assert cli.main(["logs", str(tmp_path), *words]) == 2
        assert capsys.readouterr().err.endswith(said)
    with pytest.raises(SystemExit):
        cli.main(["logs", str(tmp_path), "--lines", "-1"])
    assert "'-1' is not a number of lines" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "report"),
    [
        (("-m", "megatron_fp8rl", "train", "x"), "report.html"),
        (("-m", "megatron_fp8rl", "study", "x"), "study.md"),
        (("-m", "checkpoint_tools", "inspect", "study"), None),
        (("program.py",), "report.html"),
    ],
)
def test_the_report_is_the_one_that_the_job_writes(tmp_path: Path, command: tuple[str, ...], report: str | None):
    role = Role(name="task", kind="command", nodes=(0,), command=command)
    spec = JobSpec(name="x", run_dir=str(tmp_path), roles=(role,), nodes=1)
    assert run_state.report_name(spec) == report
    known = {"cluster": "c", "kind": "slurm", "nodes": 1, "submitted_at": 0.0, "job_id": "5", "spec": saved(spec)}
    shown = run_state.describe(tmp_path, [run_state.JobState(job=known, state="RUNNING", attempts=())])
    assert [line for line in shown if line.startswith("report")] == [
        line for line in shown if report and f"{tmp_path}/{report} (not written yet" in line
    ]


def test_a_sweep_leads_to_its_elements(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(run_state, "job_state", {"5": "COMPLETED", "6": "FAILED"}.get)
    (tmp_path / "sweep.json").write_text("{}")
    for index, job_id in ((10, "6"), (9, "5")):
        add_job(tmp_path / f"element-{index}", {"job_id": job_id, **record(tmp_path / f"element-{index}")})
    assert cli.main(["status", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert shown.index("5 on c: COMPLETED") < shown.index("6 on c: FAILED")
    assert cli.main(["logs", str(tmp_path)]) == 2
    assert f"is a sweep: name one of its runs, such as {tmp_path / 'element-0'}" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "error", "said"),
    [
        ("FAILED", None, "it wrote nothing into"),
        ("FAILED", "", "it left no error; `python -m launch logs"),
        ("FAILED", "RuntimeError: full", "first error of job 7 ("),
        ("CANCELLED", None, ""),
    ],
)
def test_who_waited_is_told_what_failed(tmp_path: Path, monkeypatch, capsys, state: str, error: str | None, said: str):
    folder = tmp_path / "runs" / "tiny_qwen3_moe"

    def submitted(*args: object, **how: object) -> str:
        if error is not None:
            (launch_dir(folder) / "7.0").mkdir(parents=True)
            (launch_dir(folder) / "7.0" / "first_error.txt").write_text(error)
        return "7"

    monkeypatch.setattr(slurm, "submit", submitted)
    monkeypatch.setattr(slurm, "job_state", lambda job_id, **how: state)
    file = written(tmp_path, f"run_root={str(tmp_path)!r}, **{CPU!r}")
    assert cli.main(["tiny_qwen3_moe", "--cluster", file, "--wait"]) == 1
    shown = capsys.readouterr()
    assert f"job 7: {state}" in shown.out and said in shown.err and (error or "") in shown.err
    assert said or not shown.err
