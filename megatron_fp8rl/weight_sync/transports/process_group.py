"""Weights over one process group of all trainer ranks and all engine workers: NCCL between GPUs, gloo without them.

Runs in the trainer and in engine workers. See ``fabric.py`` for what a fabric is.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp8rl.kernels.compat import coalesced, nccl_group
from megatron_fp8rl.weight_sync.schedule import Exchange, Message, Round
from megatron_fp8rl.weight_sync.transports.base import NUM_SLOTS, Fabric, FabricError, recorded
from megatron_fp8rl.weight_sync.wire import gloo_group


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
        self._peers: dict[int, list[int]] = {}  # by round, for messages
        prefix = dist.PrefixStore("group", self._store)
        timeout = timedelta(seconds=self.timeout_s)
        if self.device.type == "cpu":
            self._group = gloo_group(prefix, place.rank, place.world_size, timeout)
            return
        # Deadlines are ours: past its own one, NCCL's watchdog ends the whole process.
        self._group = nccl_group(prefix, place.rank, place.world_size, timedelta(days=1))
        # The communicator is built here and not in the first publication, by everyone at once.
        self._group.allreduce(torch.zeros(1, device=self.device)).wait()
        event = recorded(self.device)
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
        self._peers[number] = [peer for _, _, peer in operations]

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
            self._peers[number] = [message.sender for message in messages]

    def _start(self, operations: list[tuple[Any, Tensor, int]], number: int) -> list[Any]:
        if not operations:
            return []
        if self.device.type == "cpu":
            return [call([buffer], peer, number) for call, buffer, peer in operations]
        return [coalesced(self._group, [partial(call, [buffer], peer, 0) for call, buffer, peer in operations])]

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
            raise FabricError(f"{self._stuck(number)}: a process has died or hangs ({error})") from error

    def _stuck(self, number: int) -> str:
        peers = ", ".join(map(self.place.name, dict.fromkeys(self._peers.get(number, ()))))
        return f"round {number} of weights has not passed between {self.place.name(self.place.rank)} and {peers}"

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
        self.wait_until(lambda: bool(done), lambda: self._stuck(number))
        if done[0] is not None:
            raise done[0]

    def finish(self) -> None:
        for number in sorted(self._pending):
            self._wait(number)
        if self.device.type == "cuda":
            last = len(self._rounds) - 1
            self.wait_until(recorded(self.device).query, lambda: self._stuck(last))

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None and self.device.type == "cuda":
            group.abort()  # after a failure nothing else ends what waits on the GPU
