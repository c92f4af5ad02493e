"""Transport through mapped memory: CUDA IPC between GPUs of one host, or files on a host without GPUs."""

import atexit
import json
import mmap
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_fp8rl.kernels.compat import handle_of, open_on, shareable_segments
from megatron_fp8rl.weight_sync.schedule import Message, SendSchedule
from megatron_fp8rl.weight_sync.transports.base import NUM_SLOTS, DeliveryError, Transport, recorded

_FOLDER = Path("/dev/shm")
_PREFIX = "megatron_fp8rl-"


class IpcTransport(Transport):
    """Receivers map the sender's buffers; all processes of the host map one file of counters."""

    def connect(self, schedules: Sequence[SendSchedule]) -> None:
        peer = self.peer
        self._announcer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights-ipc")
        self._announced: list[Any] = []
        self._counters = self._map_counters()
        if peer.is_trainer:
            num_bytes = max(x.out_bytes(peer.rank) for x in schedules)
            if num_bytes:
                self._slots, handle = _export(num_bytes, self.device)
                self._store.set(f"ipc/{peer.rank}", json.dumps(handle))
        else:
            received = (m for x in schedules for r in x.rounds for m in r.received_by(peer.engine_rank))
            senders = sorted({message.sender for message in received})
            self._mapped = {}
            for sender in senders:
                key = f"ipc/{sender}"
                self.wait_until(
                    lambda key=key: self._store.check([key]),
                    lambda sender=sender: f"trainer rank {sender} did not offer its buffers",
                )
                self._mapped[sender] = _open(json.loads(self._store.get(key)), self.device)
        try:
            self.barrier("opened the buffers")
        finally:  # all processes that will map the files have done so
            if peer.rank == 0:
                self._remove_files()
            if peer.is_trainer and self.device.type == "cpu" and num_bytes:
                Path(handle["path"]).unlink(missing_ok=True)

    def _map_counters(self) -> np.ndarray:
        """Map int64 [world_size]: rounds filled by each trainer rank or read by each worker since the start."""
        num_bytes = 8 * self.peer.world_size
        if self.peer.rank == 0:
            path = _new_file(num_bytes)
            atexit.register(path.unlink, missing_ok=True)
            self._remove_files = lambda: path.unlink(missing_ok=True)
            self._store.set("counters", str(path))
        self.wait_until(lambda: self._store.check(["counters"]), lambda: "trainer rank 0 did not offer its counters")
        with open(self._store.get("counters"), "r+b") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=np.int64)

    def _count(self, number: int) -> int:
        """Return a counter's value after round ``number`` of this publication. Values always increase."""
        return (self._attempt << 32) + number + 1

    def slot(self, number: int) -> Tensor:
        return self._slots[number % NUM_SLOTS]

    def reserve(self, number: int) -> None:
        if number >= NUM_SLOTS:
            self._wait_for_readers(number - NUM_SLOTS)

    def _wait_for_readers(self, number: int) -> None:
        """Wait until every receiver of this rank's messages of round ``number`` has read them."""
        to = {rank for m in self._rounds[number].sent_by(self.peer.rank) for rank in m.engine_ranks}
        readers = self.peer.workers(sorted(to))
        self._wait_for(readers, number, "read")

    def _wait_for(self, ranks: list[int], number: int, verb: str) -> None:
        count = self._count(number)

        def missing() -> list[int]:
            return [rank for rank in ranks if self._counters[rank] < count]

        self.wait_until(
            lambda: not missing(),
            lambda: f"{', '.join(map(self.peer.name, missing()))} has not {verb} round {number} of weights",
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
        """Raise this process's counter from a thread when the GPU reaches this point; do not block the host."""
        if self.device.type == "cpu":
            self._counters[self.peer.rank] = self._count(number)
            return
        event, count = recorded(self.device), self._count(number)

        def announce() -> None:
            event.synchronize()
            self._counters[self.peer.rank] = count

        self._announced.append(self._announcer.submit(announce))

    def finish(self) -> None:
        announced, self._announced = self._announced, []
        self.wait_until(lambda: all(f.done() for f in announced), lambda: "the GPU did not finish its part")
        for future in announced:
            future.result()
        if self.peer.is_trainer:
            mine = [i for i, r in enumerate(self._rounds) if r.sent_by(self.peer.rank)]
            for number in mine[-NUM_SLOTS:]:
                self._wait_for_readers(number)

    def close(self) -> None:
        if self.peer.rank == 0:
            self._remove_files()
        self._announcer.shutdown(wait=False, cancel_futures=True)


def _new_file(num_bytes: int) -> Path:
    """Create a zero-filled file in shared memory. A later run can identify and remove it by its name."""
    _remove_leftovers()
    path = _FOLDER / f"{_PREFIX}{os.getpid()}-{os.urandom(4).hex()}"
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        # Allocate now: if /dev/shm is too small, the first write to a mapped file would cause SIGBUS.
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        free = os.statvfs(_FOLDER)
        raise DeliveryError(
            f"{_FOLDER} has {free.f_bavail * free.f_frsize / 2**20:.0f} MiB free, but buffers of weights need "
            f"{num_bytes / 2**20:.0f} MiB; lower weight_sync.bucket_bytes, enlarge {_FOLDER} (docker: --shm-size) or "
            "set weight_sync.transport to gloo"
        ) from error
    finally:
        os.close(descriptor)
    return path


def _remove_leftovers() -> None:
    """Delete files that killed runs left behind, whose processes no longer exist."""
    for file in _FOLDER.glob(f"{_PREFIX}*"):
        owner = re.match(rf"{_PREFIX}(\d+)-", file.name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            file.unlink(missing_ok=True)


def _export(num_bytes: int, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
    """Allocate uint8 [slots, num_bytes]; return it and a JSON handle for other processes of this host."""
    if device.type == "cpu":
        path = _new_file(NUM_SLOTS * num_bytes)
        slots = torch.from_file(str(path), shared=True, size=NUM_SLOTS * num_bytes, dtype=torch.uint8)
        return slots.view(NUM_SLOTS, num_bytes), {"path": str(path), "num_bytes": num_bytes}
    with shareable_segments():
        slots = torch.empty(NUM_SLOTS, num_bytes, dtype=torch.uint8, device=device)
    return slots, {"num_bytes": num_bytes, "cuda": handle_of(slots)}


def _open(handle: dict[str, Any], device: torch.device) -> Tensor:
    """Open a handle from :func:`_export` as a tensor that ``device`` can read, possibly on another GPU."""
    if "path" in handle:
        size = NUM_SLOTS * handle["num_bytes"]
        return torch.from_file(handle["path"], shared=True, size=size, dtype=torch.uint8).view(NUM_SLOTS, -1)
    # This process's index of the GPU that opens the memory. CUDA maps a peer's memory even if that GPU is invisible.
    index = device.index if device.index is not None else torch.cuda.current_device()
    return open_on(handle["cuda"], (NUM_SLOTS, handle["num_bytes"]), index)
