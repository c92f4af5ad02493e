"""What the launcher knows of a cluster, and where it reads it: a Python file that sets ``CLUSTER``.

In: the name of a file in ``launch/clusters/``, or a path. Out: a :class:`Cluster`. Light and pure but for the file.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_type_hints

from megatron_fp8rl.config import Violation
from megatron_fp8rl.preflight.memory import GPUS, GpuName

FOLDER = Path(__file__).parent / "clusters"
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")
_LONGEST_SIGNAL_S = 65535  # Slurm's
# Options of sbatch that the launcher sets, and the field of CLUSTER or the option that does it, if any.
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
} | dict.fromkeys(
    (
        "output",
        "error",
        "open-mode",
        "ntasks",
        "ntasks-per-node",
        "requeue",
        "no-requeue",
        "parsable",
        "wrap",
        "test-only",
    )
)
# Fields of nemo-run's executor that sbatch gets as they are.
_FURTHER = (
    "qos",
    "mem",
    "mem_per_gpu",
    "mem_per_cpu",
    "comment",
    "constraint",
    "exclude",
    "gres",
    "exclusive",
    "segment",
    "network",
)
# What to write, by a part of the annotation.
_REMEDIES = {
    "slurm": 'Choose "slurm" or "local"',
    "h100": f"Choose one of {', '.join(GPUS)}, in quotes",
    "tuple": 'Write ("first", "second"), and of a single entry ("first",)',
    "dict": 'Write {"name": "value"}',
    "int": "Write a whole number, without quotes",
    "str": "Write text, in quotes",
}


class ClusterError(ValueError):
    """A cluster that cannot be found or read. The message names the file and what would do."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of one kind, and how to get them."""

    kind: Literal["slurm", "local"] = "slurm"  # local: the roles become processes of this machine
    run_root: str | None = None  # shared by all nodes; a relative output_dir starts here. None: the current folder

    # What Slurm is told.
    account: str | None = None
    partition: str | None = None
    time_limit: str = "04:00:00"  # minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S, as sbatch takes it
    sbatch: dict[str, Any] = field(default_factory=dict)  # any further option: {"qos": "high", "exclusive": True}
    srun: tuple[str, ...] = ()  # words added to the srun that starts the agents

    # What a node has.
    gpu: GpuName | None = "h200"  # None: nodes without GPUs
    gpus_per_node: int = 8  # 0 with ``gpu=None``
    ranks_per_node: int | None = None  # of trainer and engines that fit a node; None: one for each GPU
    cpus_per_node: int | None = None  # asked for; None leaves it to the partition
    max_nodes: int | None = None  # that one job may have

    # What the roles run in: a container, or the Python of ``python`` after the lines of ``setup``.
    container_image: str | None = None  # anything that pyxis takes: a .sqsh file, or registry#name:tag
    container_mounts: tuple[str, ...] = ()  # "from:to"; run_root and the run's folder are mounted anyway
    python: str | None = None  # None: "python" in a container, else the one that runs the launcher
    setup: tuple[str, ...] = ()  # lines of shell before the agents: modules, activation
    env: dict[str, str] = field(default_factory=dict)  # of every role, on every node; the shell never sees it

    # Long jobs.
    save_signal_s: int = 300  # before the time limit, when trainers are told to save; a step must fit in
    max_restarts: int = 20  # attempts after the first: time limits, lost nodes and failures together

    @classmethod
    def from_executor(cls, executor: Any, **more: Any) -> Cluster:
        """The cluster that a ``nemo_run.SlurmExecutor`` describes; ``more`` are fields of which it knows nothing.

        Those are ``gpu`` (the kind, unless the nodes have none), ``ranks_per_node`` (without GPUs) and ``run_root``.
        Raises ClusterError for an executor on another machine, or with settings that the launcher would overrule.
        """
        if executor.tunnel.__class__.__name__ != "LocalTunnel":
            raise ClusterError(
                f"executor.tunnel = {type(executor.tunnel).__name__}: the run's folder and the data are read where "
                "the run is planned. Use a LocalTunnel on a login node"
            )
        refused = [
            name for name in ("heterogeneous", "array", "het_group_indices", "retries") if getattr(executor, name)
        ]
        if refused:
            value = getattr(executor, refused[0])
            raise ClusterError(f"executor.{refused[0]} = {value!r}: agents place the roles themselves. Leave it out")
        sbatch = {name: getattr(executor, name) for name in _FURTHER if getattr(executor, name) is not None}
        sbatch |= executor.additional_parameters or {}
        signal_s = re.fullmatch(r"(?:B:)?(?:USR1|SIGUSR1)@(\d+)", executor.signal or "")
        gpus = executor.gpus_per_node or executor.gpus_per_task or 0
        if gpus and "gpu" not in more:
            raise ClusterError(f"executor.gpus_per_node = {gpus}: name the kind of GPU, as gpu='h100'")
        fields = {
            "account": executor.account,
            "partition": executor.partition,
            "time_limit": executor.time,
            "gpu": None,
            "gpus_per_node": gpus,
            "cpus_per_node": executor.cpus_per_task,
            "container_image": executor.container_image,
            "container_mounts": tuple(executor.container_mounts or ()),
            "sbatch": sbatch,
            "srun": tuple(executor.srun_args or ()),
            "env": dict(executor.env_vars),
            "setup": tuple((executor.setup_lines or "").splitlines()),
            **({"save_signal_s": int(signal_s[1])} if signal_s else {}),
        }
        return cls(**fields | more)

    @property
    def slots_per_node(self) -> int:
        """Trainer ranks and engine workers that one node takes."""
        return self.ranks_per_node if self.ranks_per_node is not None else self.gpus_per_node

    @property
    def time_limit_s(self) -> int | None:
        """The limit in seconds; None when it cannot be read."""
        return parse_time_limit(self.time_limit)

    @property
    def interpreter(self) -> str:
        """The Python that starts the agents."""
        return self.python or ("python" if self.container_image else sys.executable)

    def violations(self) -> list[Violation]:
        """Every mistake, fields as they are written in the cluster's file."""
        found = [*_of_nodes(self)]
        if self.kind == "local":
            return found
        limit = self.time_limit_s
        if limit is None:
            remedy = "Write hours as 04:00:00, or days as 2-00:00:00"
            found.append(_bad("time_limit", self.time_limit, "is not a time", remedy))
        if not 1 <= self.save_signal_s <= _LONGEST_SIGNAL_S:
            remedy = f"Slurm takes 1 to {_LONGEST_SIGNAL_S} s; one step and a checkpoint have to fit in"
            found.append(
                _bad("save_signal_s", self.save_signal_s, "is not a valid number of seconds before the limit", remedy)
            )
        elif limit is not None and self.save_signal_s >= limit:
            remedy = f"Set less than the time limit of {limit} s, with room for one step"
            found.append(_bad("save_signal_s", self.save_signal_s, "is longer than the job", remedy))
        if self.max_restarts < 0:
            found.append(_bad("max_restarts", self.max_restarts, "is negative", "Set 0 or more"))
        return found + _of_environment(self) + _of_slurm(self)

    def missing_files(self) -> list[Violation]:
        """Files that the cluster names and this machine does not have."""
        found = []
        image = self.container_image
        if image is not None and image.startswith(("/", ".")):
            found.append(_bad("container_image", image, "does not exist", "Name an image file, or registry#name:tag"))
        for mount in self.container_mounts:
            found.append(
                _bad("container_mounts", mount, "starts at a path that does not exist", "Use a path that all nodes see")
            )
        if self.python is not None and image is None:
            found.append(_bad("python", self.python, "does not exist", "Name the interpreter of all nodes"))
        return [one for one in found if not Path(one.value.partition(":")[0]).exists()]


