"""Jobs of small programs on a real Slurm: who starts where, who ends with whom, and what becomes of failures.

The programs are a few lines each, so that these tests cost seconds; training itself is in ``test_slurm_training.py``.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, logs_of

from launch.spec import JobSpec, Role, log_file
from tests.helpers.slurm_jobs import ci_cluster, nodes_of, program, submit

QUOTED = 'it\'s "two words" $HOME `id` \\ * ;'
RANKS = """
    import os, sys
    import torch.distributed as dist
    dist.init_process_group("gloo")
    print("RANK", dist.get_rank(), "OF", dist.get_world_size(), os.uname().nodename, sys.argv[1:], flush=True)
    print("ENV", os.environ["WITH QUOTES".replace(" ", "_")], flush=True)
    dist.barrier()
"""
SERVE = "import time; print('serving', flush=True); time.sleep(1000)"
# Counts steps into a file, as a trainer does with checkpoints: a line of metrics and a folder for each step.
COUNT = """
    import json, os, pathlib, signal, sys, time
    run, last, pause = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1, signal.SIGTERM})
    with (run / "metrics.jsonl").open("a+") as metrics:
        metrics.seek(0)
        step = len(metrics.readlines())
        print("from step", step, "on", os.uname().nodename, flush=True)
        while step < last:
            time.sleep(pause)
            step += 1
            metrics.write(json.dumps({"step": step}) + "\\n")
            metrics.flush()
            if asked:
                print("saved at", step, flush=True)
                sys.exit(85)
