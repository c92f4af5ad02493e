"""Example: a Slurm cluster without containers. Its nodes share this folder and its virtual environment."""

from launch.cluster import Cluster

CLUSTER = Cluster(
    # None: relative run folders are below the current folder. All nodes must see it, and the launcher's Python.
    run_root=None,
    account=None,  # many clusters require an account
    partition=None,  # None: the default partition
    time_limit="04:00:00",
    gpu="h100",
    gpus_per_node=8,
    cpus_per_node=64,  # some clusters allocate one core by default
    # Shell lines that run on the first node. All nodes receive the exported variables.
    setup=("module load cuda || true",),
    env={"NCCL_DEBUG": "WARN"},
)