def _of_nodes(cluster: Cluster) -> list[Violation]:
    found = []
    if cluster.gpu is not None and cluster.gpu not in GPUS:
        found.append(_bad("gpu", cluster.gpu, "is not a known kind", f"Choose one of {', '.join(GPUS)}, or None"))
    if cluster.gpu is None and cluster.gpus_per_node:
        found.append(_bad("gpus_per_node", cluster.gpus_per_node, "with gpu=None", "Set 0, or name the kind of GPU"))
    if cluster.gpu is not None and cluster.gpus_per_node < 1:
        found.append(_bad("gpus_per_node", cluster.gpus_per_node, "is below 1", "Set the GPUs of a node, or gpu=None"))
    if cluster.gpu is None and not cluster.ranks_per_node:
        remedy = "Set how many trainer ranks and engine workers one node takes"
        found.append(_bad("ranks_per_node", cluster.ranks_per_node, "is needed where there are no GPUs", remedy))
    elif cluster.gpu is not None and cluster.ranks_per_node not in (None, cluster.gpus_per_node):
        found.append(_bad("ranks_per_node", cluster.ranks_per_node, "with GPUs", "Leave it out: one rank for each GPU"))
    for name in ("cpus_per_node", "max_nodes"):
        value = getattr(cluster, name)
        if value is not None and value < 1:
            found.append(_bad(name, value, "is below 1", "Set 1 or more, or None"))
    for name, value in cluster.env.items():
        if not isinstance(value, str) or not name or "=" in name or "\0" in name + str(value):
            found.append(
                _bad(f"env[{name!r}]", value, "is not an environment variable", "Use text for names and values")
            )
    return found


