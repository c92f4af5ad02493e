"""How a bucket of bytes gets from trainer rank 0 to all workers of all engine replicas.

In:  a bucket that the exporter has filled, and its description.
Out: the engines have loaded it, or an error says which replica failed at which bucket.
Runs on trainer rank 0 alone. Two ways: a file in shared memory on one host, a gloo broadcast across hosts. Both keep
two buckets: while the engines read one, the exporter fills the other.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import socket
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_fp8rl.net.address import own_address
from megatron_fp8rl.weight_sync.wire import BucketInfo, GlooGroup

_SETTLE_S = 1.0  # for a broadcast whose request has ended to end as well
_GRACE_S = 10.0  # for the error that names a failed replica to arrive after the first sign of trouble


class TransportError(RuntimeError):
    """Weights could not be delivered; the engines are left paused with weights of no version."""


class Receivers(Protocol):
    """The engine replicas as a transport sees them. Calls reach all replicas at once and block the calling thread."""

    num_replicas: int
    workers_per_replica: int

    def init_transfer(self, infos: Sequence[dict[str, Any]]) -> None:
        """Hand replica i its ``infos[i]``."""

    def update_weights(self, info: dict[str, Any]) -> None:
        """Have all replicas load one bucket. Raises an error that names the replica and the bucket."""


class Transport(Protocol):
    """Delivers buckets. ``reserve``, fill, ``send``, repeat; then ``wait``."""

    config: dict[str, Any] | None  # of PlanInputs, for the engines: without it they cannot write weights directly

    def connect(self) -> None:
        """Make contact with the engines; again when they are others. Raises TransportError when one is late."""

    def reset(self) -> None:
        """Forget an attempt that failed; :meth:`connect` comes next."""

    def reserve(self, num_bytes: int) -> Tensor:
        """A buffer to fill, uint8 [num_bytes], CPU; waits until the engines have read what was in it."""

    def send(self, info: BucketInfo) -> None:
        """Start sending the buffer that was reserved last."""

    def wait(self) -> None:
        """Return when everything sent has been loaded; raise the first error otherwise."""

    def close(self) -> None:
        """Release memory, files and connections. Harmless when called again, or after an error."""


def build_transport(kind: str, receivers: Receivers, *, deadline_s: float) -> Transport:
    """The transport ``kind``: shm or gloo."""
    kinds = {"shm": SharedMemoryTransport, "gloo": GlooTransport}
    return kinds[kind](receivers, deadline_s=deadline_s)


class _PipelinedTransport:
    """Two slots and one sending thread. Subclasses say what a slot is and how its bytes travel."""

    def __init__(self, receivers: Receivers, *, deadline_s: float):
        self.receivers = receivers
        self.config: dict[str, Any] | None = None
        self.deadline_s = deadline_s
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        self._pending: list[Future[None] | None] = [None, None]  # by slot
        self._slot = 1
        self._failed = False

    def connect(self) -> None:
        """Nothing to do by default."""

    def reset(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        self._pending = [None, None]
        self._failed = False

    def reserve(self, num_bytes: int) -> Tensor:
        self._slot = 1 - self._slot
        self._finish(self._slot)
        return self._buffer(self._slot, num_bytes)

    def send(self, info: BucketInfo) -> None:
        self._pending[self._slot] = self._thread.submit(self._deliver_unless_failed, self._slot, info)

    def wait(self) -> None:
        for slot in (1 - self._slot, self._slot):
            self._finish(slot)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _deliver_unless_failed(self, slot: int, info: BucketInfo) -> None:
        if self._failed:  # wait() raises the first error; what follows it would only wait for dead engines
            return
        try:
            self._deliver(slot, info)
        except BaseException:
            self._failed = True
            raise

    def _finish(self, slot: int) -> None:
        pending, self._pending[slot] = self._pending[slot], None
        if pending is None:
            return
        try:
            # The calls under way have deadlines of their own, and their errors name the replica.
            pending.result(timeout=self.deadline_s + _GRACE_S)
        except FutureTimeoutError:
            raise TransportError(
                f"a bucket of weights was not delivered within {self.deadline_s:g} s (rollout.update_deadline_s); "
                "look at the engines' logs for a worker that hangs"
            ) from None

    def _buffer(self, slot: int, num_bytes: int) -> Tensor:
        raise NotImplementedError

    def _deliver(self, slot: int, info: BucketInfo) -> None:
        raise NotImplementedError


_FOLDER = Path("/dev/shm")
_PREFIX = "megatron_fp8rl-"


def _remove_leftovers() -> None:
    """Delete files of processes that no longer exist: what a killed run could not clean up."""
    for file in _FOLDER.glob(f"{_PREFIX}*"):
        owner = re.match(rf"{_PREFIX}(\d+)-", file.name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            file.unlink(missing_ok=True)


class SharedMemoryTransport(_PipelinedTransport):
    """Two files in /dev/shm that the workers of all replicas map; requests carry nothing but their description."""

    def __init__(self, receivers: Receivers, *, deadline_s: float):
        super().__init__(receivers, deadline_s=deadline_s)
        _remove_leftovers()
        token = os.urandom(4).hex()
        self._paths = [_FOLDER / f"{_PREFIX}{os.getpid()}-{token}-{slot}" for slot in range(2)]
        self._buffers: list[Tensor | None] = [None, None]
        atexit.register(self.close)

    def connect(self) -> None:
        info = {} if self.config is None else {"config": self.config}
        self.receivers.init_transfer([info] * self.receivers.num_replicas)

    def _buffer(self, slot: int, num_bytes: int) -> Tensor:
        buffer = self._buffers[slot]
        if buffer is None or buffer.numel() < num_bytes:
            self._buffers[slot] = None
            buffer = self._buffers[slot] = self._map(self._paths[slot], num_bytes)
        return buffer[:num_bytes]

    def _map(self, path: Path, num_bytes: int) -> Tensor:
        # A new file rather than a longer one: a worker may still map the old one.
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            # Memory is claimed now: a mapping of a file that /dev/shm cannot hold dies by SIGBUS at the first write.
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            free = os.statvfs(_FOLDER)
            raise TransportError(
                f"/dev/shm has {free.f_bavail * free.f_frsize / 2**20:.0f} MiB left, a bucket needs "
                f"{num_bytes / 2**20:.0f} MiB twice; lower rollout.bucket_bytes, enlarge /dev/shm "
                "(docker: --shm-size) or set rollout.transport to gloo"
            ) from error
        finally:
            os.close(descriptor)
        return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)

    def _deliver(self, slot: int, info: BucketInfo) -> None:
        self.receivers.update_weights(info.to_json() | {"path": str(self._paths[slot])})

    def close(self) -> None:
        super().close()
        self._buffers = [None, None]
        for path in self._paths:
            path.unlink(missing_ok=True)
        atexit.unregister(self.close)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


class GlooTransport(_PipelinedTransport):
    """One broadcast per bucket from rank 0 to every worker of every replica, over TCP."""

    def __init__(self, receivers: Receivers, *, deadline_s: float):
        super().__init__(receivers, deadline_s=deadline_s)
        self._group: GlooGroup | None = None
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self._start_threads()

    def reset(self) -> None:
        super().reset()
        self._end_threads()
        self._start_threads()
        self._group = None
        # What failed may still be read by the thread that sends it.
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2

    def _start_threads(self) -> None:
        self._requests = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-requests")
        self._broadcasts = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-broadcasts")

    def _end_threads(self) -> None:
        for pool in (self._requests, self._broadcasts):
            pool.shutdown(wait=False, cancel_futures=True)

    def connect(self) -> None:
        self._group = None
        per_replica = self.receivers.workers_per_replica
        world_size = 1 + self.receivers.num_replicas * per_replica
        shared = {"kind": "gloo", "host": own_address(), "port": _free_port(), "world_size": world_size}
        shared |= {"timeout_s": self.deadline_s, "config": self.config}
        infos = [shared | {"rank_offset": 1 + i * per_replica} for i in range(self.receivers.num_replicas)]
        joining = self._requests.submit(self.receivers.init_transfer, infos)
        try:
            self._group = GlooGroup(
                host="0.0.0.0", port=shared["port"], rank=0, world_size=world_size, timeout_s=self.deadline_s
            )
        except RuntimeError as error:
            _raise_first(joining)
            raise TransportError(
                f"not all {world_size - 1} engine workers joined the gloo group at {shared['host']}:{shared['port']} "
                f"within {self.deadline_s:g} s; check that they can reach this address ({error})"
            ) from error
        joining.result(timeout=self.deadline_s)

    def _buffer(self, slot: int, num_bytes: int) -> Tensor:
        if self._buffers[slot].numel() < num_bytes:
            self._buffers[slot] = torch.empty(num_bytes, dtype=torch.uint8)
        return self._buffers[slot][:num_bytes]

    def _deliver(self, slot: int, info: BucketInfo) -> None:
        if self._group is None:
            raise TransportError("connect() has to come before the first bucket")
        loading = self._requests.submit(self.receivers.update_weights, info.to_json())
        sending = self._broadcasts.submit(self._group.broadcast, self._buffers[slot][: info.num_bytes])
        # A host that vanishes without a word is noticed by the request, long before the broadcast's own deadline.
        wait_for((sending, loading), timeout=self.deadline_s, return_when=FIRST_EXCEPTION)
        if loading.done() and not sending.done():
            with contextlib.suppress(RuntimeError, FutureTimeoutError):
                sending.result(timeout=_SETTLE_S)
            loading.result()
        try:
            sending.result(timeout=self.deadline_s)
        except RuntimeError as error:
            _raise_first(loading)
            raise TransportError(
                f"bucket {info.bucket} of policy version {info.version} ({info.names[0]} ...): the broadcast failed; "
                f"an engine worker has died or hangs ({error})"
            ) from error
        loading.result(timeout=self.deadline_s)

    def close(self) -> None:
        super().close()
        self._end_threads()
        self._group = None


def _raise_first(request: Future[None]) -> None:
    """Raise the error of a request that has failed, for it names the replica; return when it is still under way."""
    try:
        request.result(timeout=_GRACE_S)
    except FutureTimeoutError:
        return
