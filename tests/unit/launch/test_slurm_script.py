"""The batch script as reviewed text, and what bash makes of it.

``golden/*.sh`` are whole scripts. After a wanted change:
``FP8RL_UPDATE_GOLDEN=1 python -m pytest tests/unit/launch/test_slurm_script.py``, and read the difference.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from launch import slurm
from launch.batch_script import Link, setup_lines
from launch.cluster import Cluster
from launch.spec import JobSpec, Role

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).parents[3]
ALONE = Link(chain="run_1")
NAMES = ("odd", "pyxis", "chain0", "chain1", "chain2")
needs_nemo_run = pytest.mark.skipif(importlib.util.find_spec("nemo_run") is None, reason="nemo-run is not installed")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> dict[str, str]:
    """Scripts by name, from a process without Slurm on its PATH and without stdin."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "NEMORUN"))}
    folder = tmp_path_factory.mktemp("home")
    environment |= {"PATH": "/nonexistent", "PYTHONPATH": str(ROOT), "NEMORUN_HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, str(GOLDEN / "render.py")],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert [path.name for path in folder.rglob("*_sbatch.sh")] == []
    return json.loads(done.stdout)["scripts"]


@needs_nemo_run
@pytest.mark.parametrize("name", NAMES)
def test_the_script_is_the_one_that_was_reviewed(scripts, name):
    text, golden = scripts[name], GOLDEN / f"{name}.sh"
    if os.environ.get("FP8RL_UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


@needs_nemo_run
def test_bash_reads_every_script(scripts):
    for name in NAMES:
        done = subprocess.run(["bash", "-n"], input=scripts[name], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{name}: {done.stderr}"


@needs_nemo_run
@pytest.mark.parametrize("name", NAMES)
def test_the_words_of_srun_are_whole(scripts, name):
    """As bash splits them: paths with blanks and quotes are one word each."""
    [line] = [line for line in scripts[name].splitlines() if line.startswith("srun ")]
    words = shlex.split(line)
    assert words[-3:-1] == ["-m", "launch.agent"]
    root = {"odd": "/shared/it's a \"run\"", "pyxis": "/lustre/runs/qwen3"}.get(name, "/shared/run")
    assert words[-1].startswith(f"{root}/launch/jobs/") and words[-1].endswith(".json")
    assert words[words.index("--output") + 1].startswith(f"{root}/launch/experiments/")
    if name == "odd":
        assert words[-4] == "/opt/my env/bin/python"
        assert words[words.index("--chdir") + 1].startswith(f"{root}/launch/")
    if name == "pyxis":
        assert words[words.index("--container-image") + 1] == "/lustre/my images/fp8.sqsh"
        mounts = words[words.index("--container-mounts") + 1].split(",")
        assert mounts[:3] == ["/lustre/models:/models:ro", "/a b:/c d", "/lustre/runs:/lustre/runs"]


@needs_nemo_run
def test_values_of_the_environment_are_not_in_the_script(scripts):
    assert "not in the script" not in scripts["odd"]


@needs_nemo_run
def test_options_of_sbatch_keep_their_quotes(scripts):
    options = [shlex.split(line)[1] for line in scripts["odd"].splitlines() if line.startswith("#SBATCH")]
    for option in (
        "--account=it's mine",
        "--partition=a b",
        '--comment=say "hi" $USER',
        "--exclusive",
        "--job-name=it's a 'name'",
        "--mail-type=END",
        "--signal=USR1@120",
        "--cpus-per-task=64",
        "--kill-on-invalid-dep=yes",
        "--gpus-per-node=8",
        "--nodes=3",
        "--ntasks-per-node=1",
    ):
        assert option in options


@pytest.fixture
def end_of_job(tmp_path):
    """Run the lines of the launcher in bash, with a stand-in for scontrol, and an srun that ends with a status."""

    def run(
        status: int,
        *,
        done: str | None = None,
        restarts: int = 0,
        link: Link = ALONE,
        state: str = "RUNNING",
        has_log: bool = True,
    ) -> tuple[int, str, str]:
        run_dir = tmp_path / "it's a \"run\" $x"
        attempt = run_dir / "launch" / f"7.{restarts}"
        attempt.mkdir(parents=True, exist_ok=True)
        if done is not None:
            (attempt / "done").write_text(done)
        tools, calls = tmp_path / "bin", tmp_path / "calls"
        tools.mkdir(exist_ok=True)
        calls.write_text("")
        scontrol = tools / "scontrol"
        scontrol.write_text(f'#!/bin/sh\necho "$@" >> {calls}\necho "JobId=7 JobState={state} Reason=None"\n')
        (tools / "scancel").write_text(f'#!/bin/sh\necho scancel "$@" >> {calls}\n')
        for tool in tools.iterdir():
            tool.chmod(0o755)
        role = Role(name="trainer", kind="torchrun", nodes=(0,), command=())
        spec = JobSpec(name="run", run_dir=str(run_dir), roles=(role,), nodes=1, max_restarts=2)
        logs = run_dir / "logs"
        logs.mkdir(exist_ok=True)
        if has_log:
            (logs / "sbatch-7.out").write_text("+ echo begin\n+ set +vx\nsrun: error: Unable to open image\n")
        lines = setup_lines(spec, link, log_dir=str(logs), setup=())
        environment = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        environment |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
        # As nemo-run's script ends, which lets any failure of a command end it.
        script = f"{lines}\n(exit {status})\nexitcode=$?\nset -e\nexit $exitcode\n"
        ended = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=300)
        written = [path for path in (run_dir / "launch").rglob("*.*") if path.is_file()]
        files = {path.relative_to(run_dir / "launch").as_posix(): path.read_text() for path in written}
        return ended.returncode, calls.read_text(), f"{ended.stderr}{files}"

    return run


def test_a_finished_job_ends_with_0_whatever_srun_said(end_of_job):
    status, calls, text = end_of_job(143, done="0\n")
    assert (status, calls) == (0, "") and "run_1.finished" in text


def test_a_saved_attempt_is_queued_again(end_of_job):
    status, calls, _ = end_of_job(85, done="85\n")
    assert status == 85 and calls.splitlines() == ["-o show job 7", "requeue 7"]
    assert "requeue 7" in end_of_job(137, done="85", restarts=1)[1]


def test_a_cancelled_job_stays_so(end_of_job):
    assert "requeue" not in end_of_job(85, done="85", state="CANCELLED")[1]
    assert "requeue" not in end_of_job(143, restarts=1)[1]


def test_a_job_that_its_agents_ended_as_cancelled_is_so_for_slurm_too(end_of_job):
    status, calls, text = end_of_job(0, done="130\n")
    assert (status, calls) == (130, "scancel 7\n")
    assert "run_1.failed" in text and "first_error" not in text


def test_attempts_are_bounded(end_of_job):
    status, calls, text = end_of_job(85, done="85", restarts=2)
    assert status == 85 and "requeue" not in calls and "max_restarts = 2" in text and "run_1.failed" in text
    status, _, text = end_of_job(0, restarts=3)
    assert status == 1 and "is not started" in text


def test_a_failure_is_one_and_keeps_its_status(end_of_job):
    status, calls, text = end_of_job(0, done="3\n")
    assert (status, calls) == (3, "") and "run_1.failed" in text


def test_what_srun_said_is_the_first_error_when_no_agent_began(end_of_job):
    status, _, text = end_of_job(1)
    assert status == 1 and "7.0/first_error.txt" in text
    assert "'srun: error: Unable to open image\\n'" in text


def test_a_job_whose_folder_was_moved_away_says_so(end_of_job):
    status, _, text = end_of_job(1, has_log=False)
    assert status == 1 and "7.0/first_error.txt" in text and "folder moved or removed?" in text


def test_a_chain_goes_on_until_it_is_done(end_of_job):
    first, last = (Link(index=i, length=2, chain="run_1") for i in (0, 1))
    status, calls, _ = end_of_job(85, done="85", link=first)
    assert (status, calls) == (0, "")
    assert end_of_job(85, done="85", link=last)[0] == 85
    assert "run_1.failed" in end_of_job(85, done="85", link=last)[2]


def test_a_chain_ends_at_once_behind_a_failure(end_of_job):
    first, last = (Link(index=i, length=2, chain="run_1") for i in (0, 1))
    assert end_of_job(4, done="4", link=first)[0] == 4
    status, _, text = end_of_job(0, link=last)
    assert status == 1 and "has failed: 7 4" in text


def test_a_chain_ends_at_once_behind_the_end(end_of_job):
    first, last = (Link(index=i, length=2, chain="run_1") for i in (0, 1))
    assert end_of_job(0, done="0", link=first)[0] == 0
    status, _, text = end_of_job(99, link=last)
    assert status == 0 and "has finished" in text


@pytest.mark.parametrize(
    ("run_dir", "changes", "said"),
    [
        ("/data/nemo_runs/x", {}, "/nemo_run"),
        ("/data/x", {"setup": ("source /opt/nemo_run/env",)}, "CLUSTER.setup[0]"),
        ("/data/50%", {}, "'%'"),
        ("/data/a\\b", {}, "escape"),
        ("/data/a:b", {"container_image": "image"}, "pyxis"),
        ("data", {}, "not absolute"),
    ],
)
def test_what_nemo_run_or_slurm_would_get_wrong_is_refused(run_dir, changes, said):
    role = Role(name="trainer", kind="torchrun", nodes=(0,), command=())
    spec = JobSpec(name="run", run_dir=run_dir, roles=(role,), nodes=1)
    found = slurm.problems(spec, Cluster(**changes))
    assert any(said in problem for problem in found)
    assert slurm.problems(JobSpec(name="r", run_dir="/data/x y", roles=(role,), nodes=1), Cluster()) == []


def test_names_of_submissions_are_plain():
    role = Role(name="trainer", kind="torchrun", nodes=(0,), command=())
    spec = JobSpec(name="it's a/b_c", run_dir="/x", roles=(role,), nodes=1)
    name = slurm.new_id(spec, now=lambda: 0.25)
    assert re.fullmatch(r"it-s-a-b-c_\d{8}-\d{6}-250", name)
    assert slurm.slug("???") == "job"
