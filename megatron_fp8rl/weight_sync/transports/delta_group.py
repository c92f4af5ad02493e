"""Weights over gloo as deltas: of a publication into spare memory, only what has changed since the one before travels.

Runs in the trainer and in engine workers. A sender keeps what it sent last, on its host; a receiver's spare memory holds
the same. The first publication after a connection is sent whole, so a replica that comes late needs nothing from before:
connections are made again when the set of replicas changes. ``process_group.py`` has the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_fp8rl.weight_sync import delta
from megatron_fp8rl.weight_sync.schedule import Message, Round
from megatron_fp8rl.weight_sync.transports.base import NUM_SLOTS, DeliveryError, recorded
from megatron_fp8rl.weight_sync.transports.process_group import GlooTransport

_WHOLE, _DELTA = 0, 1


class DeltaGlooTransport(GlooTransport):
    """For each message a header, int64 [kind, bytes], and as many bytes."""

    def begin(self, attempt: int, rounds: tuple[Round, ...]) -> None:
        self.num_sent_bytes = 0  # of this publication, to one worker of each audience
        if not self.staged:
            return super().begin(attempt, rounds)
        staged, self.staged = self.staged, False
        super(GlooTransport, self).begin(attempt, ())  # expects nothing: headers come first
        self._rounds, self.staged = rounds, staged
        self._headers: dict[int, list[Tensor]] = {}
        self._payloads: dict[tuple[int, int], Tensor] = {}
        self._last: dict[tuple[int, int], Tensor] = getattr(self, "_last", {})  # by round and offset

    # ---- trainer side

    def send(self, number: int, messages: Sequence[Message]) -> None:
        if not self.staged:
            return super().send(number, messages)
        wire = self._wire[number % NUM_SLOTS]
        if self.device.type == "cuda" and messages:
            num_bytes = max(m.out_offset + m.num_bytes for m in messages)
            wire[:num_bytes].copy_(self.slot(number)[:num_bytes], non_blocking=True)
            self.wait_until(recorded(self.device).query, lambda: f"the GPU did not finish round {number} of weights")
        operations, peers = [], []
        for message in messages:
            new = wire[message.out_offset : message.out_offset + message.num_bytes]
            kind, payload = self._changed((number, message.out_offset), new)
            header = torch.tensor([kind, payload.numel()])
            self.num_sent_bytes += payload.numel()
            for worker in self.peer.workers(message.engine_ranks):
                operations += [(header, worker, 2 * number), (payload, worker, 2 * number + 1)]
                peers.append(worker)
        self._pending[number] = [self._group.send([data], worker, tag) for data, worker, tag in operations]
        self._sent = getattr(self, "_sent", {})
        self._sent[number % NUM_SLOTS] = operations  # gloo reads them until it is done
        self._peers[number] = peers

    def _changed(self, key: tuple[int, int], new: Tensor) -> tuple[int, Tensor]:
        """(kind, payload), which stays valid when the slot is filled again."""
        last = self._last.get(key)
        payload = None if last is None else delta.encode(last, new)
        if last is None:
            self._last[key] = new.clone()
        else:
            last.copy_(new)
        if payload is None:
            return _WHOLE, self._last[key].clone()
        return _DELTA, torch.frombuffer(bytearray(payload), dtype=torch.uint8)

    # ---- engine side

    def receive(self, number: int) -> None:
        if not self.staged:
            return super().receive(number)
        messages = self._to_this_process(number)
        self._peers[number] = [message.sender for message in messages]
        headers = [torch.zeros(2, dtype=torch.int64) for _ in messages]
        self._pending[number] = [
            self._group.recv([header], m.sender, 2 * number) for header, m in zip(headers, messages, strict=True)
        ]
        self._wait(number)
        self._headers = {number: headers}
        self._payloads.clear()
        works = []
        for header, message in zip(headers, messages, strict=True):
            kind, num_bytes = header.tolist()
            if kind not in (_WHOLE, _DELTA) or not 0 <= num_bytes <= message.num_bytes:
                raise DeliveryError(f"round {number} of weights has a header of {kind}, {num_bytes}")
            payload = torch.empty(num_bytes, dtype=torch.uint8)
            self._payloads[number, message.in_offset] = payload
            works.append(self._group.recv([payload], message.sender, 2 * number + 1))
        self._pending[number] = works
        self._wait(number)

    def deliver(self, message: Message, number: int, target: Tensor) -> None:
        if not self.staged:
            return super().deliver(message, number, target)
        index = [m.in_offset for m in self._to_this_process(number)].index(message.in_offset)
        payload = self._payloads[number, message.in_offset]
        if self._headers[number][index][0] == _WHOLE:
            target.copy_(payload)
        else:
            delta.apply(target, memoryview(payload.numpy()))
