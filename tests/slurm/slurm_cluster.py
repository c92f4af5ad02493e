"""The test cluster as tests use it: commands of Slurm, the launcher as a user calls it, and nodes that lose power."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch import spec

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("cluster.sh")
STATE = Path(os.environ.get("FP8RL_SLURM_DIR", "/var/tmp/fp8rl-slurm"))
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY")
NUM_NODES = 4


@dataclass
class Launched:
    """What one call of the launcher said."""

    status: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


@dataclass
class SlurmCluster:
    """The cluster that ``cluster.sh`` runs. ``shared`` is on every node; ``/tmp`` is not."""

    shared: Path
    environment: dict[str, str] = field(default_factory=dict)

    def command(self, *words: str | Path, deadline_s: float = 180.0) -> str:
        """Output of a command that has to succeed."""
        done = subprocess.run(
            list(map(str, words)), env=self.environment, capture_output=True, text=True, timeout=deadline_s
        )
        assert done.returncode == 0, f"{' '.join(map(str, words))}: exit status {done.returncode}: {done.stderr}"
        return done.stdout.strip()

    def launch(self, *words: str | Path, deadline_s: float = 400.0, cwd: Path = ROOT, **env: str) -> Launched:
        """``python -m launch ...``, as a user on the login node types it."""
        began_s = time.monotonic()
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            [sys.executable, "-m", "launch", *map(str, words)],
            cwd=cwd,
            env=self.environment | {"PYTHONPATH": path} | env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=deadline_s,
        )
        return Launched(done.returncode, done.stdout, done.stderr, time.monotonic() - began_s)

    def job(self, job_id: str) -> dict[str, str]:
        """What ``scontrol show job`` knows, by name; without word breaks in values, as in JobState."""
        text = self.command("scontrol", "-o", "show", "job", job_id)
        return dict(re.findall(r"(?:^|\s)(\w[\w/:]*)=(\S*)", text.splitlines()[0]))

    def wait(self, job_id: str, states: Sequence[str] = ENDED, deadline_s: float = 300.0) -> str:
        """The job's state, once it is one of ``states``. An assertion that shows its logs when it does not come."""
        self.until(
            lambda: self.job(job_id)["JobState"] in states,
            f"job {job_id} to be one of {', '.join(states)}",
            deadline_s,
            lambda: f"it is {self.job(job_id)['JobState']}",
        )
        return self.job(job_id)["JobState"]

    def until(
        self,
        reached: Callable[[], Any],
        what: str,
        deadline_s: float,
        otherwise: Callable[[], str] = lambda: "",
        job: str | None = None,
    ) -> None:
        """Wait until ``reached()``; fail after ``deadline_s`` seconds, or when ``job`` ends before."""
        end_s = time.monotonic() + deadline_s
        while not reached():
            assert time.monotonic() < end_s, f"waited {deadline_s:g} s for {what}; {otherwise()}"
            if job is not None and self.job(job)["JobState"] in ENDED:
                assert reached(), f"job {job} is over before {what}; {otherwise()}"
                return
            time.sleep(0.2)

    def kill_node(self, number: int) -> None:
        """Node ``number`` (from 1) loses power."""
        self.command(SCRIPT, "kill-node", str(number))

    def start_node(self, number: int) -> None:
        """It is back, with nothing running."""
        self.command(SCRIPT, "start-node", str(number))

    def settle(self) -> None:
        """No job is left, and all nodes are there and idle: what one test did is not seen by the next."""
        self.command("scancel", "--user", "root")
        self.until(lambda: not self.command("squeue", "-h"), "an empty queue", 240, lambda: self.command("squeue"))
        for number in range(1, NUM_NODES + 1):
            state = self.command("sinfo", "-h", "-n", f"node{number}", "-p", "main", "-o", "%T")
            if state.startswith("down") or "*" in state:
                self.kill_node(number)
                self.start_node(number)

        def are_idle() -> bool:
            return self.command("sinfo", "-h", "-p", "main", "-o", "%T %D") == f"idle {NUM_NODES}"

        self.until(are_idle, "idle nodes", 240, lambda: self.command("sinfo", "-N", "-l"))


def last_job(run_dir: Path) -> str:
    """Number of the job that was submitted last for a run."""
    return spec.read_jobs(run_dir)[-1]["job_id"]


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Finished lines of a JSON Lines file that somebody may be writing; empty when it is not there yet."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def logs_of(run_dir: Path) -> str:
    """All that a run has said so far, for the message of an assertion."""
    found = [path for path in sorted(run_dir.rglob("*")) if path.suffix in (".log", ".out", ".txt") and path.is_file()]
    return "\n".join(f"==> {path} <==\n{path.read_text(errors='replace')[-3000:]}" for path in found)
