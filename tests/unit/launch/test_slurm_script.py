"""The batch script as reviewed text, and what bash makes of it.

``golden/pyxis.sh`` is a whole script, ``golden/odd.diff`` what another has in its place. After a wanted change:
``FP8RL_UPDATE_GOLDEN=1 python -m pytest tests/unit/launch/test_slurm_script.py``, and read the difference.
"""

import difflib
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from launch import slurm
from launch.cluster import Cluster
from launch.spec import JobSpec, Role

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("odd", "pyxis")
ROLE = Role(name="trainer", kind="torchrun", nodes=(0,), command=())
WIDE = Role(name="trainer", kind="torchrun", nodes=(0, 1, 2), command=())
ODD = Cluster(
    account="it's mine",
    partition="a b",
    time_limit="1-00:00:00",
    python="/opt/my env/bin/python",
    cpus_per_node=64,
    sbatch={"comment": 'say "hi" $USER', "exclusive": True, "mail-type": "END"},
    srun=("--mpi=none",),
    setup=("module load cuda", "export GREETING='a  b'"),
    env={"secret": "not in the script"},
)
PYXIS = Cluster(
    account="project",
    partition="batch",
    run_root="/lustre/runs",
    container_image="/lustre/my images/fp8.sqsh",
    container_mounts=("/lustre/models:/models:ro", "/a b:/c d"),
)


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    jobs = {
        "odd": (
            JobSpec(name="it's a 'name'", run_dir='/shared/it\'s a "run"', roles=(WIDE,), nodes=3, save_signal_s=120),
            ODD,
        ),
        "pyxis": (JobSpec(name="qwen3", run_dir="/lustre/runs/qwen3", roles=(WIDE,), nodes=3), PYXIS),
    }
    assert not any(slurm.problems(*job) for job in jobs.values())
    return {name: slurm.dry_run(*job) for name, job in jobs.items()}


def test_the_scripts_are_those_that_were_reviewed(scripts):
    first = scripts["pyxis"]
    found = {
        "pyxis.sh": first,
        "odd.diff": "\n".join(difflib.unified_diff(first.splitlines(), scripts["odd"].splitlines(), n=0, lineterm=""))
        + "\n",
    }
    for name, text in found.items():
        if os.environ.get("FP8RL_UPDATE_GOLDEN"):
            (GOLDEN / name).write_text(text)
        assert text == (GOLDEN / name).read_text()


def test_bash_reads_every_script(scripts):
    for name in NAMES:
        done = subprocess.run(["bash", "-n"], input=scripts[name], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{name}: {done.stderr}"


@pytest.fixture
def words_of_srun(scripts, tmp_path):
    """What srun gets when bash runs the script."""

    def run(name: str) -> list[str]:
        srun = tmp_path / "srun"
        srun.write_text(f'#!/bin/sh\nfor word; do printf "%s\\n" "$word"; done > {tmp_path}/words\n')
        for tool in ("mkdir", "module", "tail"):
            (tmp_path / tool).write_text("#!/bin/sh\n")
        for tool in tmp_path.iterdir():
            tool.chmod(0o755)
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        subprocess.run(["bash", "-c", scripts[name]], env=environment, capture_output=True, timeout=300)
        return (tmp_path / "words").read_text().splitlines()

    return run


@pytest.mark.parametrize("name", NAMES)
def test_the_words_of_srun_are_whole(words_of_srun, name):
    """As bash splits them: paths with blanks and quotes are one word each."""
    words = words_of_srun(name)
    folder, id = {"odd": ('/shared/it\'s a "run"', "it-s-a-name"), "pyxis": ("/lustre/runs/qwen3", "qwen3")}[name]
    folder = f"{folder}/launch/jobs/{id}_dry-run"
    assert words[-3:] == ["-m", "launch.agent", f"{folder}/job.json"]
    assert f"--output={folder}/agents-7-0.out" in words
    if name == "odd":
        assert words[-5:-3] == ["--mpi=none", "/opt/my env/bin/python"]
        assert f"--chdir={folder}/code" in words
    else:
        assert "--container-image=/lustre/my images/fp8.sqsh" in words and f"--container-workdir={folder}/code" in words
        assert "--container-mounts=/lustre/models:/models:ro,/a b:/c d,/lustre/runs:/lustre/runs" in words


def test_values_of_the_environment_are_not_in_the_script(scripts):
    assert "not in the script" not in scripts["odd"]


def test_options_of_sbatch_keep_their_quotes(scripts):
    options = [shlex.split(line)[1] for line in scripts["odd"].splitlines() if line.startswith("#SBATCH")]
    for option in (
        "--account=it's mine",
        "--partition=a b",
        '--comment=say "hi" $USER',
        "--job-name=it's a 'name'",
        *"--exclusive --mail-type=END --signal=USR1@120 --cpus-per-task=64 --gpus-per-node=8 --nodes=3".split(),
        *("--ntasks-per-node=1", "--requeue"),
    ):
        assert option in options


@pytest.fixture
def end_of_job(tmp_path):
    """Run a script in bash, with stand-ins for Slurm's commands and an srun that ends with a status."""

    def run(
        status: int, *, done: str | None = None, restarts: int = 0, state: str = "RUNNING", has_log: bool = True
    ) -> tuple[int, str, str]:
        run_dir = tmp_path / 'it\'s a "run" $x'
        attempt, folder = run_dir / "launch" / f"7.{restarts}", run_dir / "launch" / "jobs" / "run_1"
        for path in (attempt, folder):
            path.mkdir(parents=True, exist_ok=True)
        if done is not None:
            (attempt / "done").write_text(done)
        tools, calls = tmp_path / "bin", tmp_path / "calls"
        tools.mkdir(exist_ok=True)
        calls.write_text("")
        said = 'echo "$@" >> {calls}\necho "JobId=7 JobState={state} Reason=None"'
        (tools / "scontrol").write_text(
            '#!/bin/sh\ncase "$2" in hostnames | topology) exit 0 ;; esac\n' + said.format(calls=calls, state=state)
        )
        (tools / "scancel").write_text(f'#!/bin/sh\necho scancel "$@" >> {calls}\n')
        (tools / "srun").write_text(f"#!/bin/sh\nexit {status}\n")
        for tool in tools.iterdir():
            tool.chmod(0o755)
        if has_log:
            (folder / "sbatch-7.out").write_text("srun: error: Unable to open image\n")
        spec = JobSpec(name="run", run_dir=str(run_dir), roles=(ROLE,), nodes=1, max_restarts=2)
        environment = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        environment |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
        script = slurm.dry_run(spec, Cluster(), id="run_1")
        ended = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=300)
        written = [path for path in (run_dir / "launch").rglob("*.*") if path.is_file()]
        files = {path.relative_to(run_dir / "launch").as_posix(): path.read_text() for path in written}
        return ended.returncode, calls.read_text(), f"{ended.stderr}{files}"

    return run


