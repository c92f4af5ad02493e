"""Example: a Slurm cluster of H200 nodes with pyxis containers. Copy it and insert your names."""

from launch.cluster import Cluster

CLUSTER = Cluster(
    # A folder that all nodes share, for runs with a relative output_dir. The container sees it at the same path.
    run_root="/lustre/project",
    # `sacctmgr show associations user=$USER` lists your accounts; `sinfo -s` lists partitions and limits.
    account="project",
    partition="batch",
    time_limit="04:00:00",
    # 5 minutes before the limit, the trainer finishes its step and saves, and the job is requeued.
    save_signal_s=300,
    # For doctor's checks and the request to Slurm.
    gpu="h200",
    gpus_per_node=8,
    # A local image file needs no download. docs/quickstart.md builds it from tools/Dockerfile.
    container_image="/lustre/project/images/megatron_fp8rl.sqsh",
    container_mounts=("/lustre/project/models:/lustre/project/models:ro",),
    # Other sbatch options. True means an option without a value.
    sbatch={"exclusive": True, "mem": "0", "comment": "RL with FP8"},
    # Passed to every role unchanged.
    env={"NCCL_DEBUG": "WARN", "HF_HOME": "/lustre/project/hf"},
)
