"""Runs one role on one node as a process: starts it, logs its output, and ends it.

In: a role of the job, and the addresses of its nodes. Out: its process, its log below the run's folder, and the time of
each traceback. Runs in the agent. Uses only the standard library.

Slurm sends SIGUSR1 before the time limit and SIGTERM at the end, to every process of the job; by default, either ends a
process. The agent blocks SIGUSR1, and its children inherit that: torchrun, ranks, engines. torchrun also has SIGTERM
blocked, because it would kill its ranks after 30 s, even while they write a checkpoint; SIGINT ends it. Trainer ranks
unblock the signals that they handle (``megatron_fp8rl/runtime/stop.py``).

The kernel kills the process of a role when its agent ends. Ranks end with torchrun, and engines with their server.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from launch.peers import Board, Peer, interfaces
from launch.spec import JobSpec, Role, attempt_dir, log_file
from megatron_fp8rl.net.parent import end_with_thread

_TRACEBACK = b"Traceback (most recent call last)"
_ERROR_BYTES = 8000
_LONG_ERROR_BYTES = 200_000  # output of all ranks since the error of one
_LAST_LINES = 20
_RECENT_S = 120.0  # an older traceback did not end the process
_RANK = re.compile(r"\[rank (\d+)\] ")
_RANK_LINE = re.compile(rb"\[rank (\d+)\] ")
_RANK_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) ")  # a line of torchrun
_SENTENCE = re.compile(r"python -m [\w.]+: ")  # how programs of this project begin an error without a traceback
_TORCH_RANK = re.compile(r"\[rank\d+\]: ?")  # torch's prefix for each line of an exception
_MESSAGE = re.compile(r"[\w.<>]+(:|$)")  # last line of a traceback: the exception's name, and its message if any
_FRAME = '  File "'
_OWNER = "LAUNCH_OWNER"  # in the environment of all descendants, including those in other sessions


@dataclass(frozen=True)
class Failure:
    time: float  # seconds since 1970: first traceback, last line of the failed rank, or end of the process
    text: str
    rank: int | None  # trainer rank, if the output names it


class RoleProcess:
    """A role on this node. ``start`` may be called again after it has ended."""

    def __init__(self, role: Role, spec: JobSpec, board: Board, peers: Mapping[int, Peer]) -> None:
        self.role = role
        self.incarnation = 0
        self.state = "new"  # the last state that is on the board
        self.num_deaths = 0  # in a row
        self.last_counted = -1  # the last incarnation in num_deaths
        self.started_s = 0.0  # monotonic
        self.log = log_file(spec.run_dir, role.name, board.place.node)
        self._spec = spec
        self._board = board
        self._peers = peers
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._tracebacks: list[tuple[float, int]] = []  # (time, offset into the log)
        self._last_line_s: dict[int, float] = {}  # by rank: when its last line came
        self._begin = 0  # offset of this incarnation's output
        self._port = peers[role.nodes[0]].port  # of the role's first node
        self._owner = f"{board.folder}/{role.name}/{board.place.node}"

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, incarnation: int = 0, port: int | None = None) -> None:
        """Start the process, after a new header in its log. ``port``: a free port on the role's first node; None keeps
        the current port. Raises OSError if the program does not exist."""
        self.incarnation = incarnation
        self._port = self._port if port is None else port
        self.log.parent.mkdir(parents=True, exist_ok=True)
        args = self._args()
        place, host = self._board.place, self._peers[self._board.place.node].host
        with self.log.open("ab") as log:
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            number = f", incarnation {incarnation}" if self.role.restart else ""
            header = f"=== job {place.job}, attempt {place.attempt}{number}, node {place.node} ({host}), {when} ==="
            log.write(f"{header}\n".encode())
            self._begin = log.tell()
        self._tracebacks, self._last_line_s = [], {}
        blocked = {signal.SIGUSR1} | ({signal.SIGTERM} if self.role.kind == "torchrun" else set())
        before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            self._process = subprocess.Popen(
                args,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,
                preexec_fn=end_with_thread,  # the agent's main thread
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.started_s = time.monotonic()
        self._reader = threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True)
        self._reader.start()
        self.report("running")

    def report(self, state: str, status: int | None = None) -> None:
        part = f"{self.role.name}.node{self._board.place.node}.json"
        pid = None if self._process is None else self._process.pid
        content = {"state": state, "pid": pid, "incarnation": self.incarnation, "status": status, "port": self._port}
        self._board.put(f"role-{part}", content)
        if state == "ended":
            self._board.put(f"ended-{part}", {"status": status})
        self.state = state  # last, so that a failed write is repeated

    def exit_status(self) -> int | None:
        """The exit status after the process has ended and its output is in the log; None while it runs."""
        if self._process is None or (status := self._process.poll()) is None:
            return None
        self.kill()  # descendants may keep the pipe open, or use a GPU
        if self._reader is not None:
            self._reader.join(5.0)
        return status

    def request_exit(self) -> None:
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGINT if self.role.kind == "torchrun" else signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process and all its descendants, in any session."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        _kill_owned(lambda owner: owner == self._owner)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)

    def failure(self) -> Failure:
        """The first traceback of the last two minutes, otherwise the error that the program printed, or its last lines.
        torchrun's own traceback counts only if no rank has failed. Call after the process has ended."""
        ended_s = time.time()
        with self.log.open("rb") as log:
            recent = [(when, offset) for when, offset in self._tracebacks if ended_s - when < _RECENT_S]
            if self.role.kind == "torchrun" and recent:
                of_ranks = [(when, offset) for when, offset in recent if self._has_rank(log, offset)]
                if not of_ranks and (failure := self._failed_rank(log)) is not None:
                    return failure
                recent = of_ranks or recent
            if recent:
                when, offset = recent[0]
                log.seek(offset)
                lines = log.read(_ERROR_BYTES).decode(errors="replace").splitlines() or ["(lost from the log)"]
                match = _RANK.match(lines[0])
                if match is not None:
                    lines = [line.removeprefix(match[0]) for line in lines if line.startswith(match[0])]
                lines = [_TORCH_RANK.sub("", line, count=1) for line in lines]
                return Failure(when, "\n".join(_one_error(lines)), int(match[1]) if match else None)
            lines = self._tail(log, _ERROR_BYTES)
        return Failure(ended_s, _without_traceback(lines, self._process.poll()), None)

    @staticmethod
    def _has_rank(log: BinaryIO, offset: int) -> bool:
        log.seek(offset)
        return _RANK.match(log.readline().decode(errors="replace")) is not None

    def _failed_rank(self, log: BinaryIO) -> Failure | None:
        """The error of the rank that ended without a traceback, as torchrun names it; None if it names none."""
        lines = self._tail(log, _LONG_ERROR_BYTES)
        ends = [match for line in lines if not _RANK.match(line) and (match := _RANK_FAILED.search(line))]
        if not ends:
            return None
        status, local_rank = map(int, ends[0].groups())
        rank = self.role.rank_of(self._board.place.node) * self.role.processes_per_node + local_rank
        mark = f"[rank {rank}] "
        text = _without_traceback([line.removeprefix(mark) for line in lines if line.startswith(mark)], status)
        return Failure(self._last_line_s.get(rank, time.time()), text, rank)

    def _tail(self, log: BinaryIO, size: int) -> list[str]:
        """The last lines of this incarnation's output."""
        log.seek(max(self._begin, self.log.stat().st_size - size))
        return log.read().decode(errors="replace").splitlines()

    def _args(self) -> list[str]:
        role, node = self.role, self._board.place.node
        head = self._peers[role.nodes[0]]
        args = role.args(node, head_address=head.address, head_port=self._port)
        if role.kind != "torchrun":
            return [sys.executable, *args]
        return [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nnodes={len(role.nodes)}",
            f"--node-rank={role.rank_of(node)}",
            f"--nproc-per-node={role.processes_per_node}",
            # Static, because other rendezvous backends order ranks by host name instead of node index.
            "--rdzv-backend=static",
            f"--master-addr={head.address}",
            f"--master-port={self._port}",
            # Copies output through files, so that two ranks never write to the same line.
            "--tee=3",
            f"--log-dir={self.log.with_suffix('.ranks')}",
            *args,
        ]

    def _environment(self) -> dict[str, str]:
        role, place = self.role, self._board.place
        cores = len(os.sched_getaffinity(0))
        environment = {
            "OMP_NUM_THREADS": str(max(1, cores // max(1, role.processes_per_node))),
            **self._network(),
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}] ",
            "LAUNCH_JOB": place.job,
            "LAUNCH_ATTEMPT": str(place.attempt),
            "LAUNCH_NODE": str(place.node),
            "LAUNCH_NODES": str(place.num_nodes),
            "LAUNCH_DIR": str(self._board.folder),
            "LAUNCH_ROLE": role.name,
            "LAUNCH_ROLE_RANK": str(role.rank_of(place.node)),
            "LAUNCH_LOG": str(self.log),
            "LAUNCH_ADDRESS": self._peers[place.node].address,
            # Grows with every start of the role, also over attempts, so that clients know the newest server.
            "LAUNCH_INCARNATION": str(1000 * place.attempt + self.incarnation),
            _OWNER: self._owner,
        }
        if role.gpus:
            visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
            chosen = [visible[gpu] if gpu < len(visible) else str(gpu) for gpu in role.gpus]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
        return environment | self._spec.env | role.env

    def _network(self) -> dict[str, str]:
        """The network interface for gloo, which would otherwise use the address of the host's name."""
        place = self._board.place
        if place.num_nodes == 1:
            return {}
        name = interfaces().get(self._peers[place.node].address)
        return {"GLOO_SOCKET_IFNAME": name} if name else {}

    def _listen(self, output: BinaryIO) -> None:
        """Copy output lines into the log and record when tracebacks begin, to order errors of all nodes by time. Drops
        lines if the disk is full: a process blocks when its output is not read."""
        with self.log.open("ab", buffering=0) as log, output:
            for line in output:
                if _TRACEBACK in line:
                    self._tracebacks.append((time.time(), log.tell()))
                if (match := _RANK_LINE.match(line)) is not None:
                    self._last_line_s[int(match[1])] = time.time()
                with contextlib.suppress(OSError):
                    log.write(line)


