"""How messages get from every trainer rank to every engine worker, without a detour and without a request for each.

In:  messages of an :class:`~megatron_fp8rl.weights.exchange.Exchange` in memory that this module owns.
Out: the same bytes where the engine worker can read them.
Runs in the trainer and in engine workers; imports neither vLLM nor Megatron. Two ways:

    ipc    the receiver maps the sender's buffers and reads them; counters in shared memory say what may be read and
           what has been. Buffers are CUDA memory, opened by handle across processes and GPUs of one host, or files in
           shared memory on a machine without a GPU, where the same protocol runs.
    group  one process group of all trainer ranks and all engine workers: NCCL between GPUs, gloo without them.

Both keep two rounds: while the engines read one, the trainer fills the other. Both ends wait with deadlines, and see
within a fraction of a second when someone else has failed, through a key in a store that trainer rank 0 hosts.
"""

from __future__ import annotations

import atexit
import mmap
import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp8rl.weights.exchange import Exchange, Message, Round

NUM_SLOTS = 2
_FAILED = "failed"
_LOOK_S = 0.2  # between looks for the failure of someone else
_NAP_S = 20e-6


class FabricError(RuntimeError):
    """Messages could not be delivered; the text says who waited for whom."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one process stands: trainer ranks come first, then the workers of replica after replica."""

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

    def workers(self, engine_rank: int) -> list[int]:
        """Ranks of the workers of all replicas that keep the same slices."""
        return [self.num_trainers + i * self.num_engine_ranks + engine_rank for i in range(self.num_replicas)]

    def name(self, rank: int) -> str:
        if rank < self.num_trainers:
            return f"trainer rank {rank}"
        replica, engine_rank = divmod(rank - self.num_trainers, self.num_engine_ranks)
        return f"replica {replica} rank {engine_rank}"


class Fabric:
    """What both ways have in common: a store, a deadline, and the news that someone has failed.

    ``store`` is connected to trainer rank 0. ``device`` is where messages lie.
    """

    def __init__(self, place: Place, store: dist.Store, device: torch.device, timeout_s: float):
        self.place = place
        self.device = device
        self.timeout_s = timeout_s
        self.watch: Callable[[], None] = lambda: None
        self._store = store
        self._attempt = 0
        self._rounds: tuple[Round, ...] = ()
        self._end = time.monotonic() + timeout_s

    # ---- a publication

    def begin(self, attempt: int, rounds: tuple[Round, ...]) -> None:
        """Start the clock of a publication. ``attempt`` counts them, the same on all ranks."""
        self._attempt = attempt
        self._rounds = rounds
        self._end = time.monotonic() + self.timeout_s

    def fail(self, reason: str) -> None:
        """Tell everyone who waits in this publication."""
        try:
            self._store.set(f"{_FAILED}/{self._attempt}", f"{self.place.name(self.place.rank)}: {reason}")
        except RuntimeError:
            return  # the store is gone, and with it everyone who could be waiting

    def wait_until(self, done: Callable[[], bool], what: Callable[[], str]) -> None:
        """Return when ``done()``. Raises FabricError when someone fails first, or ``what()`` takes too long."""
        look = time.monotonic() + _LOOK_S
        while not done():
            now = time.monotonic()
            if now > look:
                look = now + _LOOK_S
                self.watch()
                self._raise_failure(what)
            if now > self._end:
                raise FabricError(f"{what()} within {self.timeout_s:g} s (rollout.update_deadline_s)")
            time.sleep(_NAP_S)

    def _raise_failure(self, what: Callable[[], str]) -> None:
        key = f"{_FAILED}/{self._attempt}"
        try:
            failed = self._store.check([key])
        except RuntimeError as error:
            raise FabricError(f"{what()}: trainer rank 0 has gone ({error})") from error
        if failed:
            raise FabricError(f"{what()}: {self._store.get(key).decode()}")

    # ---- the trainer's side

    def slot(self, number: int) -> Tensor:
        """uint8 memory of the sender for everything that it sends in round ``number``."""
        raise NotImplementedError

    def reserve(self, number: int) -> None:
        """Wait until the slot of round ``number`` may be written, by the host or on the current stream."""
        raise NotImplementedError

    def send(self, number: int, messages: Sequence[Message]) -> None:
        """Deliver what the current stream has written to the slot of this round."""
        raise NotImplementedError

    # ---- the engine's side

    def inbox(self, message: Message, number: int) -> Tensor:
        """uint8 memory in which ``message`` of round ``number`` can be read: the same every time."""
        raise NotImplementedError

    def receive(self, number: int) -> None:
        """Wait until the messages of round ``number`` may be read on the current stream."""
        raise NotImplementedError

    def release(self, number: int) -> None:
        """The current stream has read round ``number``."""
        raise NotImplementedError

    # ---- both

    def finish(self) -> None:
        """Wait until all rounds have been sent and read, as far as this process can tell."""
        raise NotImplementedError

    def close(self) -> None:
        """Release memory and connections. Harmless when called again, or after an error."""

    def _to_this_process(self, number: int) -> list[Message]:
        return self._rounds[number].received_by(self.place.engine_rank)


