"""Where a node stands in its job, and the files by which the nodes of one attempt speak to each other.

In: Slurm's environment, or the launcher's on this machine. Out: a :class:`Place` and a :class:`Board`, a folder below
the run on the shared file system. Runs in the agent of every node; the standard library alone.

The folder is named after job and attempt, so what an earlier attempt left is never read:

    node-<i>.json            {"host", "address", "port", "pid"}; its time of change is the agent's last sign of life
    role-<role>.node<i>.json {"state": "running" | "dead" | "given up" | "ended" | "stopped", "pid", "incarnation",
                             "status", "port"}; the dead are started again, the stopped were asked to end
    ended-<role>.node<i>.json  {"status"}: that part of an essential role has ended
    restart-<role>.<n>.json  the role begins incarnation n on all of its nodes
    given-up-<role>.json     the role has died too often, and ends on all of its nodes
    cancel                   somebody wants the job to end for good
    stop.json                the trainer is to save and end: {"reason", "node"}
    stopped.json             the trainer did: {"step", "checkpoint"}
    error-<where>.json       a failure: {"time", "role", "node", "rank", "text", "log", "is_restarted"}
    failed.json              the attempt has failed, all stop: {"role", "node", "reason"}
    gone-<i>.json            everything on node i has ended
    .bell                    grows with every file: agents look at it once a second, and list the folder when it grew
    outcome.json, done, first_error.txt   what came of it; see ``outcome.py``
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.spec import attempt_dir
from megatron_fp8rl.runtime.stop import ChangeFlag

POLL_S = 1.0  # between looks at a shared disk
_SIOCGIFCONF = 0x8912  # linux/sockios.h
STOP, STOPPED, FAILED, CANCEL = "stop.json", "stopped.json", "failed.json", "cancel"


class PeersMissingError(RuntimeError):
    """Nodes of the job did not come. The message names them, and those that did."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which node of which attempt of which job this is."""

    job: str
    attempt: int  # 0 for the first
    node: int
    num_nodes: int
    is_slurm: bool

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Place:
        """From the launcher of this machine (LAUNCH_*), or else from Slurm. Raises ValueError without either."""
        if "LAUNCH_NODE" in environment:
            return cls(
                job=environment.get("LAUNCH_JOB", f"local-{os.getppid()}"),
                attempt=int(environment.get("LAUNCH_ATTEMPT", "0")),
                node=int(environment["LAUNCH_NODE"]),
                num_nodes=int(environment["LAUNCH_NODES"]),
                is_slurm=False,
            )
        if "SLURM_JOB_ID" not in environment or "SLURM_NODEID" not in environment:
            raise ValueError(
                "an agent runs under srun, with SLURM_JOB_ID and SLURM_NODEID, or on one machine with LAUNCH_NODE and "
                "LAUNCH_NODES; neither is set. Start the job with `python -m launch`"
            )
        # A step of one node says SLURM_NNODES=1 in a job of many; agents are a step of the whole job.
        num_nodes = environment.get("SLURM_JOB_NUM_NODES") or environment["SLURM_NNODES"]
        return cls(
            job=environment["SLURM_JOB_ID"],
            attempt=int(environment.get("SLURM_RESTART_COUNT") or "0"),
            # One agent a node: ranks follow the order of switches, where the batch script found one.
            node=int(environment.get("SLURM_PROCID") or environment["SLURM_NODEID"]),
            num_nodes=int(num_nodes),
            is_slurm=True,
        )


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A node of the attempt."""

    host: str
    address: str
    port: int  # was free when the node came
    pid: int  # of its agent


class Board:
    """The folder of one attempt. Every file is written under another name and renamed: nobody reads half of one."""

    def __init__(self, run_dir: str | Path, place: Place) -> None:
        self.place = place
        self.folder = attempt_dir(run_dir, place.job, place.attempt)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.poll_s = POLL_S if place.is_slurm else 0.2
        self._changes = ChangeFlag(self.folder)
        self._names: set[str] = set()

    def names(self) -> set[str]:
        """Names of all files. The folder is listed when its bell has rung: a listing, unlike asking for a file, shows
        what other nodes wrote on NFS, and is dear."""
        if self._changes.has_changed():
            self._names = {name for name in os.listdir(self.folder) if not name.startswith(".")}
        return self._names

    def put(self, name: str, content: Mapping[str, Any] | str, *, once: bool = False) -> bool:
        """Write a file. With ``once`` the first of all nodes wins; returns whether this content is the one."""
        temporary = self.folder / f".{name}.{self.place.node}.{os.getpid()}"
        temporary.write_text(content if isinstance(content, str) else json.dumps(content))
        if not once:
            os.replace(temporary, self.folder / name)
            ChangeFlag.mark(self.folder)
            return True
        try:
            os.link(temporary, self.folder / name)
        except FileExistsError:
            # NFS says so, too, when it has linked the file and its first answer was lost.
            return os.stat(temporary).st_nlink > 1
        finally:
            temporary.unlink()
        ChangeFlag.mark(self.folder)
        return True

    def get(self, name: str) -> dict[str, Any] | None:
        """Content of a JSON file; None when there is none, which NFS may also say for a moment after it was listed."""
        try:
            return json.loads((self.folder / name).read_text())
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            return None

    def all(self, prefix: str) -> dict[str, dict[str, Any]]:
        """Contents of all JSON files whose names begin with ``prefix``, by name."""
        names = sorted(name for name in self.names() if name.startswith(prefix) and name.endswith(".json"))
        return {name: content for name in names if (content := self.get(name)) is not None}

    def meet(self, deadline_s: float, is_interrupted: Callable[[], bool] = lambda: False) -> dict[int, Peer]:
        """Say that this node is here and wait for the others; peers by node.

        Raises PeersMissingError, with the nodes that did not come, after ``deadline_s``, when another node has given
        up, or when ``is_interrupted`` says so; FileExistsError when the folder belongs to another job.
        """
        own = Peer(host=socket.gethostname(), address=local_address(self.place), port=free_port(), pid=os.getpid())
        if not self.put(f"node-{self.place.node}.json", vars(own), once=True):
            raise FileExistsError(
                f"{self.folder} was already used by an agent of node {self.place.node}: another job had this number. "
                "Remove that folder, or give the run another output_dir"
            )
        start = time.monotonic()
        deadline = start + deadline_s
        expected = {f"node-{node}.json": node for node in range(self.place.num_nodes)}
        while True:
            names = self.names()
            found = {}
            if expected.keys() <= names:
                found = {node: Peer(**peer) for name, node in expected.items() if (peer := self.get(name))}
            if len(found) == len(expected):
                return found
            if time.monotonic() > deadline or names & {FAILED, CANCEL} or is_interrupted():
                missing = [node for name, node in expected.items() if name not in names]
                came = {node: self.get(name) for name, node in expected.items() if name in names}
                here = [f"{node} ({peer['host']})" for node, peer in came.items() if peer]
                raise PeersMissingError(
                    f"node(s) {', '.join(map(str, missing))} of {self.place.num_nodes} did not come within "
                    f"{time.monotonic() - start:.0f} s; here are {', '.join(here)}. Look for the output of the missing nodes in the "
                    "job's own log, and at whether they see the same run folder"
                )
            time.sleep(self.poll_s)

    def heartbeat(self) -> None:
        """Touch this node's file, for those who watch."""
        with contextlib.suppress(OSError):
            os.utime(self.folder / f"node-{self.place.node}.json")


