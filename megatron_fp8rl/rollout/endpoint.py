"""Where a rollout replica can be reached: a small file on the file system that trainer and rollout nodes share.

In: what a replica knows of itself once it answers. Out: ``<run>/replicas/<name>.json``, readable by its owner alone, for
it holds the token that drives the engine. Written by ``rollout/replica.py``, read by trainer rank 0. A file that a killed
replica left behind is told apart by nobody answering there, and by its incarnation.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One incarnation of a replica."""

    name: str  # "rollout-0"
    url: str
    host: str  # name of the node, for messages
    pid: int
    incarnation: int  # counts the starts of this replica, over restarts of the whole job too
    log: str  # path of the file that its output goes to; empty when it goes elsewhere
    token: str

    def write(self, path: Path) -> None:
        """All at once: a reader sees the file before or the whole new one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.unlink(missing_ok=True)
        with os.fdopen(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            json.dump(dataclasses.asdict(self), file)
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> Endpoint | None:
        """None when there is no such file, or none that can be read as one."""
        try:
            content = json.loads(path.read_text())
            return cls(**{field.name: content[field.name] for field in dataclasses.fields(cls)})
        except (OSError, ValueError, KeyError, TypeError):
            return None


def replica_name(index: int) -> str:
    return f"rollout-{index}"


def endpoint_path(run_dir: Path | str, index: int) -> Path:
    return Path(run_dir) / "replicas" / f"{replica_name(index)}.json"
