"""What a run needs that is the user's own: code that travels with the job, and files that the nodes have to see.

In: a configuration. Out: files to copy, or sentences about those that would not be found. Reads module sources without
importing them.
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
from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.envs.rewards.functions import parse
from megatron_fp8rl.envs.source_kind import CLASS, kind_of

_ROOT = Path(__file__).absolute().parents[1]
# Kinds of file systems that several hosts share, as /proc/mounts names them.
_SHARED = (
    "nfs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "wekafs",
    "panfs",
    "pvfs2",
    "cifs",
    "smb3",
    "9p",
    "afs",
    "fuse.",
    "virtiofs",
)


def reward_files(cfg: RunConfig) -> tuple[str, ...]:
    """The files of the user's reward functions."""
    functions_of = (reward.function for source in cfg.data.environments for reward in source.rewards)
    return tuple(dict.fromkeys(str(parse(name)[0].absolute()) for name in functions_of if ".py:" in name))


def modules(cfg: RunConfig, config_name: str = "") -> tuple[str, ...]:
    """Folders of packages and files of modules that ``cfg`` names, with those beside them that they import.

    What is installed, and this code itself, is left out. A module that does not exist is the configuration's own error.
    """
    names = [config_name, cfg.algo.loss, cfg.algo.advantage]
    for source in cfg.data.environments:
        names += [source.dataset.removeprefix(CLASS)] if kind_of(source.dataset) == "class" else []
        names += [reward.function for reward in source.rewards if ".py:" not in reward.function]
    found: dict[str, None] = {}
    for name in names:
        if ":" in name and name.partition(":")[0].replace(".", "").isidentifier():
            _collect(name.partition(":")[0].partition(".")[0], found)
    return tuple(found)


def unreachable(cfg: RunConfig, cluster: Cluster, run_dir: str, mounts: str | None = None) -> list[str]:
    """Paths in ``cfg`` that the nodes of a Slurm cluster would not find, each in a sentence with what to do.

    ``mounts`` is the text of /proc/mounts.
    """
    mounts = Path("/proc/mounts").read_text() if mounts is None else mounts
    run_kind = _file_system(run_dir, mounts)
    found = []
    for field, value in _texts(cfg, "-"):
        path = Path(value).expanduser()
        if not value or field == "--output_dir" or not (os.sep in value or path.suffix) or not path.exists():
            continue
        if not path.is_absolute():
            found.append(
                f"{field} = {value!r}: begins at the current folder, which is another on the nodes. Write "
                f"{path.absolute()}."
            )
        elif cluster.container_image is not None and not _is_mounted(path, cluster, run_dir):
            found.append(
                f"{field} = {value!r}: is not mounted into the container. Add "
                f"'{path.parent}:{path.parent}' to CLUSTER.container_mounts."
            )
        elif _is_shared(run_kind) and not _is_shared(kind := _file_system(value, mounts)):
            found.append(
                f"{field} = {value!r}: is on a file system of this machine alone ({kind}), which the nodes do "
                f"not see. Copy it below {Path(run_dir).parent}."
            )
    return found


def _collect(name: str, found: dict[str, None]) -> None:
    """Add the top-level module ``name`` and what it imports from its own folder."""
    module = sys.modules.get(name)
    spec = module.__spec__ if module is not None else importlib.util.find_spec(name)
    if spec is None or spec.origin is None or not spec.has_location:
        return
    origin = Path(spec.origin).absolute()
    package = origin.parent if origin.name == "__init__.py" else None
    path = package or origin
    if (
        path.parent == _ROOT
        or "site-packages" in path.parts
        or path.is_relative_to(sys.base_prefix)
        or str(path) in found
    ):
        return
    found[str(path)] = None
    for source in sorted(package.rglob("*.py")) if package else [origin]:
        for other in _imports(source):
            if (path.parent / f"{other}.py").is_file() or (path.parent / other / "__init__.py").is_file():
                _collect(other, found)


def _imports(source: Path) -> set[str]:
    """Top-level names of the modules that a file imports; none of a file that is not Python."""
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):
        return set()
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    return {name.partition(".")[0] for name in names} - {""}


def _texts(value: Any, field: str) -> Iterator[tuple[str, str]]:
    """(option, text) of every text within a configuration."""
    if isinstance(value, str):
        yield field, value
    elif dataclasses.is_dataclass(value):
        for one in dataclasses.fields(value):
            yield from _texts(getattr(value, one.name), f"{field}{'-' if field == '-' else '.'}{one.name}")
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts(inner, f"{field}.{name}")
    elif isinstance(value, (tuple, list)):
        for index, inner in enumerate(value):
            yield from _texts(inner, f"{field}.{index}")


def _is_mounted(path: Path, cluster: Cluster, run_dir: str) -> bool:
    """Whether the container sees the path under its own name."""
    ends = [mount.split(":")[1] for mount in cluster.container_mounts if len(mount.split(":")) > 1]
    return any(path.is_relative_to(end) for end in (*ends, run_dir, *([cluster.run_root] if cluster.run_root else [])))


def _file_system(path: str, mounts: str) -> str:
    """The kind of file system that a path is on, or will be once it is made."""
    entries = [line.split()[1:3] for line in mounts.splitlines() if len(line.split()) > 2]
    real = Path(os.path.realpath(path))
    places = [(len(point), kind) for point, kind in entries if real.is_relative_to(point.replace("\\040", " "))]
    return max(places, default=(0, "unknown"))[1]


def _is_shared(kind: str) -> bool:
    return kind.startswith(_SHARED)
