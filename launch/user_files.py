"""Finds the user's files that a run needs: code that is copied with the job, and paths that the nodes must see.

Reads module sources without importing them.
"""

from __future__ import annotations

import ast
import dataclasses
import glob
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.cluster import Cluster
from launch.slurm import INSTALLED, PACKAGES, has_other_nodes, python_files
from megatron_fp8rl.config import AlgoConfig, DataConfig, RunConfig
from megatron_fp8rl.envs.rewards.functions import parse
from megatron_fp8rl.envs.source_kind import CLASS, kind_of

# Prefixes of shared file system types in /proc/mounts.
_SHARED = tuple("nfs lustre gpfs beegfs ceph wekafs panfs pvfs2 cifs smb3 9p afs fuse. virtiofs".split())
_NODE_FOLDERS = ("/tmp", "/dev/shm", "/run")
_PATH_FIELDS = (
    "hf_path",
    "tokenizer",
    "dataset",
    "eval",
    "teacher",
)  # may name a folder of the current folder, without a '/'


def function_files(data: DataConfig) -> tuple[str, ...]:
    """Absolute paths of the files in ``FILE.py:function`` of rewards and agents."""
    names = [reward.function for source in data.environments for reward in source.rewards]
    names += [source.agent for source in data.environments]
    return tuple(dict.fromkeys(str(parse(name)[0].absolute()) for name in names if ".py:" in name))


def modules(algo: AlgoConfig, data: DataConfig, config_name: str = "") -> tuple[str, ...]:
    """Packages (folders) and modules (files) that the arguments name, and the local modules that these and the files of
    functions import. Omits installed modules and this code. The configuration check reports missing modules."""
    names = [config_name, algo.loss, algo.advantage]
    for source in data.environments:
        names += [source.dataset.removeprefix(CLASS)] if kind_of(source.dataset) == "class" else []
        names += [source.agent, *(reward.function for reward in source.rewards)]
    paths: dict[str, None] = {}
    for name in names:
        if ".py:" not in name and ":" in name and name.partition(":")[0].replace(".", "").isidentifier():
            _collect(name.partition(":")[0].partition(".")[0], paths)
    for file in map(Path, function_files(data)):
        for other in sorted(_imports(file)):
            _collect(other, paths)
    return tuple(paths)


def unreachable(
    cfg: RunConfig, cluster: Cluster, run_dir: str, mounts: str | None = None, *, other_nodes: bool | None = None
) -> list[str]:
    """Errors for paths in ``cfg``, and for the run's folder, that the nodes of a Slurm cluster cannot see.

    ``mounts``: text of /proc/mounts. ``other_nodes``: whether Slurm has nodes beside this machine. None: ask.
    """
    mounts = Path("/proc/mounts").read_text() if mounts is None else mounts
    other_nodes = has_other_nodes() if other_nodes is None else other_nodes
    is_run_shared = _file_system(run_dir, mounts).startswith(_SHARED)
    errors = []
    if other_nodes and (folder := _node_folder(run_dir, mounts)):
        errors.append(
            f"--output_dir = {run_dir!r}: is in {folder}, which is local to each node. Set CLUSTER.run_root to a "
            "folder that all nodes share."
        )
    for field, value in _texts(cfg, "-"):
        path = _existing(field, value)
        if path is None or field == "--output_dir":
            continue
        if not path.is_absolute():
            problem = "is relative to the current folder, which differs on the nodes"
            remedy = f"Write {Path(value).expanduser().absolute()}"
        elif cluster.container_image is not None and not _is_mounted(path, cluster, run_dir):
            problem = "is not mounted into the container"
            remedy = f"Add '{path.parent}:{path.parent}' to CLUSTER.container_mounts"
        elif is_run_shared and not (kind := _file_system(str(path), mounts)).startswith(_SHARED):
            problem = f"is on a local file system of this machine ({kind}), which the nodes do not see"
            remedy = f"Copy it below {Path(run_dir).parent}"
        elif other_nodes and (folder := _node_folder(str(path), mounts)):
            problem = f"is in {folder}, which is local to each node"
            remedy = f"Copy it below {Path(run_dir).parent}"
        else:
            continue
        errors.append(f"{field} = {value!r}: {problem}. {remedy}.")
    return errors


def _existing(field: str, value: str) -> Path | None:
    """The file or folder that a text names on this machine, or the first file of a pattern; None if it names none."""
    path = Path(value).expanduser()
    if value and glob.has_magic(value) and (files := sorted(glob.iglob(str(path), recursive=True))):
        return Path(files[0])
    is_path = os.sep in value or path.suffix or field.rpartition(".")[2] in _PATH_FIELDS
    return path if value and is_path and path.exists() else None


def _node_folder(path: str, mounts: str) -> str:
    """The folder that each node has for itself and that contains the path; empty without one."""
    if _file_system(path, mounts).startswith(_SHARED):
        return ""
    real = Path(os.path.realpath(path))
    return next((folder for folder in _NODE_FOLDERS if real.is_relative_to(folder)), "")


def _collect(name: str, paths: dict[str, None]) -> None:
    """Add the top-level module ``name`` and its imports from the same folder to ``paths``."""
    if name in PACKAGES:
        return
    module = sys.modules.get(name)
    spec = module.__spec__ if module is not None else importlib.util.find_spec(name)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if spec is None or not (spec.has_location or folders):
        return
    path = Path(folders[0] if folders else spec.origin).absolute()  # a package without __init__.py has no origin
    standard = Path(sysconfig.get_paths()["stdlib"])
    is_installed = not INSTALLED.isdisjoint(path.parts) or path.is_relative_to(standard)
    if is_installed or not path.exists() or str(path) in paths:
        return
    paths[str(path)] = None
    for source in python_files(path) if folders else [path]:
        for other in sorted(_imports(source)):
            if (path.parent / f"{other}.py").is_file() or (path.parent / other).is_dir():
                _collect(other, paths)


def _imports(source: Path) -> set[str]:
    """Top-level names of the modules that a file imports; empty if the file is missing or not Python."""
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return set()
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    return {name.partition(".")[0] for name in names} - {""}


def _texts(value: Any, field: str) -> Iterator[tuple[str, str]]:
    """(option, text) of every text in a configuration."""
    if isinstance(value, str):
        yield field, value
    elif dataclasses.is_dataclass(value):
        for inner in dataclasses.fields(value):
            yield from _texts(getattr(value, inner.name), f"{field}{'-' if field == '-' else '.'}{inner.name}")
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts(inner, f"{field}.{name}")
    elif isinstance(value, (tuple, list)):
        for index, inner in enumerate(value):
            yield from _texts(inner, f"{field}.{index}")


def _is_mounted(path: Path, cluster: Cluster, run_dir: str) -> bool:
    """Whether the container sees the same path."""
    ends = [mount.split(":")[1] for mount in cluster.container_mounts if len(mount.split(":")) > 1]
    return any(path.is_relative_to(end) for end in (*ends, run_dir, *([cluster.run_root] if cluster.run_root else [])))


def _file_system(path: str, mounts: str) -> str:
    """The file system type of a path, which need not exist."""
    entries = [line.split()[1:3] for line in mounts.splitlines() if len(line.split()) > 2]
    real = Path(os.path.realpath(path))
    matches = [(len(point), kind) for point, kind in entries if real.is_relative_to(point.replace("\\040", " "))]
    return max(matches, default=(0, "unknown"))[1]
