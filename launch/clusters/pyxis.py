"""Example: a Slurm cluster of H200 nodes that runs containers by pyxis. Copy it, and put in your names."""

from launch.cluster import Cluster

CLUSTER = Cluster(
    # A folder on the file system that all nodes share. Runs whose output_dir is relative go below it; it is mounted
    # into the container at the same path.
    run_root="/lustre/project",
    # `sacctmgr show associations user=$USER` lists your accounts, `sinfo -s` the partitions and their limits.
    account="project",
    partition="batch",
    time_limit="04:00:00",
    # 5 minutes before the limit the trainer finishes its step, saves and asks to be queued again.
    save_signal_s=300,
    # What doctor computes with, and what the job asks Slurm for.
    gpu="h200",
    gpus_per_node=8,
    # An image file needs no download when a job starts; docs/quickstart.md builds it from tools/Dockerfile.
    container_image="/lustre/project/images/megatron_fp8rl.sqsh",
    container_mounts=("/lustre/project/models:/lustre/project/models:ro",),
    # Any other option of sbatch. True stands for an option without a value.
    sbatch={"exclusive": True, "mem": "0", "comment": "RL with FP8"},
    # Reaches every role as it is, whatever it contains.
    env={"NCCL_DEBUG": "WARN", "HF_HOME": "/lustre/project/hf"},
)
