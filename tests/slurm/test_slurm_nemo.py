"""nemo-run's users: their executor queues our job, and nemo-run's own commands look after it."""

import json
import os
import subprocess
import sys
import time

import pytest
from slurm_cluster import ROOT, SlurmCluster, lines_of, logs_of

PROGRAM = """
import sys
import nemo_run as run
from dataclasses import replace
from launch import nemo
from model_configs import tiny_qwen3

cfg = tiny_qwen3()
cfg = replace(cfg, name="by nemo", warm_start=replace(cfg.warm_start, steps=4), num_steps=0)
executor = run.SlurmExecutor(
    account="research", partition="main", time="00:10:00", env_vars={"WANDB_API_KEY": "s3cret-of-nobody"},
    setup_lines="export FROM_SETUP=1",
)
made = nemo.experiment(cfg, executor, job="sft", ranks_per_node=2, run_root=sys.argv[1])
with made:
    made.run(detach=True)
print("ID", made._id)
"""


def test_an_executor_of_nemo_run_queues_the_job_and_its_commands_know_it(slurm: SlurmCluster):
    folder = slurm.shared / f"nemo {time.time_ns()}"  # nemo-run's own home has no blank: it does not quote it
    home = slurm.shared / f"nemo-home-{time.time_ns()}"
    folder.mkdir(parents=True)
    environment = slurm.environment | {
        "NEMORUN_HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "TERM": "dumb",
        "COLUMNS": "200",
    }

    def run(*words: str) -> str:
        done = subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    name = run(sys.executable, "-c", PROGRAM, str(folder)).rpartition("ID ")[2].split()[0]
    nemo = os.path.join(os.path.dirname(sys.executable), "nemo")
    run_dir = folder / "runs" / "by nemo"
    slurm.until(
        (run_dir / "warm_start" / "done.json").exists, "the run's end", 300, lambda: logs_of(folder) + logs_of(home)
    )
    slurm.until(lambda: not slurm.command("squeue", "-h"), "an empty queue", 120)
    status = run(nemo, "experiment", "status", name)
    assert "SUCCEEDED" in status, status
    assert "warm start" in run(nemo, "experiment", "logs", name, "0") or "trainer" in run(
        nemo, "experiment", "logs", name, "0"
    )
    ours = slurm.launch("status", run_dir)
    assert ours.status == 0 and ": COMPLETED, 1 node(s)" in ours.stdout, ours.output
    assert len(lines_of(run_dir / "warm_start" / "metrics.jsonl")) == 4
    holders = [
        path for path in [*folder.rglob("*"), *home.rglob("*")] if path.is_file() and b"s3cret" in path.read_bytes()
    ]
    assert [path.name for path in holders] == ["job.json"] and json.loads(holders[0].read_text())["env"][
        "WANDB_API_KEY"
    ]
    assert holders[0].stat().st_mode & 0o777 == 0o600


STOCK = """
import sys
import nemo_run as run

launcher, output_dir, home = sys.argv[1:]
executor = run.SlurmExecutor(
    account="research", partition="main", time="00:10:00", ntasks_per_node=2 if launcher == "torchrun" else 1,
    launcher=launcher if launcher == "torchrun" else None, packager=run.Packager(),
    tunnel=run.LocalTunnel(job_dir=home + "/experiments"),
)
args = "sft tiny_qwen3 --warm_start.steps 4 --parallel.world_size 2 --observe.display plain --output_dir".split()
script = run.Script(path="megatron_fp8rl", m=True, entrypoint=sys.executable, args=[*args, output_dir])
with run.Experiment("stock-" + launcher, base_dir=home) as made:
    made.add(script, executor=executor, name="stock")
    made.run(detach=True)
"""


@pytest.mark.parametrize("launcher", ["none", "torchrun"])
def test_nemo_runs_own_launchers_work_on_one_node(slurm: SlurmCluster, launcher: str):
    """As the table of docs/cluster.md says: without this launcher, by a plain script of nemo-run."""
    home = slurm.shared / f"stock-{launcher}-{time.time_ns()}"
    home.mkdir()
    environment = slurm.environment | {"NEMORUN_HOME": str(home), "PYTHONPATH": str(ROOT), "TERM": "dumb"}
    environment["PATH"] = f"{os.path.dirname(sys.executable)}:{environment['PATH']}"  # torchrun is looked up there
    words = [sys.executable, "-c", STOCK, launcher, str(home / "run"), str(home)]
    done = subprocess.run(words, cwd=home, env=environment, capture_output=True, text=True, timeout=300, input="")
    assert done.returncode == 0, done.stdout + done.stderr
    slurm.until(lambda: not slurm.command("squeue", "-h"), "the end of the job", 300, lambda: logs_of(home))
    assert (home / "run" / "warm_start" / "done.json").is_file(), done.stdout + logs_of(home)
    assert len(lines_of(home / "run" / "warm_start" / "metrics.jsonl")) == 4
