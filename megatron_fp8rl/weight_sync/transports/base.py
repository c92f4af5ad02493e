"""The transport interface: moves messages from every trainer rank to every engine worker.

In:  messages of a :class:`~megatron_fp8rl.weight_sync.schedule.SendSchedule` in memory that the transport owns.
Out: the same bytes where the engine worker can read them.
Runs in the trainer and in engine workers; imports neither vLLM nor Megatron. ``weight_sync.transport`` names one:

    ipc    the receiver maps the sender's buffers and reads them; counters in shared memory say which rounds are
           written and which are read. Buffers are CUDA memory, opened by handle across processes and GPUs of one host,
           or files in shared memory on a machine without a GPU, where the same protocol runs.
    nccl   one NCCL process group of all trainer ranks and all engine workers, on separate GPUs.
    gloo   the same over TCP, with or without GPUs; GPU data are copied through pinned host memory.

All keep two rounds: while the engines read one, the trainer fills the other. Both ends wait with deadlines and detect
within a fraction of a second that another process has failed, through a key in a store hosted by trainer rank 0.

A new transport is a subclass of :class:`Transport` and an entry in ``choose.py`` (and in ``config.WeightSyncConfig``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fp8rl.weight_sync.schedule import Message, Round, SendSchedule
from megatron_fp8rl.weight_sync.transports.signed_store import SignedStore

NUM_SLOTS = 2
_FAILED = "failed"
_LOOK_S = 0.2  # between checks for the failure of another process
_NAP_S = 20e-6  # between looks while an engine is paused
_MEETING_NAP_S = 0.01  # between looks of all processes at the store


class DeliveryError(RuntimeError):
    """Messages could not be delivered; the text says who waited for whom."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One participating process: trainer ranks come first, then the workers of one replica after another."""

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
        """Ranks of these workers of all replicas."""
        first = (self.num_trainers + i * self.num_engine_ranks for i in range(self.num_replicas))
        return [start + engine_rank for start in first for engine_rank in engine_ranks]

    def name(self, rank: int) -> str:
        if rank < self.num_trainers:
            return f"trainer rank {rank}"
        replica, engine_rank = divmod(rank - self.num_trainers, self.num_engine_ranks)
        return f"replica {replica} rank {engine_rank}"


class Transport:
    """The interface, and its shared parts: a store, a deadline, and notice of failures.

    ``store`` is connected to trainer rank 0. ``device`` is where messages lie.
    """

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
        """Collective: connect all processes, with buffers that hold any of ``schedules``."""
        raise NotImplementedError

    # ---- publication

    def begin(self, attempt: int, rounds: tuple[Round, ...]) -> None:
        """Start the clock of a publication. ``attempt`` numbers them identically on all ranks."""
        self._attempt = attempt
        self._rounds = rounds
        self._end = time.monotonic() + self.timeout_s

    def fail(self, reason: str) -> None:
        """Notify every process that waits in this publication."""
        try:
            self._store.set(f"{_FAILED}/{self._attempt}", f"{self.peer.name(self.peer.rank)}: {reason}")
        except RuntimeError:
            return  # the store is gone, and with it every process that could be waiting

    def meet(self, did: str) -> None:
        """Collective, once for each ``did``: return when all processes are here. Raises as :meth:`wait_until` does."""
        self._store.add(did, 1)
        num_ranks = self.peer.world_size
        self.wait_until(
            lambda: self._store.add(did, 0) >= num_ranks,
            lambda: f"{self._store.add(did, 0)} of {num_ranks} processes {did}",
            nap_s=_MEETING_NAP_S,
        )

    def wait_until(self, done: Callable[[], bool], what: Callable[[], str], *, nap_s: float | None = None) -> None:
        """Return when ``done()``. Raises DeliveryError if another process fails first, or after the deadline, with
        ``what()``.
        """
        look = time.monotonic() + _LOOK_S
        while not done():
            now = time.monotonic()
            if now > look:
                look = now + _LOOK_S
                self.watch()
                self._raise_failure(what)
            if now > self._end:
                raise DeliveryError(f"{what()} within {self.timeout_s:g} s (deadlines.update_s)")
            time.sleep(self.nap_s if nap_s is None else nap_s)

    def _raise_failure(self, what: Callable[[], str]) -> None:
        key = f"{_FAILED}/{self._attempt}"
        try:
            failed = self._store.check([key])
        except RuntimeError as error:
            raise DeliveryError(f"{what()}: trainer rank 0 has gone ({error})") from error
        if failed:
            raise DeliveryError(f"{what()}: {self._store.get(key)}")

    # ---- trainer side

    def slot(self, number: int) -> Tensor:
        """uint8 memory of the sender for everything it sends in round ``number``."""
        raise NotImplementedError

    def reserve(self, number: int) -> None:
        """Wait until the slot of round ``number`` may be written, by the host or on the current stream."""
        raise NotImplementedError

    def send(self, number: int, messages: Sequence[Message]) -> None:
        """Deliver what the current stream has written to the slot of this round."""
        raise NotImplementedError

    # ---- engine side

    def inbox(self, message: Message, number: int) -> Tensor:
        """uint8 memory in which ``message`` of round ``number`` can be read; always the same."""
        raise NotImplementedError

    def receive(self, number: int) -> None:
        """Wait until the messages of round ``number`` may be read on the current stream."""
        raise NotImplementedError

    def release(self, number: int) -> None:
        """Mark round ``number`` as read by the current stream."""
        raise NotImplementedError

    # ---- both sides

    def finish(self) -> None:
        """Wait until all rounds have been sent and read, as far as this process can tell."""
        raise NotImplementedError

    def close(self) -> None:
        """Release memory and connections. May be called repeatedly, and after an error."""

    def _to_this_process(self, number: int) -> list[Message]:
        return self._rounds[number].received_by(self.peer.engine_rank)


def recorded(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
