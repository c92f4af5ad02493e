"""Transport over one process group of all trainer ranks and engine workers: NCCL between GPUs, or gloo."""

import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp8rl.kernels.compat import coalesced, gloo_group_on, nccl_group
from megatron_fp8rl.net.address import local_address
from megatron_fp8rl.weight_sync.schedule import Message, Round, SendSchedule
from megatron_fp8rl.weight_sync.transports.base import NUM_SLOTS, DeliveryError, Transport, recorded


class _GroupTransport(Transport):
    """Sends messages to the audience in every replica. Callers write and read ``_slots``; the group uses ``_wire``."""

    _group: Any = None

    def connect(self, schedules: Sequence[SendSchedule]) -> None:
        peer = self.peer
        if peer.is_trainer:
            num_bytes = max(x.out_bytes(peer.rank) for x in schedules)
        else:
            num_bytes = max(x.in_bytes(peer.engine_rank) for x in schedules)
        self._slots = torch.empty(NUM_SLOTS, num_bytes, dtype=torch.uint8, device=self.device)
        self._wire = self._wire_memory()
        self._pending: dict[int, list[Any]] = {}
        self._peers: dict[int, list[int]] = {}  # by round, for messages
        self.barrier("came to connect")  # because building a group blocks, without checks for failures
        self._group = self._build_group(dist.PrefixStore("group", self._store.plain))

    def begin(self, attempt: int, rounds: tuple[Round, ...]) -> None:
        super().begin(attempt, rounds)
        self._pending.clear()
        if not self.peer.is_trainer:
            self._expect(0)

    def slot(self, number: int) -> Tensor:
        return self._slots[number % NUM_SLOTS]

    def reserve(self, number: int) -> None:
        self._wait(number - NUM_SLOTS)

    def send(self, number: int, messages: Sequence[Message]) -> None:
        wire = self._wire[number % NUM_SLOTS]
        operations = [
            (self._group.send, wire[m.out_offset : m.out_offset + m.num_bytes], worker)
            for m in messages
            for worker in self.peer.workers(m.engine_ranks)
        ]
        self._pending[number] = self._start(operations, number)
        self._peers[number] = [peer for _, _, peer in operations]

    def inbox(self, message: Message, number: int) -> Tensor:
        return self.slot(number)[message.in_offset : message.in_offset + message.num_bytes]

    def receive(self, number: int) -> None:
        # Receive the next round while this one is read; the other slot is free.
        self._expect(number + 1)
        self._wait(number)

    def release(self, number: int) -> None:
        """Do nothing: the next receive into this slot waits for the current stream."""

    def _expect(self, number: int) -> None:
        if number < len(self._rounds):
            messages, wire = self._to_this_process(number), self._wire[number % NUM_SLOTS]
            parts = [(wire[m.in_offset : m.in_offset + m.num_bytes], m.sender) for m in messages]
            self._pending[number] = self._start([(self._group.recv, *part) for part in parts], number)
            self._peers[number] = [message.sender for message in messages]

    def _wait(self, number: int) -> None:
        """Wait for a round on the host, or make the current stream wait for it."""
        try:
            for work in self._pending.pop(number, ()):
                self._wait_for(work, number)
        except DeliveryError:
            raise
        except RuntimeError as error:
            raise DeliveryError(f"{self._stuck(number)}: a process has died or hangs ({error})") from error

    def _stuck(self, number: int) -> str:
        peers = ", ".join(map(self.peer.name, dict.fromkeys(self._peers.get(number, ()))))
        return f"round {number} of weights was not transferred between {self.peer.name(self.peer.rank)} and {peers}"

    def finish(self) -> None:
        for number in sorted(self._pending):
            self._wait(number)
        if self.device.type == "cuda":
            last = len(self._rounds) - 1
            self.wait_until(recorded(self.device).query, lambda: self._stuck(last))

    def _wire_memory(self) -> Tensor:
        """uint8 [slots, bytes]."""
        return self._slots

    def _build_group(self, store: dist.Store) -> Any:
        raise NotImplementedError

    def _start(self, operations: list[tuple[Any, Tensor, int]], number: int) -> list[Any]:
        """Start the operations (send or recv, memory, peer rank) of one round."""
        raise NotImplementedError

    def _wait_for(self, work: Any, number: int) -> None:
        raise NotImplementedError


