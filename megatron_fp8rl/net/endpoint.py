"""Endpoint files: the addresses of rollout replicas, on a file system shared by all nodes.

``rollout/replica.py`` writes ``<run>/replicas/<name>.json`` once the server answers; trainer rank 0 reads it. Only the
owner can read the file, which has the server's token. A killed server's file has an old incarnation.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One incarnation of a server."""

    name: str  # "rollout-0"
    url: str
    host: str  # name of the node, for messages
    pid: int
    incarnation: int  # counts the starts of this server, across restarts of the whole job
    log: str  # path of the file with its output; empty if the output goes elsewhere
    token: str

    @classmethod
    def announce(cls, path: Path, *, name: str, url: str, pid: int, token: str) -> Endpoint:
        """Write and print the address of a server on this host, as the next incarnation of an existing file."""
        before = cls.read(path)
        endpoint = cls(
            name=name,
            url=url,
            host=socket.gethostname(),
            pid=pid,
            incarnation=int(os.environ.get("LAUNCH_INCARNATION", 1 if before is None else before.incarnation + 1)),
            log=_log_path(),
            token=token,
        )
        endpoint.write(path)
        print(f"{name} answers at {url} (incarnation {endpoint.incarnation})", file=sys.stderr, flush=True)
        return endpoint

    def withdraw(self, path: Path) -> None:
        """Remove the file, unless a newer incarnation has written its own."""
        if Endpoint.read(path) == self:
            path.unlink(missing_ok=True)

    def write(self, path: Path) -> None:
        """Write atomically: a reader sees the old file or the whole new one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.unlink(missing_ok=True)
        with os.fdopen(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            json.dump(dataclasses.asdict(self), file)
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> Endpoint | None:
        """The endpoint; None if there is no such file, or it cannot be parsed."""
        try:
            content = json.loads(path.read_text())
            return cls(**{field.name: content[field.name] for field in dataclasses.fields(cls)})
        except (OSError, ValueError, KeyError, TypeError):
            return None


def replica_name(index: int) -> str:
    return f"rollout-{index}"


def endpoint_path(run_dir: Path | str, index: int) -> Path:
    return Path(run_dir) / "replicas" / f"{replica_name(index)}.json"


def _log_path() -> str:
    """The file with this process's output, if it is known."""
    if log := os.environ.get("LAUNCH_LOG"):
        return log
    path = Path("/proc/self/fd/2").resolve()
    return str(path) if path.is_file() else ""