def open_store(host: str, port: int, timeout_s: float, *, is_master: bool) -> dist.TCPStore:
    """Trainer rank 0 hosts (port 0 finds a free one: see ``store.port``), all others connect."""
    return dist.TCPStore(host, port, None, is_master, timedelta(seconds=timeout_s), wait_for_workers=False)


def open_fabric(
    kind: str,
    place: Place,
    store: dist.Store,
    device: torch.device,
    timeout_s: float,
    exchanges: Sequence[Exchange],
    *,
    watch: Callable[[], None] = lambda: None,
) -> Fabric:
    """Collective over all trainer ranks and engine workers: the fabric of ``rollout.transport`` ipc or nccl.

    Its buffers hold any of ``exchanges``. ``watch`` is called now and then while waiting, to raise what else is known.
    """
    fabric = {"ipc": IpcFabric, "nccl": GroupFabric}[kind](place, store, device, timeout_s)
    fabric.watch = watch
    fabric.connect(exchanges)
    return fabric


class GroupFabric(Fabric):
    """One process group: a send of each message to the worker of every replica that keeps its slices."""

    _group: Any = None

    def connect(self, exchanges: Sequence[Exchange]) -> None:
        """Collective: build the group and this process's buffers."""
        place = self.place
        if place.is_trainer:
            num_bytes = max(x.out_bytes(place.rank) for x in exchanges)
        else:
            num_bytes = max(x.in_bytes(place.engine_rank) for x in exchanges)
        self._slots = torch.empty(NUM_SLOTS, num_bytes, dtype=torch.uint8, device=self.device)
        self._pending: dict[int, list[Any]] = {}
        prefix = dist.PrefixStore("group", self._store)
        timeout = timedelta(seconds=self.timeout_s)
        if self.device.type == "cpu":
            self._group = dist.ProcessGroupGloo(prefix, place.rank, place.world_size, timeout)
            return
        options = dist.ProcessGroupNCCL.Options()
        # Deadlines are ours: past its own one, NCCL's watchdog ends the whole process.
        options._timeout = timedelta(days=1)
        self._group = dist.ProcessGroupNCCL(prefix, place.rank, place.world_size, options)
        # The communicator is built here and not in the first publication, by everyone at once.
        self._group.allreduce(torch.zeros(1, device=self.device)).wait()
        event = _recorded(self.device)
        self.wait_until(event.query, lambda: "not all processes joined the NCCL communicator")

    def begin(self, attempt: int, rounds: tuple[Round, ...]) -> None:
        super().begin(attempt, rounds)
        self._pending.clear()
        if not self.place.is_trainer:
            self._expect(0)

    def slot(self, number: int) -> Tensor:
        return self._slots[number % NUM_SLOTS]

    def reserve(self, number: int) -> None:
        self._wait(number - NUM_SLOTS)

    def send(self, number: int, messages: Sequence[Message]) -> None:
        slot = self.slot(number)
        operations = [
            (self._group.send, slot[m.out_offset : m.out_offset + m.num_bytes], worker)
            for m in messages
            for worker in self.place.workers(m.engine_rank)
        ]
        self._pending[number] = self._start(operations, number)

    def inbox(self, message: Message, number: int) -> Tensor:
        return self._slots[number % NUM_SLOTS][message.in_offset : message.in_offset + message.num_bytes]

    def receive(self, number: int) -> None:
        # The next round travels while this one is read; its slot was read before.
        self._expect(number + 1)
        self._wait(number)

    def release(self, number: int) -> None:
        """Nothing: the next receive into this slot waits for the current stream."""

    def _expect(self, number: int) -> None:
        if number < len(self._rounds):
            messages = self._to_this_process(number)
            operations = [(self._group.recv, self.inbox(m, number), m.sender) for m in messages]
            self._pending[number] = self._start(operations, number)

    def _start(self, operations: list[tuple[Any, Tensor, int]], number: int) -> list[Any]:
        if not operations:
            return []
        if self.device.type == "cpu":
            return [call([buffer], peer, number) for call, buffer, peer in operations]
        self._group._start_coalescing()  # one launch on the communicator of all, not one communicator for each pair
        for call, buffer, peer in operations:
            call([buffer], peer, 0)
        return [self._group._end_coalescing()]

    def _wait(self, number: int) -> None:
        """Gloo: wait for a round; NCCL: have the current stream wait for it."""
        try:
            for work in self._pending.pop(number, ()):
                if self.device.type == "cpu":
                    self._wait_aside(work, number)
                else:
                    work.wait()
        except FabricError:
            raise
        except RuntimeError as error:
            raise FabricError(f"round {number} of weights: a process has died or hangs ({error})") from error

    def _wait_aside(self, work: Any, number: int) -> None:
        """Wait in a thread: gloo's own wait would not notice that someone else has failed."""
        done: list[RuntimeError | None] = []

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                done.append(error)
            else:
                done.append(None)

        threading.Thread(target=wait, daemon=True).start()
        self.wait_until(lambda: bool(done), lambda: f"round {number} of weights did not pass")
        if done[0] is not None:
            raise done[0]

    def finish(self) -> None:
        for number in sorted(self._pending):
            self._wait(number)
        if self.device.type == "cuda":
            self.wait_until(_recorded(self.device).query, lambda: "the last round of weights did not pass")

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None and self.device.type == "cuda":
            group.abort()  # after a failure nothing else ends what waits on the GPU