"""


def counting(folder: Path, *, last: int, pause: float, **changes) -> JobSpec:
    command = (program(folder, "count", COUNT), str(folder), str(last), str(pause))
    task = Role(name="task", kind="command", nodes=(0,), command=command)
    other = Role(name="serve", kind="command", nodes=(1,), command=("-c", SERVE), restart=True, essential=False)
    spec = JobSpec(name="count steps", run_dir=str(folder), nodes=2, roles=(task, other), save_signal_s=60)
    return replace(spec, **changes)


def steps(folder: Path) -> int:
    try:
        return len((folder / "metrics.jsonl").read_text().splitlines())
    except FileNotFoundError:
        return 0


def test_ranks_follow_the_order_of_nodes_and_words_arrive_as_they_are(slurm: SlurmCluster, folder: Path):
    trainer = Role(
        name="trainer",
        kind="torchrun",
        nodes=(1, 2),
        processes_per_node=2,
        command=(program(folder, "ranks", RANKS), QUOTED),
    )
    beside = Role(name="beside", kind="command", nodes=(0, 1), command=("-c", SERVE), restart=True, essential=False)
    spec = JobSpec(
        name=f"a name {QUOTED}",
        run_dir=str(folder),
        nodes=3,
        roles=(trainer, beside),
        env={"WITH_QUOTES": QUOTED, "lower_case": "1"},
    )
    job = submit(spec, ci_cluster())
    assert slurm.wait(job) == "COMPLETED", logs_of(folder)
    nodes = nodes_of(slurm, job)
    logs = [log_file(folder, "trainer", node).read_text() for node in (1, 2)]
    for index, log in enumerate(logs):
        for rank in (2 * index, 2 * index + 1):
            assert f"RANK {rank} OF 4 {nodes[1 + index]} {[QUOTED]!r}" in log
        assert log.count(f"ENV {QUOTED}\n") == 2
    # Those that only serve are ended with the job.
    assert all("serving" in log_file(folder, "beside", node).read_text() for node in (0, 1))


def test_a_crash_ends_the_job_with_its_error_its_node_and_its_rank(slurm: SlurmCluster, folder: Path):
    crash = """
        import os, time
        time.sleep(1 if os.environ["RANK"] == "3" else 600)
        raise RuntimeError("the disk of rank 3 is full")
    """
    trainer = Role(
        name="trainer", kind="torchrun", nodes=(0, 1), processes_per_node=2, command=(program(folder, "crash", crash),)
    )
    cluster = ci_cluster(setup=("export LAUNCH_GRACE_S=2",))
    job = submit(JobSpec(name="crash", run_dir=str(folder), nodes=2, roles=(trainer,)), cluster)
    assert slurm.wait(job) == "FAILED", logs_of(folder)
    assert slurm.job(job)["Restarts"] == "0", "what fails before a step is not tried again"
    error = (folder / "launch" / f"{job}.0" / "first_error.txt").read_text()
    assert "RuntimeError: the disk of rank 3 is full" in error
    assert "role trainer, node 1 (" in error and "rank 3" in error and "trainer.node1.log" in error


def test_a_request_to_save_queues_the_job_again_and_it_goes_on(slurm: SlurmCluster, folder: Path):
    job = submit(counting(folder, last=80, pause=0.25), ci_cluster())
    slurm.until(lambda: steps(folder) >= 5, "five steps", 300, lambda: logs_of(folder))
    slurm.command("scancel", "--signal=USR1", job)
    slurm.until(lambda: slurm.job(job)["Restarts"] == "1", "the job to be queued again", 300, lambda: logs_of(folder))
    assert slurm.wait(job) == "COMPLETED", logs_of(folder)
    log = log_file(folder, "task", 0).read_text()
    saved = int(log.partition("saved at ")[2].split()[0])
    assert f"from step {saved} on" in log and steps(folder) == 80
    assert log.count("=== job") == 2


def test_nodes_follow_their_switches(slurm: SlurmCluster, folder: Path):
    """Stages of a pipeline on neighbouring nodes of the job are on one switch: names alone would alternate."""
    task = Role(
        name="task", kind="command", nodes=(0, 1, 2, 3), command=("-c", "import os; print('ON', os.uname().nodename)")
    )
    job = submit(JobSpec(name="switches", run_dir=str(folder), nodes=4, roles=(task,)), ci_cluster())
    assert slurm.wait(job) == "COMPLETED", logs_of(folder)
    logs = [log_file(folder, "task", node).read_text() for node in range(4)]
    assert [log.partition("ON ")[2].split()[0] for log in logs] == ["node1", "node3", "node2", "node4"]


def test_a_server_that_is_killed_is_started_again_on_its_node_and_the_job_goes_on(slurm: SlurmCluster, folder: Path):
    job = submit(counting(folder, last=10000, pause=0.25), ci_cluster())
    log = log_file(folder, "serve", 1)
    begun = lambda: steps(folder) >= 3 and log.exists() and "serving\n" in log.read_text()  # noqa: E731
    slurm.until(begun, "three steps and the server", 300, lambda: logs_of(folder))
    node = nodes_of(slurm, job)[1]
    slurm.command(
        "srun", f"--jobid={job}", "--overlap", "-N1", "-n1", "-w", node, "pkill", "-9", "-f", "print.'serving'"
    )
    slurm.until(lambda: log.read_text().count("serving\n") == 2, "its restart", 300, lambda: logs_of(folder))
    assert "incarnation 1, node 1" in log.read_text()
    then = steps(folder)
    slurm.until(lambda: steps(folder) > then + 2, "further steps", 300, lambda: logs_of(folder))
    assert slurm.job(job)["Restarts"] == "0" and log_file(folder, "task", 0).read_text().count("=== job") == 1


def test_cancelling_lets_the_job_save_and_is_what_slurm_says_too(slurm: SlurmCluster, folder: Path):
    """A step takes longer than Slurm's KillWait, 5 s here: a mere scancel would lose it."""
    cluster = ci_cluster(sbatch={"dependency": "singleton"})
    first, second = (submit(counting(folder, last=1000, pause=8.0), cluster, id=f"count_{i}") for i in range(2))
    slurm.until(lambda: steps(folder) >= 1, "a step", 300, lambda: logs_of(folder))
    then = steps(folder)
    cancelled = slurm.launch("cancel", folder)
    assert cancelled.status == 0 and f"job {first}: CANCELLED" in cancelled.stdout, cancelled.output
    assert [slurm.wait(job) for job in (first, second)] == ["CANCELLED", "CANCELLED"], logs_of(folder)
    assert steps(folder) > then, "the step under way was finished"
    assert f"saved at {steps(folder)}\n" in log_file(folder, "task", 0).read_text()
    assert not list(folder.rglob("first_error.txt"))
    status = slurm.launch("status", folder)
    assert f"{first} on ci: CANCELLED" in status.stdout and "attempt 0: cancelled (" in status.stdout, status.output


def test_the_time_limit_itself_saves_and_queues_the_job_again(slurm: SlurmCluster, folder: Path):
    """Slurm looks at limits twice a minute, and its shortest limit is one: nothing here is asked for by hand."""
    cluster = ci_cluster(time_limit="00:01:00", save_signal_s=50, max_restarts=10)
    job = submit(counting(folder, last=180, pause=0.25, save_signal_s=50), cluster)
    slurm.until(lambda: slurm.job(job)["Restarts"] == "1", "the job to be queued again", 300, lambda: logs_of(folder))
    slurm.until(lambda: (folder / "launch" / f"{job}.1" / "node-1.json").exists(), "the second attempt", 300)
    assert slurm.wait(job, deadline_s=300) == "COMPLETED", logs_of(folder)
    assert "saved at" in log_file(folder, "task", 0).read_text() and steps(folder) == 180


