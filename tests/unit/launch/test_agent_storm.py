"""Thirty-two agents, each in namespaces of its own as on a node of its own, and kills at random: replicas and nodes.

Nothing is lost but the steps since the last save. ``FP8RL_STORM_S`` says how long kills go on; 1200 is the long test.
"""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.helpers.agents import FAKE, Job, replica, trainer
from tests.helpers.launching import saved
from tests.helpers.processes import until

STORM_S = float(os.environ.get("FP8RL_STORM_S", "30"))
NODES, TRAINERS, SAVE_EVERY, BETWEEN_S = 32, 4, 10, (2.0, 6.0)


class Nodes(Job):
    """A job whose agents share no network and no processes. What Slurm does to it, the test does."""

    before = ("unshare", "--net", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc")

    @property
    def file(self) -> str:
        return saved(self.spec)

    def requeue(self, attempt: int) -> None:
        """A node is lost: end all others, as a scheduler does, and start on 32 nodes again."""
        for agent in self.agents:
            agent.send_signal(signal.SIGKILL)  # no time to save: the worst case
        for agent in self.agents:
            agent.wait(60)
        self.start(attempt)


def roles_of(job: Nodes, word: str) -> list[int]:
    """Processes of the job's fake roles whose command has ``word``, by their ids here."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"FAKE_RUN={job.run_dir}".encode() not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            command = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if FAKE.encode() in command and word.encode() in command:
            found.append(int(folder.name))
    return found


def latest_save(job: Nodes) -> int:
    return max((int(path.name[5:]) for path in (job.run_dir / "checkpoints").glob("step_*")), default=0)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
def test_nothing_is_lost_but_the_steps_since_the_last_save(tmp_path: Path):
    draw, steps = random.Random(20), 100_000  # more than there is time for
    roles = [trainer(str(steps), "--save-every", str(SAVE_EVERY), nodes=tuple(range(TRAINERS)))]
    roles += [replica(i, TRAINERS + i) for i in range(NODES - TRAINERS)]
    job = Nodes(tmp_path, *roles, num_nodes=NODES, max_restarts=1000)
    attempt, killed, resumed_from, restart_s = 0, {"replica": 0, "node": 0}, [], []
    job.start()
    try:
        job.until(lambda: (job.run_dir / "metrics.jsonl").exists() and len(job.steps()) > 5)
        end = time.monotonic() + STORM_S
        while time.monotonic() < end:
            time.sleep(draw.uniform(*BETWEEN_S))
            if draw.random() < 0.6:
                victims = roles_of(job, "serve")
                os.kill(draw.choice(victims), signal.SIGKILL)
                killed["replica"] += 1
                assert all(agent.poll() is None for agent in job.agents), "a replica's death ended an agent"
                continue
            job.agents[draw.randrange(NODES)].send_signal(signal.SIGKILL)
            killed["node"] += 1
            attempt, lost = attempt + 1, time.monotonic()
            job.requeue(attempt)
            resumed_from.append((len(job.steps()), latest_save(job)))
            done = len(job.steps())
            job.until(lambda done=done: len(job.steps()) > done)
            restart_s.append(time.monotonic() - lost)
        until(lambda: len(roles_of(job, "serve")) == NODES - TRAINERS, "all replicas to be back")
    finally:
        for agent in job.agents:
            agent.kill()
            agent.wait(60)
    found = job.steps()
    for position, save in resumed_from:
        before, after = found[position - 1], found[position]
        assert after == save + 1, "training goes on after the last save"
        assert 0 <= before - save <= SAVE_EVERY, "no more is repeated than was not saved"
    assert sorted(set(found)) == list(range(1, max(found) + 1)), "no step is missing"
    assert killed["node"] and killed["replica"]
    print(
        f"\n{STORM_S:.0f} s: killed {killed}; {max(found)} steps, {len(found) - max(found)} repeated; "
        f"back in {min(restart_s):.1f} to {max(restart_s):.1f} s"
    )