class IpcFabric(Fabric):
    """The sender's buffers, mapped by every receiver; counters in one small file that all processes of the host map."""

    def connect(self, exchanges: Sequence[Exchange]) -> None:
        """Collective: exchange the handles of buffers."""
        place = self.place
        self._announcer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights-ipc")
        self._announced: list[Any] = []
        self._counters = self._map_counters()
        if place.is_trainer:
            num_bytes = max(x.out_bytes(place.rank) for x in exchanges)
            if num_bytes:
                self._slots, handle = _export(num_bytes, self.device)
                self._store.set(f"ipc/{place.rank}", pickle.dumps(handle))
        else:
            senders = sorted({sender for x in exchanges for sender in x.senders})
            self._mapped = {}
            for sender in senders:
                key = f"ipc/{sender}"
                self.wait_until(
                    lambda key=key: self._store.check([key]),
                    lambda sender=sender: f"trainer rank {sender} did not offer its buffers",
                )
                self._mapped[sender] = _open(pickle.loads(self._store.get(key)), self.device)
        self._store.add("joined", 1)
        self.wait_until(
            lambda: self._store.add("joined", 0) >= place.world_size,
            lambda: f"{self._store.add('joined', 0)} of {place.world_size} processes opened the buffers",
        )
        if place.rank == 0:
            self._remove_files()
        if place.is_trainer and self.device.type == "cpu" and num_bytes:
            Path(handle["path"]).unlink(missing_ok=True)

    def _map_counters(self) -> np.ndarray:
        """int64 [world_size]: rounds that a trainer rank has filled, or that a worker has read, since the start."""
        num_bytes = 8 * self.place.world_size
        if self.place.rank == 0:
            path = _new_file(num_bytes)
            atexit.register(path.unlink, missing_ok=True)
            self._remove_files = lambda: path.unlink(missing_ok=True)
            self._store.set("counters", str(path))
        self.wait_until(lambda: self._store.check(["counters"]), lambda: "trainer rank 0 did not offer its counters")
        with open(self._store.get("counters").decode(), "r+b") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=np.int64)

    def _count(self, number: int) -> int:
        """Value of a counter after round ``number`` of this publication: higher than any before."""
        return (self._attempt << 32) + number + 1

    def slot(self, number: int) -> Tensor:
        return self._slots[number % NUM_SLOTS]

    def reserve(self, number: int) -> None:
        if number >= NUM_SLOTS:
            self._wait_for_readers(number - NUM_SLOTS)

    def _wait_for_readers(self, number: int) -> None:
        """Until every worker that this rank sent something in round ``number`` has read it."""
        to = {m.engine_rank for m in self._rounds[number].sent_by(self.place.rank)}
        readers = [worker for rank in to for worker in self.place.workers(rank)]
        self._wait_for(readers, number, "read")

    def _wait_for(self, ranks: list[int], number: int, verb: str) -> None:
        count = self._count(number)

        def missing() -> list[int]:
            return [rank for rank in ranks if self._counters[rank] < count]

        self.wait_until(
            lambda: not missing(),
            lambda: f"{', '.join(map(self.place.name, missing()))} has not {verb} round {number} of weights",
        )

    def send(self, number: int, messages: Sequence[Message]) -> None:
        self._announce(number)

    def inbox(self, message: Message, number: int) -> Tensor:
        slot = self._mapped[message.sender][number % NUM_SLOTS]
        return slot[message.out_offset : message.out_offset + message.num_bytes]

    def receive(self, number: int) -> None:
        self._wait_for([m.sender for m in self._to_this_process(number)], number, "sent")

    def release(self, number: int) -> None:
        self._announce(number)

    def _announce(self, number: int) -> None:
        """Raise this process's counter when the GPU has come so far: by a thread, for the host goes on meanwhile."""
        if self.device.type == "cpu":
            self._counters[self.place.rank] = self._count(number)
            return
        event, count = _recorded(self.device), self._count(number)

        def announce() -> None:
            event.synchronize()
            self._counters[self.place.rank] = count

        self._announced.append(self._announcer.submit(announce))

    def finish(self) -> None:
        announced, self._announced = self._announced, []
        self.wait_until(lambda: all(f.done() for f in announced), lambda: "the GPU did not finish its part of the weights")
        for future in announced:
            future.result()
        if self.place.is_trainer:
            mine = [i for i, r in enumerate(self._rounds) if r.sent_by(self.place.rank)]
            for number in mine[-NUM_SLOTS:]:
                self._wait_for_readers(number)

    def close(self) -> None:
        if self.place.rank == 0:
            self._remove_files()
        self._announcer.shutdown(wait=False, cancel_futures=True)


