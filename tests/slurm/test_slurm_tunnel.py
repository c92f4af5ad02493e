"""From a laptop: a machine without Slurm and without the cluster's folder submits and watches through a real sshd."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

import pytest
from laptop import LOGIN, Laptop, address
from slurm_cluster import SlurmCluster, last_job, logs_of
from test_slurm_jobs import counting, steps

from launch.spec import JobSpec, read_jobs

SUBMIT = """
import sys
from launch import cluster, slurm
from launch.spec import JobSpec
file, word, chain = sys.argv[1:]
launched = slurm.submit(JobSpec.decode(word), cluster.load(file), cluster_name=file, chain=int(chain))
print(*launched.job_ids)
"""


@pytest.fixture
def laptop(slurm: SlurmCluster, folder: Path, tmp_path: Path) -> Laptop:
    return Laptop(tmp_path / "a laptop", folder)


def submit(laptop: Laptop, file: str, spec: JobSpec, chain: int = 1) -> list[str]:
    done = laptop.python("-c", SUBMIT, file, spec.encode(), str(chain))
    assert done.status == 0, done.output
    return done.stdout.split()


def nothing_is_queued(slurm: SlurmCluster, folder: Path) -> bool:
    return slurm.command("squeue", "-h") == "" and not list(folder.rglob("launch"))


@pytest.mark.long
def test_a_run_is_submitted_watched_and_waited_for_from_a_laptop(slurm: SlurmCluster, folder: Path, laptop: Laptop):
    file = laptop.cluster_file()
    words = ("--job", "sft", "--data.sft_steps", "4", "--name", "far away", "--wait")
    done = laptop.launch("tiny_qwen3_moe", "--cluster", file, *words)
    run = folder / "runs" / "far away"
    assert done.status == 0, f"{done.output}\n{logs_of(folder)}"
    (job,) = read_jobs(run)
    assert job["job_id"] in done.stdout and "COMPLETED" in done.stdout and f"--cluster '{file[:-12]}" in done.stdout
    code = Path(job["folder"]) / "code"
    assert (code / "launch" / "agent.py").is_file() and code.resolve().is_relative_to(run)

    # By its name below run_root, and by its folder.
    for name in ("far away", str(run)):
        status = laptop.launch("status", name, "--cluster", file)
        assert status.status == 0 and f"job         {job['job_id']} on" in status.stdout, status.output
        assert "COMPLETED" in status.stdout and "4 of 4" in status.stdout
    logs = laptop.launch("logs", "far away", "--cluster", file, "--role", "trainer", "--lines", "3")
    assert logs.status == 0 and logs.stdout.strip(), logs.output
    assert laptop.launch("logs", "far away", "--cluster", file, "--role", "cook").status == 2
    assert "nothing runs or waits" in laptop.launch("cancel", "far away", "--cluster", file).stdout
    missing = laptop.launch("status", "no such run", "--cluster", file)
    assert missing.status == 2 and "no such run is no run below" in missing.stderr


def test_following_ends_by_an_interrupt_and_cancelling_lets_the_job_save(
    slurm: SlurmCluster, folder: Path, laptop: Laptop
):
    file = laptop.cluster_file()
    run = folder / "count"
    run.mkdir()
    job, behind = submit(laptop, file, counting(run, last=10000, pause=0.5), chain=2)
    slurm.until(lambda: steps(run) >= 3, "three steps", 300, lambda: logs_of(folder))
    follow = laptop.popen("-m", "launch", "logs", str(run), "--cluster", file, "--follow")
    line = follow.stdout.readline()
    assert line, follow.communicate(timeout=120)
    follow.send_signal(signal.SIGINT)
    assert follow.wait(120) == 0
    slurm.until(
        lambda: "launch.watch" not in slurm.command("ps", "ax", "-o", "args"), "the watching there to end", 120
    )
    assert slurm.job(job)["JobState"] == "RUNNING"

    cancelled = laptop.launch("cancel", str(run), "--cluster", file)
    assert cancelled.status == 0, cancelled.output
    assert f"job {job} is asked to save" in cancelled.stdout and f"job {job}: CANCELLED" in cancelled.stdout
    assert [slurm.wait(one) for one in (job, behind)] == ["CANCELLED", "CANCELLED"], logs_of(folder)
    assert "saved at" in (run / "logs" / "task.node0.log").read_text()


@pytest.mark.long
def test_a_folder_where_a_job_runs_is_refused(slurm: SlurmCluster, folder: Path, laptop: Laptop):
    file = laptop.cluster_file()
    slurm.command("scontrol", "update", "PartitionName=main", "State=DOWN")
    try:
        words = ("tiny_qwen3_moe", "--cluster", file, "--job", "sft")
        first = laptop.launch(*words)
        assert first.status == 0, first.output
        job = last_job(folder / "runs" / "tiny_qwen3_moe")
        again = laptop.launch(*words)
        assert again.status == 2 and f"job {job} of cluster" in again.stderr and "is PENDING" in again.stderr
        ended = laptop.launch("cancel", "tiny_qwen3_moe", "--cluster", file)
        assert ended.status == 0 and slurm.wait(job) == "CANCELLED"
    finally:
        slurm.command("scontrol", "update", "PartitionName=main", "State=UP")


def test_what_the_cluster_does_not_have_is_said_at_once(slurm: SlurmCluster, folder: Path, laptop: Laptop):
    file = laptop.cluster_file(
        container_image="/images/no such.sqsh", container_mounts=("/no data:/data",), run_root=str(folder / "none"),
        tunnel={"python": "/no/python"},
    )  # fmt: skip
    words = ("--model.hf_path", "/no/checkpoint", "--data.tokenizer", "/no/checkpoint", "--parallel.tensor", "3")
    refused = laptop.launch("tiny_qwen3_moe", "--cluster", file, *words)
    assert refused.status == 2
    for part in ("container_image = '/images/no such.sqsh'", "container_mounts = '/no data:/data'", "CLUSTER.run_root",
                 "CLUSTER.tunnel.python = '/no/python'", "--model.hf_path = '/no/checkpoint/config.json'",
                 "--data.tokenizer = '/no/checkpoint'", "--parallel.tensor = 3"):  # fmt: skip
        assert part in refused.stderr, refused.output
    assert refused.stderr.count("--model.hf_path") == 1 and nothing_is_queued(slurm, folder)


def test_what_slurm_refuses_leaves_nothing_there(slurm: SlurmCluster, folder: Path, laptop: Laptop):
    refused = laptop.launch("tiny_qwen3_moe", "--cluster", laptop.cluster_file(account="researhc"), "--job", "sft")
    assert refused.status == 2
    for part in ("Invalid account", "CLUSTER.account = 'researhc'"):
        assert part in refused.stderr, refused.output
    assert nothing_is_queued(slurm, folder)
    assert not [path for path in folder.rglob("*") if path.name != "runs"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((address()[0], 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(
    "wrong",
    ["host", "port", "user", "identity", "unknown key", "changed key", pytest.param("silent", marks=pytest.mark.long)],
)
def test_a_login_node_that_cannot_be_reached_is_an_error_with_its_field(
    slurm: SlurmCluster, folder: Path, laptop: Laptop, wrong: str
):
    tunnel, said = {}, ()
    mute = socket.socket()
    if wrong == "host":
        tunnel, said = {"host": "no-such-login.invalid"}, ("CLUSTER.tunnel.host = 'no-such-login.invalid'", "resolve")
    elif wrong == "port":
        tunnel = {"port": free_port()}
        said = (f"CLUSTER.tunnel.port = {tunnel['port']}", "refused")
    elif wrong == "user":
        tunnel, said = {"user": "nobody", "identity": None}, ("CLUSTER.tunnel.user = 'nobody'", "Permission denied")
    elif wrong == "identity":
        tunnel, said = {"identity": str(LOGIN / "host_key")}, ("CLUSTER.tunnel.identity", "Permission denied")
    elif wrong == "unknown key":
        laptop.known_hosts.write_text("")
        said = ("CLUSTER.tunnel.host", "not in known_hosts", f"`ssh -p {address()[1]}", "fingerprint")
    elif wrong == "changed key":
        key = (LOGIN / "user_key.pub").read_text()
        laptop.known_hosts.write_text(f"{laptop.known_hosts.read_text().split()[0]} {key}")
        said = ("CLUSTER.tunnel.host", "not the one in known_hosts", "ssh-keygen -R")
    elif wrong == "silent":  # it accepts, and says nothing
        mute.bind((address()[0], 0))
        mute.listen()
        tunnel, said = {"port": mute.getsockname()[1]}, ("CLUSTER.tunnel.",)
    file = laptop.cluster_file(tunnel=tunnel)
    began_s = time.monotonic()
    refused = laptop.launch("tiny_qwen3_moe", "--cluster", file, deadline_s=300)
    assert refused.status == 2 and "nothing is queued" in refused.stderr, refused.output
    for part in said:
        assert part in refused.stderr, refused.output
    watched = laptop.launch("status", "tiny_qwen3_moe", "--cluster", file, deadline_s=300)
    assert watched.status == 2 and said[0] in watched.stderr and "Traceback" not in watched.stderr, watched.output
    assert time.monotonic() - began_s < 100
    mute.close()
    assert nothing_is_queued(slurm, folder)
