"""Weights through memory that the receiver maps: CUDA IPC between GPUs of one host, files on a host without GPUs.

Runs in the trainer and in engine workers. ``base.py`` defines the interface.
"""

from __future__ import annotations

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
    """The sender's buffers, mapped by every receiver; counters in one small file that all processes of the host map."""

    def connect(self, schedules: Sequence[SendSchedule]) -> None:
        """Collective: exchange the buffer handles."""
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
            self.meet("opened the buffers")
        finally:  # all that will have mapped the files
            if peer.rank == 0:
                self._remove_files()
            if peer.is_trainer and self.device.type == "cpu" and num_bytes:
                Path(handle["path"]).unlink(missing_ok=True)

    def _map_counters(self) -> np.ndarray:
        """int64 [world_size]: rounds that a trainer rank has filled, or that a worker has read, since the start."""
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
        """Value of a counter after round ``number`` of this publication: higher than any earlier value."""
        return (self._attempt << 32) + number + 1

    def slot(self, number: int) -> Tensor:
        return self._slots[number % NUM_SLOTS]

    def reserve(self, number: int) -> None:
        if number >= NUM_SLOTS:
            self._wait_for_readers(number - NUM_SLOTS)

    def _wait_for_readers(self, number: int) -> None:
        """Wait until every worker to which this rank sent something in round ``number`` has read it."""
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
        """Raise this process's counter once the GPU reaches this point, from a thread, so that the host can continue."""
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
    """A zero-filled file in shared memory; its name lets a later run remove it if this one is killed."""
    _remove_leftovers()
    path = _FOLDER / f"{_PREFIX}{os.getpid()}-{os.urandom(4).hex()}"
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        # Allocate memory now: a mapping of a file that /dev/shm cannot hold dies of SIGBUS at the first write.
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        free = os.statvfs(_FOLDER)
        raise DeliveryError(
            f"{_FOLDER} has {free.f_bavail * free.f_frsize / 2**20:.0f} MiB left, and buffers of weights need "
            f"{num_bytes / 2**20:.0f} MiB; lower weight_sync.bucket_bytes, enlarge {_FOLDER} (docker: --shm-size) or set "
            "weight_sync.transport to gloo"
        ) from error
    finally:
        os.close(descriptor)
    return path


def _remove_leftovers() -> None:
    """Delete files of processes that no longer exist, left behind by killed runs."""
    for file in _FOLDER.glob(f"{_PREFIX}*"):
        owner = re.match(rf"{_PREFIX}(\d+)-", file.name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            file.unlink(missing_ok=True)


def _export(num_bytes: int, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
    """uint8 [slots, num_bytes], and the handle, as JSON, with which another process of this host opens it."""
    if device.type == "cpu":
        path = _new_file(NUM_SLOTS * num_bytes)
        slots = torch.from_file(str(path), shared=True, size=NUM_SLOTS * num_bytes, dtype=torch.uint8)
        return slots.view(NUM_SLOTS, num_bytes), {"path": str(path), "num_bytes": num_bytes}
    with shareable_segments():
        slots = torch.empty(NUM_SLOTS, num_bytes, dtype=torch.uint8, device=device)
    return slots, {"num_bytes": num_bytes, "cuda": handle_of(slots)}


def _open(handle: dict[str, Any], device: torch.device) -> Tensor:
    """The tensor of a handle from :func:`_export`, as memory that ``device`` can read, possibly from another GPU."""
    if "path" in handle:
        size = NUM_SLOTS * handle["num_bytes"]
        return torch.from_file(handle["path"], shared=True, size=size, dtype=torch.uint8).view(NUM_SLOTS, -1)
    # The GPU that opens the memory, by this process's numbering; CUDA maps a peer's memory even if that GPU is not
    # visible.
    index = device.index if device.index is not None else torch.cuda.current_device()
    return open_on(handle["cuda"], (NUM_SLOTS, handle["num_bytes"]), index)