def _recorded(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def _new_file(num_bytes: int) -> Path:
    """A file of zeros in shared memory; the name lets a later run remove it if this one is killed."""
    path = Path("/dev/shm") / f"megatron_fp8rl-{os.getpid()}-{os.urandom(4).hex()}"
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    finally:
        os.close(descriptor)
    return path


def _export(num_bytes: int, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
    """uint8 [slots, num_bytes] and what another process of this host needs to open it."""
    if device.type == "cpu":
        path = _new_file(NUM_SLOTS * num_bytes)
        slots = torch.from_file(str(path), shared=True, size=NUM_SLOTS * num_bytes, dtype=torch.uint8)
        return slots.view(NUM_SLOTS, num_bytes), {"path": str(path), "num_bytes": num_bytes}
    from torch.multiprocessing.reductions import reduce_tensor

    slots = torch.empty(NUM_SLOTS, num_bytes, dtype=torch.uint8, device=device)
    _, arguments = reduce_tensor(slots)
    return slots, {"arguments": arguments}


def _open(handle: dict[str, Any], device: torch.device) -> Tensor:
    """The tensor behind a handle of :func:`_export`, as memory that ``device`` reads, also from another GPU."""
    if "path" in handle:
        size = NUM_SLOTS * handle["num_bytes"]
        return torch.from_file(handle["path"], shared=True, size=size, dtype=torch.uint8).view(NUM_SLOTS, -1)
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    arguments = list(handle["arguments"])
    # The GPU that opens the memory, which counts its own GPUs; CUDA maps that of a peer, even one it is not shown.
    arguments[6] = device.index if device.index is not None else torch.cuda.current_device()
    return rebuild_cuda_tensor(*arguments)
