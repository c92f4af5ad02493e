"""What a job is: its roles, the nodes that they run on, and the files by which everybody finds everybody.

Light (the standard library alone): the login node writes a :class:`JobSpec` into a file that its owner alone can read,
since it holds the values of environment variables, and the agent of every node reads it again.

Files of a run, all below its folder on the shared file system::

    launch/jobs.jsonl                     one line for every job submitted: see ``jobs_file``
    launch/jobs/<submission>/             job.json (the job, mode 0600), sbatch.sh, code/, and the job's own output
    launch/<job>.<attempt>/node-<i>.json  {"host", "address", "port"} of node i in this attempt of the job
    launch/<job>.<attempt>/done           the job is over; its text is the exit status
    launch/<job>.<attempt>/first_error.txt
    replicas/<role>.json                  {"name", "url", "host", "pid", "incarnation", "log"} of a replica that listens
    logs/<role>.node<i>.log               all attempts, each below a header line
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

SAVED = 85  # exit status of a trainer, and of an agent, that saved a checkpoint and asks to be started again

Kind = Literal["torchrun", "replica", "command"]
SWEEP, ELEMENT = "sweep.json", "element-"  # in the folder of a sweep: what it is, and its runs


@dataclass(frozen=True, kw_only=True)
class Role:
    """One program of the job, on one node or several.

    ``command`` is what stands behind ``python``: ``("-m", "megatron_fp8rl", "rl", ...)``. Words may hold the fields of
    :meth:`words`, since addresses are known only when the nodes are.
    """

    name: str  # "trainer", "rollout-0", "task": unique in the job, and fit for a file name
    kind: Kind  # how the agent starts it: under torchrun, as a server of completions, or as it is
    nodes: tuple[int, ...]  # indices of the job's nodes; their order is the order of ranks
    command: tuple[str, ...]
    processes_per_node: int = 1  # of "torchrun"
    gpus: tuple[int, ...] = ()  # indices on each of its nodes; empty: all that the job sees, or none
    restart: bool = False  # started again when it dies, while the job goes on
    essential: bool = True  # the job ends when it ends
    env: dict[str, str] = field(default_factory=dict)  # on top of the job's

    def rank_of(self, node: int) -> int:
        """Rank of a node of the job among the nodes of this role. Raises ValueError for a node without it."""
        return self.nodes.index(node)

    def words(self, node: int, *, head_address: str, head_port: int) -> tuple[str, ...]:
        """The command on one node, with ``{node_rank}``, ``{head_address}`` and ``{head_port}`` filled in.

        ``head_address`` is the address of the role's first node, ``head_port`` a port that is free there.
        """
        values = {"{node_rank}": str(self.rank_of(node)), "{head_address}": head_address, "{head_port}": str(head_port)}
        return tuple(_fill(word, values) for word in self.command)


@dataclass(frozen=True, kw_only=True)
class NodePlan:
    """What one node of the job carries."""

    node: int
    roles: tuple[Role, ...]


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A whole job: everything that an agent has to know."""

    name: str
    run_dir: str  # absolute, on a file system that all nodes share
    roles: tuple[Role, ...]
    nodes: int
    max_restarts: int = 3  # attempts after the first, whatever ended them
    save_signal_s: int = 300  # seconds before the time limit at which the job is told to save
    env: dict[str, str] = field(default_factory=dict)  # of every role
    own_files: tuple[str, ...] = ()  # absolute: reward functions of the user, of which a queued job runs copies
    own_modules: tuple[str, ...] = ()  # absolute: folders and files of the user's Python modules, likewise

    def on_node(self, node: int) -> NodePlan:
        """The roles that have a part on a node, in the order of the job."""
        if not 0 <= node < self.nodes:
            raise ValueError(f"job {self.name!r} has nodes 0 to {self.nodes - 1}, and no node {node}")
        return NodePlan(node=node, roles=tuple(role for role in self.roles if node in role.nodes))

    def role(self, name: str) -> Role:
        """The role of a name. Raises KeyError with the names that there are."""
        for role in self.roles:
            if role.name == name:
                return role
        raise KeyError(f"job {self.name!r} has no role {name!r}: {', '.join(role.name for role in self.roles)}")

    def problems(self) -> list[str]:
        """What is wrong in itself, each in one sentence; empty for a job that agents can start."""
        found = []
        names = [role.name for role in self.roles]
        found += [f"two roles are named {name!r}" for name in dict.fromkeys(names) if names.count(name) > 1]
        for role in self.roles:
            beyond = [node for node in role.nodes if not 0 <= node < self.nodes]
            if beyond or not role.nodes:
                found.append(f"role {role.name!r} is on nodes {list(role.nodes)} of a job with {self.nodes}")
        idle = [node for node in range(self.nodes) if not any(node in role.nodes for role in self.roles)]
        if idle:
            found.append(f"nodes {idle} carry no role")
        if not any(role.essential for role in self.roles):
            found.append("no role is essential, so the job would never end")
        if not Path(self.run_dir).is_absolute():
            found.append(f"run_dir {self.run_dir!r} is not absolute")
        return found

    def save(self, path: str | Path) -> str:
        """Write the job to a file of mode 0600 and return its path. Raises FileExistsError if it is there already."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(self), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        return str(path)

    @classmethod
    def load(cls, path: str | Path) -> JobSpec:
        """The inverse of :meth:`save`. Raises ValueError for anything else."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            sequences = {name: tuple(values.get(name, ())) for name in ("own_files", "own_modules")}
            return cls(**{**values, **sequences, "roles": tuple(map(_role, values["roles"]))})
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is not the file of a job: {error}") from error