REQUEUED = "-o show job 7\nrequeue 7\n"


@pytest.mark.parametrize(
    ("srun", "options", "status", "calls", "text"),
    [
        pytest.param(143, {"done": "0\n"}, 0, "", "", id="done"),
        pytest.param(85, {"done": "85\n"}, 85, REQUEUED, "the job is queued again", id="saved"),
        pytest.param(137, {"done": "85", "restarts": 1}, 85, REQUEUED, "", id="saved-again"),
        pytest.param(85, {"done": "85", "restarts": 2}, 85, "", "max_restarts = 2", id="last-attempt"),
        pytest.param(0, {"restarts": 3}, 1, "", "is not started", id="too-many-attempts"),
        pytest.param(85, {"done": "85", "state": "CANCELLED"}, 85, "-o show job 7\n", "", id="cancelled-in-slurm"),
        pytest.param(143, {"restarts": 1}, 143, "", "first_error", id="ended-by-slurm"),
        pytest.param(137, {}, 85, REQUEUED, "the agents were killed: srun ended with status 137", id="killed"),
        pytest.param(137, {"restarts": 2}, 85, "", "max_restarts = 2", id="killed-in-the-last-attempt"),
        pytest.param(0, {"done": "130\n"}, 130, "scancel 7\n", "", id="cancelled"),
        pytest.param(0, {"done": "3\n"}, 3, "", "", id="failed"),
        pytest.param(1, {}, 1, "", "'srun: error: Unable to open image\\n'", id="no-agent-started"),
        pytest.param(1, {"has_log": False}, 1, "", "folder moved or removed?", id="no-log"),
    ],
)
def test_the_end_of_an_attempt(end_of_job, srun, options, status, calls, text):
    ended, called, shown = end_of_job(srun, **options)
    assert (ended, called) == (status, calls) and text in shown
    if status in (0, 130):
        assert "first_error" not in shown
    if srun == 1:
        assert "7.0/first_error.txt" in shown


def test_agents_that_are_killed_at_the_same_checkpoint_end_the_job(end_of_job, tmp_path):
    checkpoints = tmp_path / 'it\'s a "run" $x' / "checkpoints"
    assert end_of_job(137)[0] == 85
    assert end_of_job(137, restarts=1)[0] == 85
    (checkpoints / "step_00000002").mkdir(parents=True)  # a new one: it counts from here
    for _ in range(2):
        assert end_of_job(137, restarts=1)[0] == 85
    for attempt in (3, 4):
        (checkpoints.parent / "launch" / f"7.{attempt}").mkdir()
        (checkpoints.parent / "launch" / f"7.{attempt}" / "killed").write_text("../checkpoints/step_00000002\n")
    status, calls, shown = end_of_job(137, restarts=1)
    assert (status, calls) == (137, "") and "the agents were killed" in shown


@pytest.mark.parametrize(
    ("run_dir", "changes", "said"),
    [
        ("/data/50%", {}, "'%'"),
        ("/data/a\\b", {}, "escape"),
        ("/data/a:b", {"container_image": "image"}, "pyxis"),
        ("data", {}, "not absolute"),
    ],
)
def test_what_slurm_would_get_wrong_is_refused(run_dir, changes, said):
    spec = JobSpec(name="run", run_dir=run_dir, roles=(ROLE,), nodes=1)
    found = slurm.problems(spec, Cluster(**changes))
    assert any(said in problem for problem in found)
    assert slurm.problems(JobSpec(name="r", run_dir="/data/x y", roles=(ROLE,), nodes=1), Cluster()) == []


def test_names_of_submissions_are_plain():
    spec = JobSpec(name="it's a/b_c", run_dir="/x", roles=(ROLE,), nodes=1)
    name = slurm.new_id(spec, now=lambda: 0.25)
    assert re.fullmatch(r"it-s-a-b-c_\d{8}-\d{6}-250", name)
    assert slurm.slug("???") == "job"
