"""Example: a Slurm cluster without containers, whose nodes share this folder and its virtual environment."""

from launch.cluster import Cluster

CLUSTER = Cluster(
    # None: a run's folder is where the same command without a cluster would put it. The current folder must then be on
    # a file system that all nodes share, as must the Python that runs the launcher, which the nodes use too.
    run_root=None,
    account=None,  # many clusters ask for one
    partition=None,  # None: the default partition
    time_limit="04:00:00",
    gpu="h100",
    gpus_per_node=8,
    # Some clusters give a job one core unless it asks for more.
    cpus_per_node=64,
    # Lines of shell that run on the first node; what they export reaches all nodes.
    setup=("module load cuda || true",),
    env={"NCCL_DEBUG": "WARN"},
)