def kill_agent(slurm: SlurmCluster, folder: Path, job: str, node: int) -> str:
    """Kill the agent of a node by SIGKILL; returns the name of the node."""
    peer = json.loads((folder / "launch" / f"{job}.0" / f"node-{node}.json").read_text())
    on_node = ("srun", f"--jobid={job}", "--overlap", "-N1", "-n1", "-w", peer["host"])
    slurm.command(*on_node, "kill", "-9", str(peer["pid"]))
    return peer["host"]


def test_an_agent_that_is_killed_beside_the_trainer_costs_no_step(slurm: SlurmCluster, folder: Path):
    """The agents of the other two nodes notice it, the trainer saves, and the job is queued again."""
    ranks = Role(name="more", kind="command", nodes=(2,), command=("-c", SERVE), restart=True, essential=False)
    spec = counting(folder, last=400, pause=0.25)
    job = submit(replace(spec, nodes=3, roles=(*spec.roles, ranks)), ci_cluster())
    begun = lambda: steps(folder) >= 3 and log_file(folder, "serve", 1).exists()  # noqa: E731
    slurm.until(begun, "three steps and the server", 300, lambda: logs_of(folder))
    host = kill_agent(slurm, folder, job, 1)
    processes = ("srun", f"--jobid={job}", "--overlap", "-N1", "-n1", "-w", host, "ps", "-eo", "args")
    slurm.until(lambda: "print('serving'" not in slurm.command(*processes), "the end of its roles", 10)
    slurm.until(lambda: slurm.job(job)["Restarts"] == "1", "the job to be queued again", 60, lambda: logs_of(folder))
    slurm.until(lambda: log_file(folder, "task", 0).read_text().count("=== job") == 2, "the next attempt", 120)
    status = slurm.launch("status", folder).stdout
    assert "attempt 0: saved (stopped on request" in status and "the agent of node 1 sent no heartbeat" in status, (
        status
    )
    log = log_file(folder, "task", 0).read_text()
    saved = int(log.partition("saved at ")[2].split()[0])
    slurm.until(lambda: f"from step {saved} on" in log_file(folder, "task", 0).read_text(), "its first line", 60)


def test_an_agent_that_is_killed_on_its_only_node_ends_its_role_and_the_job_goes_on(slurm: SlurmCluster, folder: Path):
    spec = counting(folder, last=60, pause=0.25)
    job = submit(replace(spec, nodes=1, roles=spec.roles[:1]), ci_cluster())
    slurm.until(lambda: steps(folder) >= 3, "three steps", 300, lambda: logs_of(folder))
    kill_agent(slurm, folder, job, 0)
    slurm.until(lambda: slurm.job(job)["Restarts"] == "1", "the job to be queued again", 60, lambda: logs_of(folder))
    assert slurm.wait(job) == "COMPLETED" and steps(folder) == 60, logs_of(folder)
    error = (folder / "launch" / f"{job}.0" / "first_error.txt").read_text()
    assert error.startswith("the agents were killed: srun ended with status 137\n"), error
    assert log_file(folder, "task", 0).read_text().count("=== job") == 2


def test_singletons_go_on_where_the_job_before_them_stopped(slurm: SlurmCluster, folder: Path):
    """For clusters that do not requeue: the same job several times, one after the other."""
    cluster = ci_cluster(sbatch={"dependency": "singleton"}, max_restarts=0)
    jobs = [submit(counting(folder, last=80, pause=0.25, max_restarts=0), cluster, id=f"count_{i}") for i in range(3)]
    slurm.until(lambda: steps(folder) >= 3, "three steps", 300, lambda: logs_of(folder))
    assert [slurm.job(job)["JobState"] for job in jobs] == ["RUNNING", "PENDING", "PENDING"]
    slurm.command("scancel", "--signal=USR1", jobs[0])
    assert [slurm.wait(job) for job in jobs] == ["FAILED", "COMPLETED", "COMPLETED"], logs_of(folder)
    log = log_file(folder, "task", 0).read_text()
    assert steps(folder) == 80 and log.count("=== job") == 3 and "used up" in logs_of(folder)


@pytest.mark.long
def test_a_node_that_loses_power_costs_an_attempt_and_not_the_run(slurm: SlurmCluster, folder: Path):
    job = submit(counting(folder, last=80, pause=0.25), ci_cluster())
    slurm.until(lambda: steps(folder) >= 5, "five steps", 300, lambda: logs_of(folder))
    lost = nodes_of(slurm, job)[1]
    slurm.kill_node(int(lost.removeprefix("node")))
    slurm.until(lambda: slurm.job(job)["Restarts"] == "1", "Slurm to notice", 300, lambda: logs_of(folder))
    assert slurm.wait(job, deadline_s=300) == "COMPLETED", logs_of(folder)
    assert lost not in nodes_of(slurm, job)
    assert steps(folder) == 80
