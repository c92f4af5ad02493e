"""The place of a node in its job, and the shared files through which the agents of one attempt communicate.

In: the environment of Slurm, or of the launcher on this machine. Out: a :class:`Place` and a :class:`Board`, a folder
of the run on the shared file system. Runs in the agent of every node. Uses only the standard library. The folder's name
contains job and attempt, so that no files of earlier attempts are read:

    node-<i>.json            {"host", "address", "port", "pid"}; the modification time is the agent's last heartbeat
    claimed.json             node 0 holds the run's folder for this attempt; other nodes may change files in it
    role-<role>.node<i>.json {"state": "running" | "dead" | "given up" | "ended" | "stopped", "pid", "incarnation",
                             "status", "port"}; dead roles are restarted, stopped roles were asked to exit
    ended-<role>.node<i>.json  {"status"}: this part of an essential role has ended
    restart-<role>.<n>.json  the role starts incarnation n on all of its nodes
    given-up-<role>.json     the role has died too often, and ends on all of its nodes
    cancel                   the job must end without another attempt
    stop.json                the trainer must save and exit: {"reason", "node"}
    stopped.json             the trainer has saved and exited: {"step", "checkpoint"}
    error-<where>.json       a failure: {"time", "role", "node", "rank", "text", "log", "is_restarted"}; "is_lost" if an
                             agent has died, whose roles end with it
    failed.json              the attempt has failed, all roles stop: {"role", "node", "reason"}
    gone-<i>.json            all processes on node i have ended
    .bell                    grows with every file; agents check it once a second, and list the folder if it has grown
    outcome.json, done, first_error.txt   the end of the attempt; see ``outcome.py``
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

POLL_S = 1.0  # between checks of a shared file system
_SIOCGIFCONF = 0x8912  # linux/sockios.h
CLAIMED, STOP, STOPPED, FAILED, CANCEL = "claimed.json", "stop.json", "stopped.json", "failed.json", "cancel"


class PeersMissingError(RuntimeError):
    """Nodes of the job are missing. The message lists the missing and the present nodes."""


@dataclass(frozen=True, kw_only=True)
class Place:
    job: str
    attempt: int  # counts from 0
    node: int
    num_nodes: int
    is_slurm: bool

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Place:
        """Read LAUNCH_* (set by the launcher of this machine), otherwise SLURM_*. Raises ValueError without either."""
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
        # SLURM_NNODES is the size of a job step, which may be one node of many. Agents are a step of the whole job.
        num_nodes = environment.get("SLURM_JOB_NUM_NODES") or environment["SLURM_NNODES"]
        return cls(
            job=environment["SLURM_JOB_ID"],
            attempt=int(environment.get("SLURM_RESTART_COUNT") or "0"),
            # One agent per node. Ranks follow the order of switches if the batch script set one.
            node=int(environment.get("SLURM_PROCID") or environment["SLURM_NODEID"]),
            num_nodes=int(num_nodes),
            is_slurm=True,
        )


@dataclass(frozen=True, kw_only=True)
class Peer:
    host: str
    address: str
    port: int  # free when the node joined
    pid: int  # of the agent


class Board:
    """The shared folder of one attempt. Files are renamed after writing, so that none is read half-written."""

    def __init__(self, run_dir: str | Path, place: Place) -> None:
        self.place = place
        self.folder = attempt_dir(run_dir, place.job, place.attempt)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.poll_s = POLL_S if place.is_slurm else 0.2
        self._changes = ChangeFlag(self.folder)
        self._beats: dict[int, tuple[float, float]] = {}  # by node: (its last heartbeat, when it was seen)
        self._looked_s = float("-inf")
        self._names: set[str] = set()

    def names(self) -> set[str]:
        """Names of all files. On NFS only a listing shows files of other nodes; it is slow, so .bell triggers it."""
        if self._changes.has_changed():
            self._names = {name for name in os.listdir(self.folder) if not name.startswith(".")}
        return self._names

    def put(self, name: str, content: Mapping[str, Any] | str, *, once: bool = False) -> bool:
        """Write a file. With ``once``, the first node wins. Returns whether the file has this content."""
        temporary = self.folder / f".{name}.{self.place.node}.{os.getpid()}"
        temporary.write_text(content if isinstance(content, str) else json.dumps(content))
        if not once:
            os.replace(temporary, self.folder / name)
            ChangeFlag.mark(self.folder)
            return True
        try:
            os.link(temporary, self.folder / name)
        except FileExistsError:
            # NFS also raises this if it linked the file and its first reply was lost.
            return os.stat(temporary).st_nlink > 1
        finally:
            temporary.unlink()
        ChangeFlag.mark(self.folder)
        return True

    def get(self, name: str) -> dict[str, Any] | None:
        """Content of a JSON file; None if it is missing, which NFS may report shortly after listing the file."""
        try:
            return json.loads((self.folder / name).read_text())
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            return None

    def all(self, prefix: str) -> dict[str, dict[str, Any]]:
        names = sorted(name for name in self.names() if name.startswith(prefix) and name.endswith(".json"))
        return {name: content for name in names if (content := self.get(name)) is not None}

    def join(self, deadline_s: float, is_interrupted: Callable[[], bool] = lambda: False) -> dict[int, Peer]:
        """Register this node and wait for all others; returns peers by node.

        Raises PeersMissingError after ``deadline_s``, if another node failed or cancelled, or if ``is_interrupted``.
        Raises FileExistsError if another job has used this folder.
        """
        local = Peer(host=socket.gethostname(), address=local_address(self.place), port=free_port(), pid=os.getpid())
        if not self.put(f"node-{self.place.node}.json", vars(local), once=True):
            raise FileExistsError(
                f"{self.folder} was already used by an agent of node {self.place.node}: another job had this number. "
                "Remove that folder, or give the run another output_dir"
            )
        start = time.monotonic()
        deadline = start + deadline_s
        expected = {f"node-{node}.json": node for node in range(self.place.num_nodes)}
        while True:
            names = self.names()
            is_late = time.monotonic() > deadline or bool(names & {FAILED, CANCEL}) or is_interrupted()
            peers = {}
            if is_late or expected.keys() <= names:
                files = {node: self.get(name) for name, node in expected.items() if name in names}
                peers = {node: Peer(**content) for node, content in files.items() if content}
            if len(peers) == len(expected):
                return peers
            if is_late:
                missing = ", ".join(str(node) for name, node in expected.items() if name not in names)
                here = ", ".join(f"{node} ({peer.host})" for node, peer in peers.items())
                raise PeersMissingError(
                    f"node(s) {missing} of {self.place.num_nodes} did not come within "
                    f"{time.monotonic() - start:.0f} s; "
                    f"here are {here}. Read the missing nodes' output in the job's log, and check that they see the "
                    "same run folder"
                )
            time.sleep(self.poll_s)

    def heartbeat(self) -> None:
        with contextlib.suppress(OSError):
            os.utime(self.folder / f"node-{self.place.node}.json")

    def silent_nodes(self, limit_s: float) -> dict[int, tuple[float, float]]:
        """{node: (time of its last heartbeat, seconds without)} of other nodes that are silent for longer than
        ``limit_s`` and have not ended. Compares no clocks of different nodes. Call it once per heartbeat."""
        now, names, silent = time.monotonic(), self.names(), {}
        was_paused = now > self._looked_s + limit_s / 2  # as by `scontrol suspend`, which pauses the other nodes, too
        self._looked_s = now
        for node in range(self.place.num_nodes):
            name = f"node-{node}.json"
            if node == self.place.node or name not in names or f"gone-{node}.json" in names:
                continue
            try:
                with open(self.folder / name, "rb") as file:  # opening asks the server, also on NFS
                    beat_s = os.fstat(file.fileno()).st_mtime
            except OSError:
                continue
            last_beat_s, seen_s = self._beats.get(node, (0.0, now))
            if was_paused or beat_s != last_beat_s:
                seen_s = now
            self._beats[node] = beat_s, seen_s
            if now > seen_s + limit_s:
                silent[node] = beat_s, now - seen_s
        return silent

    def note_lost(self, node: int, when: float, text: str) -> None:
        """Record that the agent of a node has died."""
        error = {"time": when, "role": "agent", "node": node, "rank": None, "text": text, "log": "the job's log"}
        self.put(f"error-agent.node{node}.json", {**error, "is_lost": True}, once=True)


def local_address(place: Place) -> str:
    """The address at which other nodes of the job reach this node."""
    if not place.is_slurm or place.num_nodes == 1:
        return "127.0.0.1"
    # Many hosts resolve their names to loopback. The route to the host of srun uses the right interface, unless srun
    # runs on this host.
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
        raise OSError(f"{socket.gethostname()} has no address but loopback, so other nodes of the job cannot reach it")
    return address


def interfaces() -> dict[str, str]:
    """{IPv4 address: interface name} of this host, in the kernel's order. Linux only."""
    size = struct.calcsize("16s16sQ")  # struct ifreq: name, address, rest of the union
    buffer = array.array("B", bytes(256 * size))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, struct.pack("iL", len(buffer), buffer.buffer_info()[0]))
    used = struct.unpack("iL", answer)[0]
    entries = [buffer[start : start + size].tobytes() for start in range(0, used, size)]
    # A second address of an interface is listed as "eth0:1".
    names = (entry[:16].partition(b"\0")[0].decode().partition(":")[0] for entry in entries)
    return dict(zip((socket.inet_ntoa(entry[20:24]) for entry in entries), names, strict=True))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
