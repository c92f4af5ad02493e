"""Finds the user's files that a run needs: code that is copied with the job, and paths that the nodes must see.

Reads module sources without importing them.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.cluster import Cluster
from megatron_fp8rl.config import AlgoConfig, DataConfig, RunConfig
from megatron_fp8rl.envs.rewards.functions import parse
from megatron_fp8rl.envs.source_kind import CLASS, kind_of

_ROOT = Path(__file__).absolute().parents[1]
# Prefixes of shared file system types in /proc/mounts.
_SHARED = tuple("nfs lustre gpfs beegfs ceph wekafs panfs pvfs2 cifs smb3 9p afs fuse. virtiofs".split())


def reward_files(data: DataConfig) -> tuple[str, ...]:
    functions = (reward.function for source in data.environments for reward in source.rewards)
    return tuple(dict.fromkeys(str(parse(name)[0].absolute()) for name in functions if ".py:" in name))


def modules(algo: AlgoConfig, data: DataConfig, config_name: str = "") -> tuple[str, ...]:
    """Packages (folders) and modules (files) that the arguments name, and their imports from the same folder. Omits
    installed modules and this code. The configuration check reports missing modules."""
    names = [config_name, algo.loss, algo.advantage]
    for source in data.environments:
        names += [source.dataset.removeprefix(CLASS)] if kind_of(source.dataset) == "class" else []
        names += [reward.function for reward in source.rewards if ".py:" not in reward.function]
    paths: dict[str, None] = {}
    for name in names:
        if ":" in name and name.partition(":")[0].replace(".", "").isidentifier():
            _collect(name.partition(":")[0].partition(".")[0], paths)
    return tuple(paths)


def unreachable(cfg: RunConfig, cluster: Cluster, run_dir: str, mounts: str | None = None) -> list[str]:
    """Errors for paths in ``cfg`` that the nodes of a Slurm cluster cannot see. ``mounts``: text of /proc/mounts."""
    mounts = Path("/proc/mounts").read_text() if mounts is None else mounts
    is_run_shared = _file_system(run_dir, mounts).startswith(_SHARED)
    errors = []
    for field, value in _texts(cfg, "-"):
        path = Path(value).expanduser()
        if not value or field == "--output_dir" or not (os.sep in value or path.suffix) or not path.exists():
            continue
        if not path.is_absolute():
            problem = "is relative to the current folder, which differs on the nodes"
            remedy = f"Write {path.absolute()}"
        elif cluster.container_image is not None and not _is_mounted(path, cluster, run_dir):
            problem = "is not mounted into the container"
            remedy = f"Add '{path.parent}:{path.parent}' to CLUSTER.container_mounts"
        elif is_run_shared and not (kind := _file_system(value, mounts)).startswith(_SHARED):
            problem = f"is on a local file system of this machine ({kind}), which the nodes do not see"
            remedy = f"Copy it below {Path(run_dir).parent}"
        else:
            continue
        errors.append(f"{field} = {value!r}: {problem}. {remedy}.")
    return errors


def _collect(name: str, paths: dict[str, None]) -> None:
    """Add the top-level module ``name`` and its imports from the same folder to ``paths``."""
    module = sys.modules.get(name)
    spec = module.__spec__ if module is not None else importlib.util.find_spec(name)
    if spec is None or spec.origin is None or not spec.has_location:
        return
    origin = Path(spec.origin).absolute()
    package = origin.parent if origin.name == "__init__.py" else None
    path = package or origin
    is_installed = "site-packages" in path.parts or path.is_relative_to(sys.base_prefix)
    if path.parent == _ROOT or is_installed or str(path) in paths:
        return
    paths[str(path)] = None
    for source in sorted(package.rglob("*.py")) if package else [origin]:
        for other in _imports(source):
            if (path.parent / f"{other}.py").is_file() or (path.parent / other / "__init__.py").is_file():
                _collect(other, paths)


def _imports(source: Path) -> set[str]:
    """Top-level names of the modules that a file imports; empty if the file is not Python."""
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):
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
