"""Jobs and cluster files for the tests on a real Slurm."""

import textwrap
from pathlib import Path
from typing import Any

from launch import slurm
from launch.cluster import Cluster
from launch.spec import JobSpec
from tests.slurm.slurm_cluster import lines_of

CLUSTER_NAME = 'it\'s a "big" cluster.py'


def cluster_file(folder: Path, **changes) -> Path:
    """A cluster's file whose name and run_root need quotes in a shell."""
    values = (
        dict(
            run_root=str(folder / "all runs"),
            account="research",
            partition="main",
            time_limit="00:20:00",
            gpu=None,
            gpus_per_node=0,
            ranks_per_node=1,
            save_signal_s=60,
            env={"WITH_QUOTES": 'it\'s "a b" $HOME'},
        )
        | changes
    )
    if values["run_root"] == str(folder / "all runs"):
        (folder / "all runs").mkdir(exist_ok=True)
    fields = ",\n    ".join(f"{name}={value!r}" for name, value in values.items())
    path = folder / CLUSTER_NAME
    path.write_text(f"from launch.cluster import Cluster\n\nCLUSTER = Cluster(\n    {fields},\n)\n")
    return path


def run_dir(folder: Path, name: str = "tiny_qwen3_moe") -> Path:
    return folder / "all runs" / "runs" / name


def ci_cluster(**changes) -> Cluster:
    """The test cluster, as a cluster's file describes it."""
    values = dict(
        account="research",
        partition="main",
        time_limit="00:10:00",
        gpu=None,
        gpus_per_node=0,
        ranks_per_node=2,
        save_signal_s=60,
        max_restarts=3,
        env={"TORCHDYNAMO_DISABLE": "1"},
    )
    return Cluster(**(values | changes))


def program(folder: Path, name: str, text: str) -> str:
    """Path of a program that all nodes can read."""
    path = folder / f"{name}.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def submit(spec: JobSpec, cluster: Cluster, **options) -> str:
    Path(spec.run_dir).mkdir(parents=True, exist_ok=True)
    return slurm.submit(spec, cluster, cluster_name="ci", **options)


def last_step(run: Path) -> int:
    return max((line["step"] for line in lines_of(run / "metrics.jsonl")), default=-1)


def nodes_of(cluster: Any, job: str) -> list[str]:
    """Names of the job's nodes in the order of its ranks: of the switch of odd numbers first (``cluster.sh``)."""
    names = cluster.command("scontrol", "show", "hostnames", cluster.job(job)["NodeList"]).split()
    return sorted(names, key=lambda name: (int(name.removeprefix("node")) % 2 == 0, name))
