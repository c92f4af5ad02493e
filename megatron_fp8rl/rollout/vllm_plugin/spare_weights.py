"""Spare memory of an engine worker, which receives weights while the engine samples.

A thread receives a publication's messages, on a GPU in a separate stream; they stay until the next publication. The
engine pauses only to copy them to the tensors that its kernels read (``weight_sync.spare_weights``).
"""

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from megatron_fp8rl.weight_sync.schedule import Message, SendSchedule
from megatron_fp8rl.weight_sync.transports.base import Transport

_SETTLE_S = 10.0  # time for a failed publication to stop its thread
_NAP_S = 1e-3  # polling interval, which leaves the interpreter to the model's thread


class SpareWeights:
    """Messages of one engine rank. ``on_host``: in pinned host memory instead of device memory."""

    def __init__(self, schedule: SendSchedule, engine_rank: int, device: torch.device, *, on_host: bool):
        self._rounds = schedule.rounds
        self._engine_rank = engine_rank
        self._starts = [0]
        for messages in schedule.rounds:
            received = messages.received_by(engine_rank)
            self._starts.append(self._starts[-1] + sum(message.num_bytes for message in received))
        is_pinned = on_host and device.type == "cuda"
        place = torch.device("cpu") if on_host else device
        self._memory = torch.empty(self._starts[-1], dtype=torch.uint8, device=place, pin_memory=is_pinned)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self.version: int | None = None  # of the weights that are received or arriving

    @property
    def num_bytes(self) -> int:
        return self._memory.numel()

    def inbox(self, message: Message, number: int) -> Tensor:
        start = self._starts[number] + message.in_offset
        return self._memory[start : start + message.num_bytes]

    def start(self, transport: Transport, attempt: int, version: int) -> None:
        """Receive a publication in a thread, over the previous one; RuntimeError if a cancelled one still writes."""
        if self._thread is not None:
            self._thread.join(_SETTLE_S)
            if self._thread.is_alive():
                raise RuntimeError(
                    "a cancelled publication still writes to the engine's spare memory; publish again later"
                )
        self.version, self._error = version, None
        self._thread = threading.Thread(
            target=self._receive, args=(transport, attempt), name="spare-weights", daemon=True
        )
        self._thread.start()

    def is_complete(self) -> bool:
        """Whether all messages have arrived. Raises the error of the thread."""
        if self._error is not None:
            raise self._error
        return self._thread is not None and not self._thread.is_alive()

    def wait(self, timeout_s: float) -> None:
        """Wait until all messages have arrived. Raises the error of the thread, or TimeoutError."""
        if self._thread is None:
            raise RuntimeError("cannot activate weights: none were sent to spare memory; publish again from the start")
        self._thread.join(timeout_s)
        if not self.is_complete():
            raise TimeoutError(f"weights did not arrive in spare memory within {timeout_s:g} s")

    def _receive(self, transport: Transport, attempt: int) -> None:
        try:
            with torch.inference_mode(), self._on_stream():
                transport.nap_s = _NAP_S
                transport.begin(attempt, self._rounds)
                for number, messages in enumerate(self._rounds):
                    transport.receive(number)
                    for message in messages.received_by(self._engine_rank):
                        self.inbox(message, number).copy_(transport.inbox(message, number), non_blocking=True)
                    transport.release(number)
                transport.finish()
                if self._stream is not None:
                    self._stream.synchronize()
        except Exception as error:  # of any layer; :meth:`is_complete` raises it in the worker's main thread
            self._error = error
            transport.fail(f"{type(error).__name__}: {error}")

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
