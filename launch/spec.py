"""Job description: roles, their nodes, and the files for discovery between processes.

The login node writes a :class:`JobSpec` to a file, and the agent of every node reads it. Only the owner can read the
file because it contains values of environment variables. Uses only the standard library. Files below the run's folder
on the shared file system::

    launch/jobs.jsonl                     one line for every job submitted: see ``jobs_file``
    launch/jobs/<submission>/             job.json (the job, mode 0600), sbatch.sh, code/, and the job's own output
    launch/<job>.<attempt>/node-<i>.json  {"host", "address", "port"} of node i in this attempt of the job
    launch/<job>.<attempt>/done           the job has ended; contains the exit status
    launch/<job>.<attempt>/first_error.txt
    replicas/<role>.json                  {"name", "url", "host", "pid", "incarnation", "log"} of a running replica
    logs/<role>.node<i>.log               all attempts, each after a header line
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

SAVED = 85  # exit status of a trainer or agent: checkpoint saved, restart to continue

WITHOUT_ENGINES = ("sft", "dpo")
TRAINING_JOBS = ("train", "rl", "distill", *WITHOUT_ENGINES)
Kind = Literal["torchrun", "replica", "command"]
SWEEP, ELEMENT = "sweep.json", "element-"  # in the folder of a sweep: its description, and its runs


@dataclass(frozen=True, kw_only=True)
class Role:
    """One program of the job, on one or several nodes.

    ``command``: the arguments of ``python``, such as ``("-m", "megatron_fp8rl", "rl", ...)``, with the placeholders of
    :meth:`args`, because addresses are known only at run time.
    """

    name: str  # "trainer", "rollout-0", "task": unique in the job, valid as a file name
    kind: Kind  # started under torchrun, as a completion server, or as a plain command
    nodes: tuple[int, ...]  # node indices in the job, in rank order
    command: tuple[str, ...]
    processes_per_node: int = 1  # for "torchrun"
    gpus: tuple[int, ...] = ()  # indices on each node; empty: all visible GPUs, or none
    restart: bool = False  # restart it when it dies
    essential: bool = True  # the job ends when this role ends
    env: dict[str, str] = field(default_factory=dict)  # added to the job's env

    def rank_of(self, node: int) -> int:
        """Rank of a node among this role's nodes. Raises ValueError if the role is not on the node."""
        return self.nodes.index(node)

    def args(self, node: int, *, head_address: str, head_port: int) -> tuple[str, ...]:
        """The command on one node, with ``{node_rank}``, ``{head_address}`` and ``{head_port}`` filled in: the address
        of the role's first node and a free port there."""
        values = {"{node_rank}": str(self.rank_of(node)), "{head_address}": head_address, "{head_port}": str(head_port)}
        pattern = "|".join(map(re.escape, values))
        return tuple(re.sub(pattern, lambda match: values[match[0]], arg) for arg in self.command)


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A complete job description, as agents read it."""

    name: str
    run_dir: str  # absolute, on a file system that all nodes share
    roles: tuple[Role, ...]
    nodes: int
    max_restarts: int = 3  # attempts after the first, for any reason
    save_signal_s: int = 300  # seconds before the time limit to request a save
    env: dict[str, str] = field(default_factory=dict)  # for every role
    user_files: tuple[str, ...] = ()  # absolute paths of user reward files; a queued job uses copies
    user_modules: tuple[str, ...] = ()  # absolute paths of user Python modules; a queued job uses copies

    def on_node(self, node: int) -> tuple[Role, ...]:
        if not 0 <= node < self.nodes:
            raise ValueError(f"job {self.name!r} has no node {node}, only 0 to {self.nodes - 1}")
        return tuple(role for role in self.roles if node in role.nodes)

    def role(self, name: str) -> Role:
        """The role with a name. Raises KeyError, which lists the names."""
        for role in self.roles:
            if role.name == name:
                return role
        raise KeyError(f"job {self.name!r} has no role {name!r}: {', '.join(role.name for role in self.roles)}")

    def problems(self) -> list[str]:
        """Inconsistencies, one sentence each; empty for a valid job."""
        names = [role.name for role in self.roles]
        errors = [f"two roles are named {name!r}" for name in dict.fromkeys(names) if names.count(name) > 1]
        for role in self.roles:
            if not role.nodes or any(not 0 <= node < self.nodes for node in role.nodes):
                errors.append(f"role {role.name!r} is on nodes {list(role.nodes)} of a job with {self.nodes}")
        if idle := [node for node in range(self.nodes) if not any(node in role.nodes for role in self.roles)]:
            errors.append(f"nodes {idle} have no role")
        if not any(role.essential for role in self.roles):
            errors.append("no role is essential, so the job would never end")
        if not Path(self.run_dir).is_absolute():
            errors.append(f"run_dir {self.run_dir!r} is not absolute")
        return errors

    def save(self, path: str | Path) -> str:
        """Write the job to a file with mode 0600 and return its path. Raises FileExistsError."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(self), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        return str(path)

    @classmethod
    def load(cls, path: str | Path) -> JobSpec:
        """Read a file written by :meth:`save`. Raises ValueError for other content."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            sequences = {name: tuple(values.get(name, ())) for name in ("user_files", "user_modules")}
            return cls(**{**values, **sequences, "roles": tuple(map(_role, values["roles"]))})
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is not a job file: {error}") from error


def launch_dir(run_dir: str | Path) -> Path:
    return Path(run_dir) / "launch"


def submission_dir(run_dir: str | Path, submission: str) -> Path:
    return launch_dir(run_dir) / "jobs" / submission


def spec_file(run_dir: str | Path, submission: str) -> Path:
    return submission_dir(run_dir, submission) / "job.json"


def jobs_file(run_dir: str | Path) -> Path:
    """JSON-lines file of all submitted jobs, oldest first:

    {"job_id", "cluster", "kind": "slurm" | "local", "name", "nodes", "submitted_at" (seconds), "folder" (of the job's
    output), "script", "spec" (path of :meth:`JobSpec.save`)}. ``job_id``: Slurm's number as text, or "local-<pid>".
    """
    return launch_dir(run_dir) / "jobs.jsonl"


def attempt_dir(run_dir: str | Path, job_id: str, attempt: int) -> Path:
    """Discovery folder for the agents of one attempt. Attempts count from 0."""
    return launch_dir(run_dir) / f"{job_id}.{attempt}"


def endpoint_file(run_dir: str | Path, role_name: str) -> Path:
    return Path(run_dir) / "replicas" / f"{role_name}.json"


def log_file(run_dir: str | Path, role_name: str, node: int) -> Path:
    """Log of one role on one node, for all attempts."""
    return Path(run_dir) / "logs" / f"{role_name}.node{node}.log"


def read_jobs(run_dir: str | Path) -> list[dict[str, Any]]:
    """Entries of :func:`jobs_file`, oldest first; empty if nothing was submitted."""
    try:
        lines = jobs_file(run_dir).read_text().splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.strip()]


def record_job(
    spec: JobSpec, *, job_id: str, cluster: str, kind: str, folder: str, file: str, script: str = ""
) -> None:
    """Append a job to :func:`jobs_file`. ``file``: path of the saved ``spec``."""
    job = {"job_id": job_id, "cluster": cluster, "kind": kind, "name": spec.name, "nodes": spec.nodes}
    files = {"folder": folder, "script": script, "spec": file}
    add_job(spec.run_dir, {**job, "submitted_at": time.time(), **files})


def add_job(run_dir: str | Path, job: dict[str, Any]) -> None:
    """Append one line to :func:`jobs_file`."""
    path = jobs_file(run_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(job) + "\n")


def remove_job(run_dir: str | Path, job_id: str) -> None:
    """Remove a refused job from :func:`jobs_file`."""
    path, jobs = jobs_file(run_dir), [job for job in read_jobs(run_dir) if job["job_id"] != job_id]
    if jobs:
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text("".join(json.dumps(job) + "\n" for job in jobs))
        os.replace(temporary, path)
    else:
        path.unlink(missing_ok=True)


def escape_braces(path: str) -> str:
    """A path as a value of ``--output_dir``, which is a format string."""
    return path.replace("{", "{{").replace("}", "}}")


def format_nodes(nodes: Sequence[int]) -> str:
    """Format node indices as ``node 2`` or ``nodes 0-3``."""
    if len(nodes) == 1:
        return f"node {nodes[0]}"
    is_run = list(nodes) == list(range(nodes[0], nodes[0] + len(nodes)))
    return f"nodes {nodes[0]}-{nodes[-1]}" if is_run else f"nodes {', '.join(map(str, nodes))}"


def _role(values: dict[str, Any]) -> Role:
    sequences = ("nodes", "command", "gpus")
    return Role(**{name: tuple(value) if name in sequences else value for name, value in values.items()})