def launch_dir(run_dir: str | Path) -> Path:
    """Where launcher and agents keep their files."""
    return Path(run_dir) / "launch"


def submission_dir(run_dir: str | Path, submission: str) -> Path:
    """Where everything of a submission is."""
    return launch_dir(run_dir) / "jobs" / submission


def spec_file(run_dir: str | Path, submission: str) -> Path:
    """Where the job of a submission is."""
    return submission_dir(run_dir, submission) / "job.json"


def jobs_file(run_dir: str | Path) -> Path:
    """JSON lines, oldest first, one for every job submitted:

    {"job_id", "cluster", "kind": "slurm" | "local", "name", "nodes", "submitted_at" (seconds), "folder" (of the
    job's own output), "script", "spec" (path of :meth:`JobSpec.save`)}. The ``job_id`` of Slurm is its number as text, that of this machine "local-<pid>".
    """
    return launch_dir(run_dir) / "jobs.jsonl"


def attempt_dir(run_dir: str | Path, job_id: str, attempt: int) -> Path:
    """Where the agents of one attempt of a job find each other. Attempts count from 0."""
    return launch_dir(run_dir) / f"{job_id}.{attempt}"


def endpoint_file(run_dir: str | Path, role_name: str) -> Path:
    """Where a replica says that it listens."""
    return Path(run_dir) / "replicas" / f"{role_name}.json"


def log_file(run_dir: str | Path, role_name: str, node: int) -> Path:
    """Output of one role on one node, of all attempts."""
    return Path(run_dir) / "logs" / f"{role_name}.node{node}.log"


def read_jobs(run_dir: str | Path) -> list[dict[str, Any]]:
    """The lines of :func:`jobs_file`, oldest first; empty when nothing was submitted."""
    try:
        lines = jobs_file(run_dir).read_text().splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.strip()]


def add_job(run_dir: str | Path, job: dict[str, Any]) -> None:
    """Append one line to :func:`jobs_file`."""
    path = jobs_file(run_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(job) + "\n")


def nodes_in_words(nodes: Sequence[int]) -> str:
    """``node 2`` or ``nodes 0-3``, as logs and reports write them."""
    if len(nodes) == 1:
        return f"node {nodes[0]}"
    is_run = list(nodes) == list(range(nodes[0], nodes[0] + len(nodes)))
    return f"nodes {nodes[0]}-{nodes[-1]}" if is_run else f"nodes {', '.join(map(str, nodes))}"


def _role(values: dict[str, Any]) -> Role:
    sequences = ("nodes", "command", "gpus")
    return Role(**{name: tuple(value) if name in sequences else value for name, value in values.items()})


def _fill(word: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word