class NcclTransport(_GroupTransport):
    """From GPU to GPU, on the current stream."""

    def _build_group(self, store: dist.Store) -> Any:
        # wait_until enforces deadlines, because a timeout of NCCL's watchdog would end the whole process.
        group = nccl_group(store, self.peer.rank, self.peer.world_size, timedelta(days=1))
        # Build the communicator here, with all processes at once, rather than in the first publication.
        group.allreduce(torch.zeros(1, device=self.device)).wait()
        event = recorded(self.device)
        self.wait_until(event.query, lambda: "not all processes joined the NCCL communicator")
        return group

    def _start(self, operations: list[tuple[Any, Tensor, int]], number: int) -> list[Any]:
        if not operations:
            return []
        return [coalesced(self._group, [partial(call, [buffer], peer, 0) for call, buffer, peer in operations])]

    def _wait_for(self, work: Any, number: int) -> None:
        work.wait()

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()  # after a failure, only this ends operations that wait on the GPU


class GlooTransport(_GroupTransport):
    """Over TCP between hosts. GPU messages pass through pinned host memory, copied on the current stream."""

    def _wire_memory(self) -> Tensor:
        if self.device.type == "cpu":
            return self._slots
        self._copied: dict[int, torch.cuda.Event] = {}  # by slot: when a worker has read the host memory
        return torch.empty(self._slots.shape, dtype=torch.uint8, pin_memory=True)

    def _build_group(self, store: dist.Store) -> Any:
        where = store, self.peer.rank, self.peer.world_size, timedelta(seconds=self.timeout_s)
        if os.environ.get("GLOO_SOCKET_IFNAME"):
            return dist.ProcessGroupGloo(*where)
        # By default gloo listens on the address of the host name, often a loopback address.
        return gloo_group_on(local_address(), *where)

    def send(self, number: int, messages: Sequence[Message]) -> None:
        if self.device.type == "cuda" and messages:
            num_bytes = max(m.out_offset + m.num_bytes for m in messages)
            self._wire[number % NUM_SLOTS][:num_bytes].copy_(self.slot(number)[:num_bytes], non_blocking=True)
            self.wait_until(recorded(self.device).query, lambda: f"the GPU did not finish round {number} of weights")
        super().send(number, messages)

    def receive(self, number: int) -> None:
        super().receive(number)
        messages = self._to_this_process(number)
        if self.device.type == "cuda" and messages:
            num_bytes = max(m.in_offset + m.num_bytes for m in messages)
            self.slot(number)[:num_bytes].copy_(self._wire[number % NUM_SLOTS][:num_bytes], non_blocking=True)
            self._copied[number % NUM_SLOTS] = recorded(self.device)

    def _expect(self, number: int) -> None:
        if self.device.type == "cuda" and number % NUM_SLOTS in self._copied:
            copied = self._copied.pop(number % NUM_SLOTS)
            self.wait_until(copied.query, lambda: f"the GPU did not copy the messages before round {number} of weights")
        super()._expect(number)

    def _start(self, operations: list[tuple[Any, Tensor, int]], number: int) -> list[Any]:
        return [call([buffer], peer, number) for call, buffer, peer in operations]

    def _wait_for(self, work: Any, number: int) -> None:
        """Wait in a thread, because gloo's wait does not detect failures of other processes."""
        done: list[RuntimeError | None] = []

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                done.append(error)
            else:
                done.append(None)

        threading.Thread(target=wait, daemon=True).start()
        self.wait_until(lambda: bool(done), lambda: self._stuck(number))
        if done[0] is not None:
            raise done[0]

    def close(self) -> None:
        self._group = None
