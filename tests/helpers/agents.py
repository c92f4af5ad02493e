"""Jobs whose nodes are processes of this machine, with roles that only pretend."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.spec import JobSpec, Role, attempt_dir, log_file
from tests.helpers.launching import saved
from tests.helpers.processes import DEADLINE_S, until

ROOT = Path(__file__).resolve().parents[2]
FAKE = str(Path(__file__).with_name("fake_role.py"))
HOLD = ("--hold-at", "5", "--for", "go")  # step 5, until the test says so


def trainer(*args: str, nodes: tuple[int, ...] = (0,), kind: str = "command") -> Role:
    return Role(name="trainer", kind=kind, nodes=nodes, command=(FAKE, "train", *args))


def replica(index: int, node: int, *args: str) -> Role:
    command = (FAKE, "serve", *args)
    return Role(name=f"rollout-{index}", kind="replica", nodes=(node,), command=command, restart=True, essential=False)


class Job:
    """A job whose nodes are processes of this machine."""

    before: tuple[str, ...] = ()  # words before the command of an agent

    def __init__(self, folder: Path, *roles: Role, num_nodes: int, **how: int) -> None:
        self.run_dir = folder / "a run with 'quotes'"
        self.run_dir.mkdir(exist_ok=True)
        self.num_nodes = num_nodes
        environment = {"FAKE_RUN": str(self.run_dir)}
        self.spec = JobSpec(
            name="fake", run_dir=str(self.run_dir), roles=roles, nodes=num_nodes, env=environment, **how
        )

    def start(self, attempt: int = 0, nodes: tuple[int, ...] | None = None, **environment: str) -> None:
        here = {"LAUNCH_JOB": "local-1", "LAUNCH_NODES": str(self.num_nodes), "LAUNCH_ATTEMPT": str(attempt)}
        self.board = attempt_dir(self.run_dir, "local-1", attempt)
        self.agents, self.outputs = [], []
        for node in nodes or range(self.num_nodes):
            self.outputs.append(self.run_dir / f"agent.{attempt}.{node}.out")
            with self.outputs[-1].open("w") as output:
                agent = subprocess.Popen(
                    [*self.before, sys.executable, "-m", "launch.agent", saved(self.spec)],
                    cwd=ROOT,
                    env={**os.environ, "LAUNCH_GRACE_S": "3", **here, "LAUNCH_NODE": str(node), **environment},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self.agents.append(agent)

    def wait(self) -> tuple[set[int], list[str]]:
        """(exit statuses, outputs) of the agents."""
        try:
            statuses = {agent.wait(2 * DEADLINE_S) for agent in self.agents}
        except subprocess.TimeoutExpired:
            for agent in self.agents:
                agent.kill()
            pytest.fail("agents did not end:\n" + "\n".join(output.read_text() for output in self.outputs))
        return statuses, [output.read_text() for output in self.outputs]

    def run(self, attempt: int = 0, **environment: str) -> tuple[set[int], list[str]]:
        self.start(attempt, **environment)
        return self.wait()

    def until(self, condition: Callable[[], bool]) -> None:
        def reached() -> bool:
            if condition():
                return True
            said = "\n".join(output.read_text() for output in self.outputs)
            assert all(agent.poll() is None for agent in self.agents), f"an agent has ended:\n{said}"
            return False

        until(reached, "a job to get there")

    def log(self, role: str, node: int) -> str:
        path = log_file(self.run_dir, role, node)
        return path.read_text() if path.exists() else ""

    def steps(self) -> list[int]:
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines]


def fake_processes(run_dir: Path) -> list[str]:
    """Commands of processes that the job started and that still run."""
    result = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"FAKE_RUN={run_dir}".encode() in environment.read_bytes().split(b"\0"):
                result.append((environment.parent / "cmdline").read_text())
        except OSError:
            continue
    return result


def nothing_is_left(run_dir: Path) -> bool:
    """Whether no process runs. A killed process stays until the system ends it."""
    until(lambda: fake_processes(run_dir) == [], "the end of what the job started")
    return True
