"""One engine over two nodes of a real Slurm, with its trainer on a third: two tensor-parallel workers, one on each.

The nodes share neither memory nor /tmp, so whatever the workers tell each other travels over the network.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, last_job, lines_of, logs_of

from tests.helpers.slurm_jobs import cluster_file, last_step, nodes_of, run_dir

START_S = 420.0  # until a first step: imports, a warm start, an engine
CONFIG = tuple(
    (
        "tiny_qwen3_moe --engine.placement separate --engine.tensor 2 --weight_sync.transport gloo "
        "--observe.eval_prompts 8 --sampling.prompts_per_step 16 --warm_start.steps 4 "
        "--checkpoint.every_steps 2 --optim.decay constant"
    ).split()
)


def begin(slurm: SlurmCluster, folder: Path) -> tuple[str, Path, list[str]]:
    """(number of the job, folder of the run, its hosts), once both parts of the engine serve steps."""
    words = ("--cluster", cluster_file(folder), "--name", "spanning", "--num_steps", "100000")
    launched = slurm.launch(*CONFIG, *words)
    assert launched.status == 0, launched.output
    run = run_dir(folder, "spanning")
    job = last_job(run)
    slurm.until(lambda: last_step(run) >= 2, "two steps", START_S, lambda: logs_of(run), job)
    return job, run, nodes_of(slurm, job)


def every_update_reached_the_engine(run: Path) -> bool:
    """A step ends only when all workers of all engines have reported the digests of what was sent to them."""
    checksums = [line["checksum"] for line in lines_of(run / "details.jsonl")]
    return len(set(checksums)) == len(checksums) > 2


@pytest.mark.long
def test_an_engine_over_two_nodes_gets_all_weights_and_comes_back_as_a_whole(slurm: SlurmCluster, folder: Path):
    job, run, hosts = begin(slurm, folder)
    assert len(hosts) == 3
    for rank, node in enumerate((1, 2)):
        log = (run / "logs" / f"rollout-0.node{node}.log").read_text()
        assert f"node {node} ({hosts[node]})" in log and f"world_size=2 rank={rank} local_rank=0" in log, log
        assert "ranks do not share the same SHM group name" in log, "memory that nodes would have to share"
    assert every_update_reached_the_engine(run)
    endpoint = run / "replicas" / "rollout-0.json"

    def until(reached: Callable[[], bool], what: str, deadline_s: float) -> None:
        slurm.until(reached, what, deadline_s, lambda: logs_of(run), job)

    # The server of the second part dies, with its worker. The first, where nothing has happened, must not go on alone.
    def part() -> dict:
        return json.loads((run / "launch" / f"{job}.0" / "role-rollout-0.node2.json").read_text())

    before = json.loads(endpoint.read_text())
    slurm.command(
        "srun", f"--jobid={job}", "--overlap", "-N1", "-n1", "-w", hosts[2], "pkill", "-9", "-P", str(part()["pid"])
    )
    until(lambda: part()["incarnation"] == 1, "the second part to be started again", 300)

    def is_back() -> bool:
        return endpoint.exists() and json.loads(endpoint.read_text())["incarnation"] == before["incarnation"] + 1

    until(is_back, "the engine to be back", START_S)
    step = last_step(run)
    until(lambda: last_step(run) >= step + 2, "two steps with it", 300)
    assert slurm.job(job)["JobState"] == "RUNNING" and slurm.job(job)["Restarts"] == "0"
    assert every_update_reached_the_engine(run)
    assert sum(line.get("rollout/replicas_lost/sum", 0) for line in lines_of(run / "metrics.jsonl")) == 1
    for node in (1, 2):
        log = (run / "logs" / f"rollout-0.node{node}.log").read_text()
        assert log.count("=== job") == 2 and "incarnation 1, " in log, log