def local_address(place: Place) -> str:
    """The address at which other nodes of the job reach this one."""
    if not place.is_slurm or place.num_nodes == 1:
        return "127.0.0.1"
    # The way back to where the job was started from leads over the right interface. Many hosts resolve their own name to
    # loopback, and the one from which srun came may say of itself that it is there.
    if origin := os.environ.get("SLURM_LAUNCH_NODE_IPADDR"):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.connect((origin, 9))
            if not (address := probe.getsockname()[0]).startswith("127."):
                return address
    for name in (socket.gethostname(), os.environ.get("SLURMD_NODENAME")):
        with contextlib.suppress(OSError):
            if name and not (address := socket.gethostbyname(name)).startswith("127."):
                return address
    address = next((address for address in interfaces() if not address.startswith("127.")), None)
    if address is None:
        raise OSError(
            f"{socket.gethostname()} has no address but loopback, where other nodes of the job cannot reach it"
        )
    return address


def interfaces() -> dict[str, str]:
    """{IPv4 address of this host: name of its interface}, in the kernel's order. Linux."""
    size = struct.calcsize("16s16sQ")  # struct ifreq: name, address, and what fills its union
    room = array.array("B", bytes(256 * size))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, struct.pack("iL", len(room), room.buffer_info()[0]))
    used = struct.unpack("iL", answer)[0]
    entries = [room[start : start + size].tobytes() for start in range(0, used, size)]
    # A second address of an interface comes as "eth0:1".
    names = (entry[:16].partition(b"\0")[0].decode().partition(":")[0] for entry in entries)
    return dict(zip((socket.inet_ntoa(entry[20:24]) for entry in entries), names, strict=True))


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