def _of_slurm(cluster: Cluster) -> list[Violation]:
    """What would break the batch script, or contradict it."""
    found = []
    texts = {name: getattr(cluster, name) for name in ("account", "partition", "python", "container_image", "run_root")}
    texts |= {f"sbatch[{name!r}]": value for name, value in cluster.sbatch.items()}
    for name in ("srun", "container_mounts"):
        texts |= {f"{name}[{i}]": word for i, word in enumerate(getattr(cluster, name))}
    for name, value in texts.items():
        if isinstance(value, str) and re.search(r"[\r\n]", value):
            found.append(_bad(name, value, "holds a line break", "Write it in one line"))
    for name, value in cluster.sbatch.items():
        if (option := str(name).replace("_", "-")) in _RESERVED:
            remedy = f"Remove it, and use {_RESERVED[option]}" if _RESERVED[option] else "Remove it"
            found.append(_bad(f"sbatch[{name!r}]", value, "is set by the launcher", remedy))
        elif (value is not True and not isinstance(value, (str, int, float))) or value is False:
            remedy = "Write text, a number, or True for an option without a value; or remove it"
            found.append(_bad(f"sbatch[{name!r}]", value, "is not a value of an option", remedy))
    return found


def _of_environment(cluster: Cluster) -> list[Violation]:
    found = []
    if cluster.run_root is not None and not Path(cluster.run_root).is_absolute():
        found.append(_bad("run_root", cluster.run_root, "is not absolute", "Name a folder that all nodes see"))
    if cluster.python is not None and "python" not in cluster.python:
        found.append(_bad("python", cluster.python, "does not name a Python", "Name the interpreter, .../bin/python"))
    image = cluster.container_image
    if image is None and cluster.container_mounts:
        found.append(_bad("container_mounts", cluster.container_mounts, "without container_image", "Remove them"))
    for mount in cluster.container_mounts:
        parts = mount.split(":")
        if len(parts) not in (2, 3) or not all(parts) or "," in mount:
            found.append(_bad("container_mounts", mount, "is not from:to", "pyxis takes no ':' or ',' in a path"))
    for line in cluster.setup:
        if "\n" in line:
            found.append(_bad("setup", line, "holds a line break", "Write one entry for each line"))
    return found


def parse_time_limit(text: str) -> int | None:
    """Seconds of a limit as sbatch takes it; None when it is none."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        return None
    parts = [int(part) for part in match["parts"].split(":")]
    if match["days"] is not None:
        hours, minutes, seconds = [*parts, 0, 0][:3]
        return int(match["days"]) * 86400 + hours * 3600 + minutes * 60 + seconds
    if len(parts) == 1:
        return parts[0] * 60
    if len(parts) == 2:
        return parts[0] * 60 + parts[1]
    return parts[0] * 3600 + parts[1] * 60 + parts[2]


def known() -> list[str]:
    """Names of the clusters that come with the launcher or were put beside them."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


def load(name_or_path: str) -> Cluster:
    """The cluster of a name, or of a path (anything with a '/' or that ends in ``.py``).

    Raises ClusterError that names the file when it is missing, fails, or sets no ``CLUSTER``.
    """
    if os.sep in name_or_path or name_or_path.endswith(".py"):
        path = Path(name_or_path).expanduser()
        if not path.is_file():
            raise ClusterError(f"cluster {name_or_path!r}: there is no such file")
    else:
        path = FOLDER / f"{name_or_path}.py"
        if not path.is_file():
            near = difflib.get_close_matches(name_or_path, known(), n=2, cutoff=0.5)
            hint = f" (did you mean {' or '.join(near)}?)" if near else ""
            raise ClusterError(
                f"unknown cluster {name_or_path!r}{hint}. Clusters: {', '.join(known())}; or give the path of a file"
            )
    spec = importlib.util.spec_from_file_location("_launch_cluster", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        line = getattr(error, "lineno", None) or _line_of(error, path)
        place = f"{path}:{line}" if line else str(path)
        raise ClusterError(f"cluster file {place}: {type(error).__name__}: {error}") from error
    cluster = getattr(module, "CLUSTER", None)
    if not isinstance(cluster, Cluster):
        raise ClusterError(f"cluster file {path} sets CLUSTER to {cluster!r}; it has to be a launch.cluster.Cluster")
    if found := _of_kinds(cluster):
        raise ClusterError(f"cluster file {path}: " + "\n  ".join(map(str, found)))
    return cluster


def _of_kinds(cluster: Cluster) -> list[Violation]:
    """Fields that hold another kind of value than they are declared with, which nothing else could judge."""
    import typeguard  # of tyro; not every reader of a run needs it

    found = []
    for name, kind in get_type_hints(Cluster).items():
        held = getattr(cluster, name)
        try:
            value = tuple(held) if isinstance(held, list) else held
            typeguard.check_type(value, kind, collection_check_strategy=typeguard.CollectionCheckStrategy.ALL_ITEMS)
            is_right = not isinstance(held, bool)
        except typeguard.TypeCheckError:
            is_right = False
        if not is_right:
            remedy = next(how for part, how in _REMEDIES.items() if part in str(kind))
            found.append(_bad(name, held, f"is of type {type(held).__name__}", remedy))
    return found


def _line_of(error: BaseException, path: Path) -> int | None:
    """The last line of the file that the error went through."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _bad(name: str, value: Any, problem: str, remedy: str) -> Violation:
    return Violation(f"CLUSTER.{name}", value, problem, remedy)
