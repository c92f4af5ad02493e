"""Shares GPU memory between colocated engines and trainer: sleep/wake, offload/onload.

Every method is a collective over the trainer ranks. One side releases memory before the other allocates. With
``engine.sleep_level`` 0 and an empty ``optim.offload``, nothing moves.

    sampling            engines: weights, KV cache      trainer: state not listed in ``optim.offload``
    train()             engines asleep                  trainer: all state, the optimizer's while it steps
    publication()       engines: weights                trainer: parameters, read-only
    after publication   as during sampling
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from megatron_fp8rl.config import EngineConfig, RunConfig
from megatron_fp8rl.observe.spans import span
from megatron_fp8rl.trainer.policy import Policy

if TYPE_CHECKING:
    from megatron_fp8rl.rollout.fleet import Fleet


def wait_and_sleep(engine: EngineConfig, fleet: Fleet, is_asked: Callable[[], bool]) -> None:
    """Rank 0: wait for colocated engines and put them to sleep. Call before the trainer allocates: an engine measures
    free memory while it starts. Does nothing on a CPU or with another placement, or if the run ``is_asked`` to stop."""
    if engine.placement == "colocated" and torch.cuda.is_available():
        with span("start_engines"):
            if fleet.wait_until_ready(is_asked):
                fleet.sleep()


class ResidencyError(RuntimeError):
    """Engines failed to sleep or wake up; raised on every rank."""


class ColocatedMemory:
    """Memory phases of a run. ``fleet`` exists on rank 0 only, and not in a replay. Trainer state starts on the GPU."""

    def __init__(self, cfg: RunConfig, policy: Policy, fleet: Fleet | None) -> None:
        self._policy = policy
        self._fleet = fleet
        self._moves = bool(cfg.engine.sleep_level or cfg.optim.offload) and cfg.sampling.replay is None
        self._phase = "train"
        self._peaks: dict[str, float] = {}

    def train(self) -> None:
        """Put the engines to sleep until the next publication, and load parameters and gradients to the GPU."""
        self._enter("train")
        if self._moves:
            with span("colocated"):
                self._call_engines("sleep", lambda fleet: fleet.sleep())
                self._policy.offload.restore("params", "gradients")

    @contextlib.contextmanager
    def publication(self) -> Iterator[None]:
        """Keep trainer parameters and engine weights on the GPU for the block; afterwards the engines may sample."""
        self._enter("publish")
        if self._moves:
            with span("colocated"):
                self._policy.offload.restore("params")
                self._policy.offload.release("gradients", "optimizer")
                self._call_engines("wake for new weights", lambda fleet: fleet.wake("weights"))
        yield
        if self._moves:
            with span("colocated"):
                self._policy.offload.release("params")
                self._call_engines("wake for sampling", lambda fleet: fleet.wake())
        self._enter("rollout")

    def take_metrics(self) -> dict[str, float]:
        """Peak GPU memory of each phase since the last call, in bytes, maximum over all ranks; empty without a GPU."""
        peaks, self._peaks = self._peaks, {}
        if self._policy.parallel.device.type != "cuda":
            return peaks
        gathered = self._policy.parallel.gather_from_all(peaks)
        return {
            key: max(rank.get(key, 0.0) for rank in gathered) for key in dict.fromkeys(k for r in gathered for k in r)
        }

    def _enter(self, phase: str) -> None:
        """Record the GPU memory that the ending phase used on this rank, and start the next phase."""
        device = self._policy.parallel.device
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            peaks = {
                "allocated": torch.cuda.max_memory_allocated(device),
                "reserved": torch.cuda.max_memory_reserved(device),
                "device": total - free,  # of all processes, engines included
            }
            for kind, num_bytes in peaks.items():
                key = f"memory/{self._phase}_{kind}/max"
                self._peaks[key] = max(self._peaks.get(key, 0.0), float(num_bytes))
            torch.cuda.reset_peak_memory_stats(device)
        self._phase = phase

    def _call_engines(self, what: str, move: Callable[[Fleet], None]) -> None:
        """Rank 0 calls the engines after all ranks have moved their own state; a failure is raised on every rank."""
        parallel = self._policy.parallel
        parallel.barrier(f"engines {what}")
        error: Exception | None = None
        if self._fleet is not None:
            try:
                move(self._fleet)
            except Exception as exception:
                error = exception
        failure = parallel.broadcast_object(None if error is None else f"{type(error).__name__}: {error}{self._left()}")
        if failure is not None:
            raise ResidencyError(f"engines {what}: on trainer rank 0: {failure}") from error

    def _left(self) -> str:
        """GPU memory report, for errors of engines that may be out of memory."""
        device = self._policy.parallel.device
        if device.type != "cuda":
            return ""
        usage = (torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device))
        free, total, reserved, used = (num_bytes / 2**30 for num_bytes in (*torch.cuda.mem_get_info(device), *usage))
        return (
            f"\n{free:.1f} of {total:.1f} GiB of GPU {device.index} are free; the trainer's tensors take "
            f"{used:.1f} GiB and its allocator reserves {reserved:.1f} GiB. If engines ran out of memory, lower "
            "engine.gpu_memory_utilization"
        )