def kill_leftovers(run_dir: str | Path, job: str, *, but: int | None = None) -> None:
    """Kill the processes of killed agents of a job on this host, except those of attempt ``but``."""
    prefix = str(attempt_dir(run_dir, job, 0)).removesuffix("0")
    current = None if but is None else f"{attempt_dir(run_dir, job, but)}/"
    _kill_owned(lambda owner: owner.startswith(prefix) and not (current and owner.startswith(current)))


def _kill_owned(is_meant: Callable[[str], bool]) -> None:
    prefix = f"{_OWNER}=".encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # the process may have ended, or belong to another user
            owners = [entry for entry in environment.read_bytes().split(b"\0") if entry.startswith(prefix)]
            if any(is_meant(owner[len(prefix) :].decode(errors="replace")) for owner in owners):
                os.kill(int(environment.parent.name), signal.SIGKILL)


def format_exit_status(status: int | None) -> str:
    """``exit status 1``, or ``signal SIGKILL`` for a negative one."""
    if status is not None and status < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-status).name}"
    return f"exit status {status}"


def _without_traceback(lines: Sequence[str], status: int | None) -> str:
    """The error that a program printed before it ended with ``status``, otherwise its last lines."""
    begin = next((i for i, line in reversed([*enumerate(lines)]) if _SENTENCE.match(line)), None)
    if begin is not None:
        end = next((i for i in range(begin + 1, len(lines)) if not lines[i].startswith(" ")), len(lines))
        return "\n".join(lines[begin:end])
    last = "\n".join(lines[-_LAST_LINES:]) or "(it wrote nothing)"
    return f"ended with {format_exit_status(status)} and no traceback; its last lines:\n{last}"


def _one_error(lines: Sequence[str]) -> list[str]:
    """The lines of a traceback up to its message, plus 15 lines if the message ends in a colon. torchrun mixes stdout
    and stderr of a rank, so lines of output may look like a message; a message is never followed by a frame."""
    plain = [i for i, line in enumerate(lines) if i and line and not line.startswith((" ", "\t"))]
    first = next((i for i, line in enumerate(lines) if i and line.startswith(_FRAME)), 0)
    below = [i for i in plain if i > first and not "".join(lines[i + 1 : i + 2]).startswith(_FRAME)]
    end = next((i for i in below if _MESSAGE.match(lines[i])), below[0] if below else len(lines) - 1)
    following = 0
    for line in lines[end + 1 : end + 16] if lines[end].endswith(":") else ():
        if _TRACEBACK.decode() in line or line.startswith(("=== ", "During handling of", "The above exception")):
            break
        following += 1
    return [line for i, line in enumerate(lines[: end + 1 + following]) if i >= end or i not in plain]
