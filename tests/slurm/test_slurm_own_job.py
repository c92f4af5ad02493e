"""A user's own model, data and reward through a real Slurm: the page's way, by a kept dry run and `launch`."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slurm_cluster import ROOT, SlurmCluster, last_job, lines_of, logs_of

from tests.helpers.own_model import make_model
from tests.helpers.slurm_jobs import cluster_file, run_dir

REWARD = "def digits(completion, answer):\n    return {'letters': len(set(completion)) / 10, 'at_launch': 1.0}\n"
SHORT = tuple(
    (
        "--num_steps 2 --sampling.prompts_per_step 4 --sampling.completions_per_prompt 2 "
        "--sampling.max_prompt_tokens 64 --sampling.max_completion_tokens 8 --checkpoint.export_hf False "
        "--observe.eval_prompts 0"
    ).split()
)


@pytest.fixture(scope="module")
def prepared(slurm_session: SlurmCluster) -> Path:
    """A folder with data, a reward, a model, and ``my_run.py`` as ``grpo --dry-run`` prints it."""
    folder = slurm_session.shared / f"own job {time.time_ns()}"
    folder.mkdir(parents=True)
    rows = [{"question": f"Tom has {i} apples and buys 2 more. How many?", "answer": str(i + 2)} for i in range(40)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    make_model(folder / "model", [row["question"] for row in rows])
    own = ("--model", "model", "--data", "train.jsonl", "--reward", "reward.py:digits", *SHORT, "--dry-run")
    command = [sys.executable, "-m", "megatron_fp8rl", "grpo", *own]
    environ = slurm_session.environment | {"PYTHONPATH": str(ROOT)}
    printed = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300)
    assert printed.returncode == 0, printed.stderr
    (folder / "my_run.py").write_text(printed.stdout)
    return folder


@pytest.fixture
def folder(prepared: Path) -> Path:
    """A copy of the folder, which a test may change."""
    folder = prepared.with_name(f"own job {time.time_ns()}")
    shutil.copytree(prepared, folder)
    (folder / "my_run.py").write_text((prepared / "my_run.py").read_text().replace(str(prepared), str(folder)))
    return folder


def test_what_a_user_brings_travels_with_the_job(slurm_session: SlurmCluster, folder: Path):
    path = os.pathsep.join([str(ROOT), str(folder)])
    words = ("my_run:model_train", "--cluster", cluster_file(folder), "--name", "mine")
    launched = slurm_session.launch(*words, cwd=folder, PYTHONPATH=path)
    assert launched.status == 0, launched.output
    (folder / "reward.py").write_text("raise RuntimeError('an edit after the job was queued')\n")
    run = run_dir(folder, "mine")
    assert slurm_session.wait(last_job(run), deadline_s=420.0) == "COMPLETED", logs_of(run)
    steps = [line for line in lines_of(run / "metrics.jsonl") if line["step"] > 0]
    assert len(steps) == 2 and all(step["reward/part_at_launch/mean"] == 1.0 for step in steps)
    assert all(step["mismatch/abs_logprob_diff/max"] == 0 for step in steps)


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ('"$folder/code/my_run.py"', "python -m megatron_fp8rl: configuration 'my_run:model_train': No module named"),
        ("train.jsonl", "train.jsonl': no such file or folder. Name other files."),
        ("model/tokenizer.json", "has no tokenizer: neither tokenizer.json"),
    ],
    ids=["module", "data", "tokenizer"],
)
def test_a_file_that_a_node_lacks_is_named_by_the_programs_own_sentence(
    slurm: SlurmCluster, folder: Path, lost: str, said: str
):
    """By ``--wait``, ``status`` and ``logs``, and not by torchrun's traceback."""
    setup = (f"cd {str(folder)!r}", f"rm {lost}", 'cd "$folder"')
    words = ("my_run:model_train", "--cluster", cluster_file(folder, setup=setup), "--name", "lost", "--wait")
    waited = slurm.launch(*words, cwd=folder, PYTHONPATH=os.pathsep.join([str(ROOT), str(folder)]))
    run = run_dir(folder, "lost")
    assert waited.status == 1 and said in waited.stderr, waited.output + logs_of(run)
    error = waited.stderr[waited.stderr.index("first error of job") :]
    assert "Traceback" not in error and "ChildFailedError" not in error and len(error.splitlines()) < 8, error
    status = slurm.launch("status", run)
    assert status.status == 1 and said in status.stdout and "Traceback" not in status.stdout, status.output
    shown = slurm.launch("logs", run).stdout
    assert said in shown.partition("\n\n")[0], shown
