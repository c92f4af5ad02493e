"""The transport interface: sends messages from every trainer rank to every engine worker.

In: messages of a :class:`~megatron_fp8rl.weight_sync.schedule.SendSchedule` in memory of the transport. Out: the same
bytes in memory of the engine worker. Imports neither vLLM nor Megatron. ``weight_sync.transport`` selects one:

    ipc    the receiver maps the sender's buffers and reads them; counters in shared memory show which rounds are
           written and read. Buffers are CUDA memory, opened by handle across processes and GPUs of one host, or files
           in shared memory on a machine without a GPU.
    nccl   one NCCL process group of all trainer ranks and all engine workers, on separate GPUs.
    gloo   the same over TCP, with or without GPUs; GPU data are copied through pinned host memory.

All keep two rounds: while the engines read one, the trainer fills the other. Waits have deadlines, and detect failures
of other processes within a fraction of a second, through a key in the store of trainer rank 0. A new transport is a
subclass of :class:`Transport` and an entry in ``choose.py`` (and in ``config.WeightSyncConfig``).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fp8rl.weight_sync.schedule import Message, Round, SendSchedule
from megatron_fp8rl.weight_sync.transports.signed_store import SignedStore

NUM_SLOTS = 2
_FAILED = "failed"
_LOOK_S = 0.2  # interval of checks for failures of other processes
_NAP_S = 20e-6  # polling interval while an engine is paused
_BARRIER_POLL_S = 0.01  # polling interval of the store by all processes


class DeliveryError(RuntimeError):
    """Messages were not delivered; the text names the waiting process and what it waited for."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One participating process. Trainer ranks come first, then the workers of replica 0, 1, ..."""

    rank: int
    num_trainers: int
    num_replicas: int
    num_engine_ranks: int

    @property
    def world_size(self) -> int:
        return self.num_trainers + self.num_replicas * self.num_engine_ranks

    @property
    def is_trainer(self) -> bool:
        return self.rank < self.num_trainers

    @property
    def engine_rank(self) -> int:
        return (self.rank - self.num_trainers) % self.num_engine_ranks

    def workers(self, engine_ranks: Sequence[int]) -> list[int]:
        """Return the ranks of these workers in all replicas."""
        first = (self.num_trainers + i * self.num_engine_ranks for i in range(self.num_replicas))
        return [start + engine_rank for start in first for engine_rank in engine_ranks]

    def name(self, rank: int) -> str:
        if rank < self.num_trainers:
            return f"trainer rank {rank}"
        replica, engine_rank = divmod(rank - self.num_trainers, self.num_engine_ranks)
        return f"replica {replica} rank {engine_rank}"


class Transport:
    """Base class of transports: a ``store`` connected to trainer rank 0, a deadline, and detection of failures.
    ``device`` is that of the messages."""

    def __init__(self, peer: Peer, store: SignedStore, device: torch.device, timeout_s: float):
        self.peer = peer
        self.device = device
        self.timeout_s = timeout_s
        self.watch: Callable[[], None] = lambda: None
        self.nap_s = _NAP_S
        self._store = store
        self._attempt = 0
        self._rounds: tuple[Round, ...] = ()
        self._end = time.monotonic() + timeout_s

    def connect(self, schedules: Sequence[SendSchedule]) -> None:
        """Collective: connect all processes, with buffers large enough for each of ``schedules``."""
        raise NotImplementedError

    # ---- publication

    def begin(self, attempt: int, rounds: tuple[Round, ...]) -> None:
        """Start the deadline of a publication. ``attempt`` is its number, equal on all ranks."""
        self._attempt = attempt
        self._rounds = rounds
        self._end = time.monotonic() + self.timeout_s

    def fail(self, reason: str) -> None:
        """Make every process that waits in this publication raise DeliveryError."""
        try:
            self._store.set(f"{_FAILED}/{self._attempt}", f"{self.peer.name(self.peer.rank)}: {reason}")
        except RuntimeError:
            return  # trainer rank 0 has ended; waiting processes notice that themselves

    def barrier(self, did: str) -> None:
        """Collective, once for each ``did``: wait for all processes. Raises like :meth:`wait_until`."""
        self._store.add(did, 1)
        num_ranks = self.peer.world_size
        self.wait_until(
            lambda: self._store.add(did, 0) >= num_ranks,
            lambda: f"{self._store.add(did, 0)} of {num_ranks} processes {did}",
            nap_s=_BARRIER_POLL_S,
        )

    def wait_until(self, done: Callable[[], bool], what: Callable[[], str], *, nap_s: float | None = None) -> None:
        """Wait until ``done()``. Raises DeliveryError with ``what()`` after a failure elsewhere or the deadline."""
        look = time.monotonic() + _LOOK_S
        while not done():
            now = time.monotonic()
            if now > look:
                look = now + _LOOK_S
                self.watch()
                self._raise_failure(what)
            if now > self._end:
                raise DeliveryError(f"{what()} within {self.timeout_s:g} s (engine.deadline_scale multiplies it)")
            time.sleep(self.nap_s if nap_s is None else nap_s)

    def _raise_failure(self, what: Callable[[], str]) -> None:
        key = f"{_FAILED}/{self._attempt}"
        try:
            failed = self._store.check([key])
        except RuntimeError as error:
            raise DeliveryError(f"{what()}: trainer rank 0 has ended ({error})") from error
        if failed:
            raise DeliveryError(f"{what()}: {self._store.get(key)}")

    # ---- trainer side

    def slot(self, number: int) -> Tensor:
        """Return the sender's uint8 memory for round ``number``."""
        raise NotImplementedError

    def reserve(self, number: int) -> None:
        """Wait until the slot of round ``number`` is free, on the host or on the current stream."""
        raise NotImplementedError

    def send(self, number: int, messages: Sequence[Message]) -> None:
        """Send the messages that the current stream has written to the slot of this round."""
        raise NotImplementedError

    # ---- engine side

    def inbox(self, message: Message, number: int) -> Tensor:
        """Return the uint8 memory of ``message`` in round ``number``; its address never changes."""
        raise NotImplementedError

    def receive(self, number: int) -> None:
        """Wait until the current stream may read the messages of round ``number``."""
        raise NotImplementedError

    def release(self, number: int) -> None:
        """Mark round ``number`` as read by the current stream."""
        raise NotImplementedError

    # ---- both sides

    def finish(self) -> None:
        """Wait until all rounds are sent and read, as far as this process can detect."""
        raise NotImplementedError

    def close(self) -> None:
        """Release memory and connections. May be called repeatedly, and after an error."""

    def _to_this_process(self, number: int) -> list[Message]:
        return self._rounds[number].received_by(self.peer.engine_rank)


def recorded(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
