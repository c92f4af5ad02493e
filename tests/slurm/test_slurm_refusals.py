"""Mistakes that only Slurm detects: a clear message, an exit status, and an empty queue."""

from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, last_job

from launch import cli
from tests.helpers.slurm_jobs import cluster_file, run_dir


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"account": "researhc"}, ("Invalid account", "CLUSTER.account = 'researhc'", "sacctmgr show associations")),
        ({"partition": "big"}, ("invalid partition", "CLUSTER.partition = 'big'", "sinfo -s")),
        ({"partition": "short"}, ("PartitionTimeLimit", "CLUSTER.time_limit", "above the partition's")),
    ],
    ids=["account", "partition", "limit"],
)
def test_what_slurm_refuses_is_said_with_the_field_and_leaves_nothing_queued(
    slurm: SlurmCluster, folder: Path, capsys: pytest.CaptureFixture[str], wrong: dict[str, str], said: tuple[str, ...]
):
    status = cli.main(["tiny_qwen3_moe", "--cluster", str(cluster_file(folder, **wrong))])
    error = capsys.readouterr().err
    assert status == 2, error
    for part in said:
        assert part in error, error
    assert "Traceback" not in error
    assert slurm.command("squeue", "-h", "-t", "PENDING,RUNNING") == ""


def test_every_mistake_is_named_before_anything_is_queued(slurm: SlurmCluster, folder: Path):
    """No image file, a limit that is no time, and a layout that does not divide, in one answer."""
    path = cluster_file(folder, container_image="/images/no such image.sqsh", time_limit="4 hours")
    refused = slurm.launch("tiny_qwen3_moe", "--cluster", path, "--parallel.tensor", "3")
    assert refused.status == 2
    for part in ("container_image", "/images/no such image.sqsh", "time_limit", "4 hours", "--parallel.tensor = 3"):
        assert part in refused.stderr, refused.output
    assert "nothing is queued" in refused.stderr and not run_dir(folder).exists()


def test_a_container_that_the_cluster_cannot_run_fails_with_what_slurm_said(slurm: SlurmCluster, folder: Path):
    """This Slurm has no pyxis: its srun does not know the option, and the user reads exactly that."""
    path = cluster_file(folder, container_image="registry.example#team/image:1")
    failed = slurm.launch("tiny_qwen3_moe", "--cluster", path, "--wait")
    assert failed.status == 1, failed.output
    assert "container-image" in failed.output and "FAILED" in failed.output
    assert slurm.job(last_job(run_dir(folder)))["JobState"] == "FAILED"
