"""Cluster description, loaded from a Python file that sets ``CLUSTER``.

In: the name of a file in ``launch/clusters/``, or a path. Out: a :class:`Cluster`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_type_hints

from megatron_fp8rl.algo.near_matches import near_matches
from megatron_fp8rl.config import Violation
from megatron_fp8rl.preflight.memory import GPUS, GpuName

FOLDER = Path(__file__).parent / "clusters"
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")
_LONGEST_SIGNAL_S = 65535  # Slurm's limit
# sbatch options set by the launcher, with the CLUSTER field or launcher option that controls each.
_RESERVED = {
    "account": "CLUSTER.account",
    "partition": "CLUSTER.partition",
    "time": "CLUSTER.time_limit",
    "cpus-per-task": "CLUSTER.cpus_per_node",
    "gpus-per-node": "CLUSTER.gpus_per_node",
    "signal": "CLUSTER.save_signal_s",
    "nodes": "--nodes",
    "job-name": "--name",
    "array": "--over",
    "wait": "--wait",
} | dict.fromkeys("output error open-mode ntasks ntasks-per-node requeue no-requeue parsable wrap test-only".split())
# Fields of nemo-run's executor passed to sbatch unchanged.
_PASSED = "qos mem mem_per_gpu mem_per_cpu comment constraint exclude gres exclusive segment network".split()
# Remedies by a part of the type annotation.
_REMEDIES = {
    "slurm": 'Choose "slurm" or "local"',
    "h100": f"Choose one of {', '.join(GPUS)}, in quotes",
    "tuple": 'Write ("first", "second"), or ("first",) for a single entry',
    "dict": 'Write {"name": "value"}',
    "int": "Write a whole number, without quotes",
    "str": "Write text, in quotes",
}


class ClusterError(ValueError):
    """A cluster cannot be found or read. The message names the file and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster of identical nodes and its scheduler settings."""

    kind: Literal["slurm", "local"] = "slurm"  # local: roles run as processes on this machine
    run_root: str | None = None  # shared folder for relative output_dirs; None: the current folder

    # Slurm options.
    account: str | None = None
    partition: str | None = None
    time_limit: str | None = (
        "04:00:00"  # None: the partition's default; minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S, as in sbatch
    )
    sbatch: dict[str, Any] = field(default_factory=dict)  # more options: {"qos": "high", "exclusive": True}
    srun: tuple[str, ...] = ()  # more arguments for the srun that starts the agents

    # Node hardware.
    gpu: GpuName | None = "h200"  # None: nodes without GPUs
    gpus_per_node: int = 8  # 0 with ``gpu=None``
    ranks_per_node: int | None = None  # trainer ranks and engine workers per node; None: one per GPU
    cpus_per_node: int | None = None  # CPUs to request; None: partition default
    max_nodes: int | None = None  # limit per job

    # Environment: a container, or ``python`` after the ``setup`` lines.
    container_image: str | None = None  # any pyxis image: a .sqsh file, or registry#name:tag
    container_mounts: tuple[str, ...] = ()  # "from:to"; run_root and the run's folder are always mounted
    python: str | None = None  # None: "python" in a container, otherwise the launcher's interpreter
    setup: tuple[str, ...] = ()  # shell lines before the agents: modules, activation
    env: dict[str, str] = field(default_factory=dict)  # for every role on every node; not passed through a shell

    # Long jobs.
    save_signal_s: int = 300  # seconds before the time limit to save; must cover one step
    max_restarts: int = 20  # attempts after the first, for time limits, lost nodes and failures together

    @classmethod
    def from_executor(cls, executor: Any, **more: Any) -> Cluster:
        """Convert a ``nemo_run.SlurmExecutor``. ``more``: fields that an executor lacks: ``gpu`` (GPU kind),
        ``ranks_per_node`` (without GPUs), ``run_root``. Raises ClusterError for a remote executor, or for settings that
        conflict with the launcher."""
        if executor.tunnel.__class__.__name__ != "LocalTunnel":
            raise ClusterError(
                f"executor.tunnel = {type(executor.tunnel).__name__}: planning reads the run's folder and data "
                "locally. Use a LocalTunnel on a login node"
            )
        for name in ("heterogeneous", "array", "het_group_indices", "retries"):
            if value := getattr(executor, name):
                raise ClusterError(f"executor.{name} = {value!r}: not supported, agents place the roles. Remove it")
        sbatch = {name: getattr(executor, name) for name in _PASSED if getattr(executor, name) is not None}
        sbatch |= executor.additional_parameters or {}
        signal_s = re.fullmatch(r"(?:B:)?(?:USR1|SIGUSR1)@(\d+)", executor.signal or "")
        gpus = executor.gpus_per_node or executor.gpus_per_task or 0
        if gpus and "gpu" not in more:
            raise ClusterError(f"executor.gpus_per_node = {gpus}: name the kind of GPU, as gpu='h100'")
        fields = {
            "account": executor.account,
            "partition": executor.partition,
            "time_limit": str(executor.time) if isinstance(executor.time, int) else executor.time,  # minutes
            "gpu": None,
            "gpus_per_node": gpus,
            "cpus_per_node": executor.cpus_per_task,
            "container_image": executor.container_image,
            "container_mounts": tuple(executor.container_mounts or ()),
            "sbatch": sbatch,
            "srun": tuple(executor.srun_args or ()),
            "env": dict(executor.env_vars or {}),
            "setup": tuple((executor.setup_lines or "").splitlines()),
            **({"save_signal_s": int(signal_s[1])} if signal_s else {}),
        }
        cluster = cls(**fields | more)
        if errors := _type_errors(cluster):
            raise ClusterError("executor: " + "\n  ".join(map(str, errors)))
        return cluster

    @property
    def slots_per_node(self) -> int:
        """Trainer ranks and engine workers per node."""
        return self.ranks_per_node if self.ranks_per_node is not None else self.gpus_per_node

    @property
    def interpreter(self) -> str:
        return self.python or ("python" if self.container_image else sys.executable)

    def violations(self) -> list[Violation]:
        errors = _node_errors(self)
        if self.kind == "local":
            return errors
        limit = None if self.time_limit is None else parse_time_limit(self.time_limit)
        if limit is None and self.time_limit is not None:
            remedy = "Write hours as 04:00:00, or days as 2-00:00:00"
            errors.append(_bad("time_limit", self.time_limit, "is not a time", remedy))
        if not 1 <= self.save_signal_s <= _LONGEST_SIGNAL_S:
            problem = "is not a valid number of seconds before the limit"
            remedy = f"Slurm takes 1 to {_LONGEST_SIGNAL_S} s; allow for one step and a checkpoint"
            errors.append(_bad("save_signal_s", self.save_signal_s, problem, remedy))
        elif limit is not None and self.save_signal_s >= limit:
            remedy = f"Set less than the time limit of {limit} s, and allow for one step"
            errors.append(_bad("save_signal_s", self.save_signal_s, "is longer than the job", remedy))
        if self.max_restarts < 0:
            errors.append(_bad("max_restarts", self.max_restarts, "is negative", "Set 0 or more"))
        return errors + _environment_errors(self) + _slurm_errors(self)

    def missing_files(self) -> list[Violation]:
        """Configured files that do not exist on this machine."""
        files = []
        if self.run_root is not None:
            remedy = "Create it on a file system that all nodes share, or correct the path"
            files.append(_bad("run_root", self.run_root, "does not exist", remedy))
        image = self.container_image
        if image is not None and image.startswith(("/", ".")):
            files.append(_bad("container_image", image, "does not exist", "Name an image file, or registry#name:tag"))
        for mount in self.container_mounts:
            problem = "starts at a path that does not exist"
            files.append(_bad("container_mounts", mount, problem, "Use a path that all nodes see"))
        if self.python is not None and image is None:
            files.append(_bad("python", self.python, "does not exist", "Name the interpreter of all nodes"))
        return [violation for violation in files if not Path(_path_of(violation)).exists()]


def _path_of(violation: Violation) -> str:
    """The path of this machine in a value; a mount is ``from:to``."""
    return violation.value if violation.field == "CLUSTER.run_root" else violation.value.partition(":")[0]


def _node_errors(cluster: Cluster) -> list[Violation]:
    errors = []
    if cluster.gpu is not None and cluster.gpu not in GPUS:
        errors.append(_bad("gpu", cluster.gpu, "is not a known kind", f"Choose one of {', '.join(GPUS)}, or None"))
    if cluster.gpu is None and cluster.gpus_per_node:
        errors.append(_bad("gpus_per_node", cluster.gpus_per_node, "with gpu=None", "Set 0, or name the kind of GPU"))
    if cluster.gpu is not None and cluster.gpus_per_node < 1:
        errors.append(_bad("gpus_per_node", cluster.gpus_per_node, "is below 1", "Set the GPUs of a node, or gpu=None"))
    if cluster.gpu is None and not cluster.ranks_per_node:
        remedy = "Set how many trainer ranks and engine workers one node takes"
        errors.append(_bad("ranks_per_node", cluster.ranks_per_node, "is needed where there are no GPUs", remedy))
    elif cluster.gpu is not None and cluster.ranks_per_node not in (None, cluster.gpus_per_node):
        errors.append(
            _bad("ranks_per_node", cluster.ranks_per_node, "with GPUs", "Leave it out: one rank for each GPU")
        )
    for name in ("cpus_per_node", "max_nodes"):
        value = getattr(cluster, name)
        if value is not None and value < 1:
            errors.append(_bad(name, value, "is below 1", "Set 1 or more, or None"))
    for name, value in cluster.env.items():
        if not isinstance(value, str) or not name or "=" in name or "\0" in name + str(value):
            remedy = "Use text for names and values"
            errors.append(_bad(f"env[{name!r}]", value, "is not an environment variable", remedy))
    return errors


def _slurm_errors(cluster: Cluster) -> list[Violation]:
    """Values that would break the batch script or conflict with it."""
    errors = []
    texts = {name: getattr(cluster, name) for name in ("account", "partition", "python", "container_image", "run_root")}
    texts |= {f"sbatch[{name!r}]": value for name, value in cluster.sbatch.items()}
    for name in ("srun", "container_mounts"):
        texts |= {f"{name}[{i}]": text for i, text in enumerate(getattr(cluster, name))}
    for name, value in texts.items():
        if isinstance(value, str) and re.search(r"[\r\n]", value):
            errors.append(_bad(name, value, "contains a line break", "Write it in one line"))
    for name, value in cluster.sbatch.items():
        if (option := str(name).replace("_", "-")) in _RESERVED:
            remedy = f"Remove it, and use {_RESERVED[option]}" if _RESERVED[option] else "Remove it"
            errors.append(_bad(f"sbatch[{name!r}]", value, "is set by the launcher", remedy))
        elif (value is not True and not isinstance(value, (str, int, float))) or value is False:
            remedy = "Write text, a number, or True for an option without a value; or remove it"
            errors.append(_bad(f"sbatch[{name!r}]", value, "is not a value of an option", remedy))
    return errors


def _environment_errors(cluster: Cluster) -> list[Violation]:
    errors = []
    if cluster.run_root is not None and not Path(cluster.run_root).is_absolute():
        errors.append(_bad("run_root", cluster.run_root, "is not absolute", "Name a folder that all nodes see"))
    if cluster.python is not None and "python" not in cluster.python:
        errors.append(_bad("python", cluster.python, "does not name a Python", "Name the interpreter, .../bin/python"))
    image = cluster.container_image
    if image is None and cluster.container_mounts:
        errors.append(_bad("container_mounts", cluster.container_mounts, "without container_image", "Remove them"))
    for mount in cluster.container_mounts:
        parts = mount.split(":")
        if len(parts) not in (2, 3) or not all(parts) or "," in mount:
            errors.append(_bad("container_mounts", mount, "is not from:to", "pyxis takes no ':' or ',' in a path"))
    for line in cluster.setup:
        if "\n" in line:
            errors.append(_bad("setup", line, "contains a line break", "Write one entry for each line"))
    return errors


def parse_time_limit(text: str) -> int | None:
    """Convert an sbatch time limit to seconds; None if it is invalid."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        return None
    parts = [int(part) for part in match["parts"].split(":")]
    if match["days"] is None and len(parts) < 3:  # minutes, or M:S
        parts = [0, *parts]
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return int(match["days"] or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def known() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


def load(name_or_path: str) -> Cluster:
    """Load a cluster by name, or by path (contains '/' or ends in ``.py``). Raises ClusterError, which names the file,
    if it is missing, fails or sets no ``CLUSTER``."""
    if os.sep in name_or_path or name_or_path.endswith(".py"):
        path = Path(name_or_path).expanduser()
        if not path.is_file():
            raise ClusterError(f"cluster {name_or_path!r}: there is no such file")
    else:
        path = FOLDER / f"{name_or_path}.py"
        if not path.is_file():
            hint = near_matches(name_or_path, known()) or "."
            raise ClusterError(
                f"unknown cluster {name_or_path!r}{hint} Clusters: {', '.join(known())}; or give the path of a file"
            )
    spec = importlib.util.spec_from_file_location("_launch_cluster", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        line = getattr(error, "lineno", None) or _error_line(error, path)
        place = f"{path}:{line}" if line else str(path)
        raise ClusterError(f"cluster file {place}: {type(error).__name__}: {error}") from error
    cluster = getattr(module, "CLUSTER", None)
    if not isinstance(cluster, Cluster):
        raise ClusterError(f"cluster file {path} sets CLUSTER to {cluster!r}; it must be a launch.cluster.Cluster")
    if errors := _type_errors(cluster):
        raise ClusterError(f"cluster file {path}: " + "\n  ".join(map(str, errors)))
    return cluster


def _type_errors(cluster: Cluster) -> list[Violation]:
    import typeguard  # dependency of tyro; imported only when needed

    errors = []
    for name, kind in get_type_hints(Cluster).items():
        value = getattr(cluster, name)
        try:
            checked = tuple(value) if isinstance(value, list) else value
            typeguard.check_type(checked, kind, collection_check_strategy=typeguard.CollectionCheckStrategy.ALL_ITEMS)
            is_valid = not isinstance(value, bool)
        except typeguard.TypeCheckError:
            is_valid = False
        if not is_valid:
            remedy = next(remedy for part, remedy in _REMEDIES.items() if part in str(kind))
            errors.append(_bad(name, value, f"is of type {type(value).__name__}", remedy))
    return errors


def _error_line(error: BaseException, path: Path) -> int | None:
    """The last line of the file in the error's traceback."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _bad(name: str, value: Any, problem: str, remedy: str) -> Violation:
    return Violation(f"CLUSTER.{name}", value, problem, remedy)
