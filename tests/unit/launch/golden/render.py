"""Print, as JSON, the batch scripts that the tests compare with the files beside this one.

A program of its own, since nemo-run brings torch and half of a cluster's clients into the process.
"""

import json
import sys

from launch import slurm
from launch.cluster import Cluster
from launch.spec import JobSpec, Role

TRAINER = Role(
    name="trainer",
    kind="torchrun",
    nodes=(0, 1),
    processes_per_node=8,
    gpus=tuple(range(8)),
    command=("-m", "megatron_fp8rl", "train", "grpo_qwen3_8b"),
)
ROLLOUT = Role(
    name="rollout-0", kind="replica", nodes=(2,), command=("-m", "megatron_fp8rl.rollout.replica"), restart=True
)


def job(run_dir: str, *, name: str = "qwen3", **changes) -> JobSpec:
    return JobSpec(name=name, run_dir=run_dir, roles=(TRAINER, ROLLOUT), nodes=3, **changes)


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
CPU = Cluster(account="research", gpu=None, gpus_per_node=0, ranks_per_node=1, python="/shared/env/bin/python")
CASES = {
    "odd": (job("/shared/it's a \"run\"", name="it's a 'name'", save_signal_s=120), ODD, 1),
    "pyxis": (job("/lustre/runs/qwen3"), PYXIS, 1),
    "chain": (job("/shared/run", max_restarts=0), CPU, 3),
}


def main() -> int:
    scripts = {}
    for name, (spec, cluster, chain) in CASES.items():
        assert slurm.problems(spec, cluster) == []
        texts = slurm.dry_run(spec, cluster, chain=chain)
        scripts |= {f"{name}{index if chain > 1 else ''}": text for index, text in enumerate(texts)}
    spec, cluster, _ = CASES["odd"]
    assert slurm.dry_run(spec, cluster) == [scripts["odd"]], "two dry runs differ"
    json.dump({"scripts": scripts}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
