"""Ranks, sizes and process groups of this trainer process, and its object collectives.

In: a ParallelConfig and, under torchrun, its environment variables. Out: a :class:`Parallel`, whose groups are
Megatron-Core's. Runs on: every trainer rank, once per process.

Axes, innermost first: tensor, context, data, pipeline. In expert layers the ranks of a pipeline stage are divided into
expert tensor, expert and expert data instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_fp8rl.config import ParallelConfig
from megatron_fp8rl.trainer.compat import megatron_on_cpu
from megatron_fp8rl.trainer.messages import pack, unpack

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Sizes, ranks and groups of this process. Create it with :meth:`init`, once per process."""

    config: ParallelConfig
    rank: int
    world_size: int
    device: torch.device
    deadline_s: float
    tp_size: int  # tensor
    tp_rank: int
    pp_size: int  # pipeline
    pp_rank: int
    cp_size: int  # context
    cp_rank: int
    dp_size: int  # data, without context
    dp_rank: int
    ep_size: int  # expert
    ep_rank: int
    etp_size: int  # expert tensor
    etp_rank: int
    tp_group: ProcessGroup
    pp_group: ProcessGroup
    cp_group: ProcessGroup
    dp_cp_group: ProcessGroup  # ranks with the same non-expert parameters
    ep_group: ProcessGroup
    etp_group: ProcessGroup
    expert_dp_group: ProcessGroup  # ranks with the same expert parameters
    control_group: ProcessGroup  # all ranks, gloo; for objects and barriers
    data_control_group: ProcessGroup  # the data-parallel ranks, gloo; for objects
    replica_control_group: ProcessGroup  # ranks with the same dp_rank, gloo; for objects

    @classmethod
    def init(cls, config: ParallelConfig, *, deadline_s: float = 600.0) -> Parallel:
        """Collective over all trainer ranks: initialize torch.distributed and build the groups.

        Reads RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and LOCAL_RANK from torchrun, or runs as a single process if
        none is set. ``deadline_s`` is the timeout of every collective. Raises ValueError if the number of processes
        is not ``config.world_size``, and RuntimeError if the program has not called ``megatron_on_cpu.install``.
        """
        megatron_on_cpu.require_installed()
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if world_size != config.world_size:
            raise ValueError(
                f"parallel.world_size = {config.world_size}, but {world_size} trainer processes were started. "
                f"Start {config.world_size} with torchrun, or change parallel.world_size"
            )
        device = _device()
        limit_host_threads(device)
        _connect(device, world_size, timedelta(seconds=deadline_s))
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor,
            pipeline_model_parallel_size=config.pipeline,
            virtual_pipeline_model_parallel_size=config.virtual_stages if config.virtual_stages > 1 else None,
            context_parallel_size=config.context,
            expert_model_parallel_size=config.expert,
            expert_tensor_parallel_size=config.expert_tensor,
            distributed_timeout_minutes=max(1, round(deadline_s / 60)),
        )
        axes, groups = _axes(), _groups(deadline_s)
        replica = _replica_group(axes, groups["control_group"], deadline_s)
        return cls(config=config, device=device, deadline_s=deadline_s, **axes, **groups, replica_control_group=replica)

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the output head, and therefore losses and log-probabilities."""
        return self.pp_rank == self.pp_size - 1

    def broadcast_object(self, value: _T) -> _T:
        """Collective over all trainer ranks: broadcast rank 0's value, which must be picklable."""
        if self.world_size == 1:
            return value
        values = [value if self.rank == 0 else None]
        dist.broadcast_object_list(values, src=0, group=self.control_group)
        return values[0]

    def scatter_over_data(self, shares: Sequence[_T] | None) -> _T:
        """Collective over all trainer ranks: each gets rank 0's picklable share for its ``dp_rank``. Rank 0 sends each
        share once per data-parallel replica, whose first rank broadcasts it."""
        message, share = None, None
        if self.rank == 0:
            in_flight: list[tuple[dist.Work, Tensor]] = []  # keeps tensors until they are sent
            for data_rank in range(1, self.dp_size):
                message = pack(shares[data_rank])  # while the previous message is sent
                _wait(in_flight)
                send = partial(dist.isend, group=self.data_control_group, group_dst=data_rank)
                in_flight = [(send(part), part) for part in _with_sizes(message)]
            _wait(in_flight)
            share = shares[0]
        elif self.tp_rank == self.pp_rank == self.cp_rank == 0:
            share = unpack(_received(partial(dist.recv, group=self.data_control_group, group_src=0)))
        if self.world_size > self.dp_size:
            message = _broadcast(None if share is None else pack(share), self.replica_control_group)
        return unpack(message) if share is None else share

    def barrier(self, name: str) -> None:
        """Collective over all trainer ranks: wait for all. Raises RuntimeError that names the missing ranks."""
        if self.world_size == 1:
            return
        try:
            dist.monitored_barrier(self.control_group, timeout=timedelta(seconds=self.deadline_s), wait_all_ranks=True)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} waited {self.deadline_s:.0f} s at barrier {name!r}: {error}. "
                "Look for the first error in the output of these ranks"
            ) from error

    def sum_over_data(self, values: dict[str, float]) -> dict[str, float]:
        """Collective over the data-parallel ranks: sum per key. Keys may be missing on some ranks."""
        return self._combine(values, sum)

    def max_over_data(self, values: dict[str, float]) -> dict[str, float]:
        """Collective over the data-parallel ranks: maximum per key. Keys may be missing on some ranks."""
        return self._combine(values, max)

    def gather_over_data(self, value: _T) -> list[_T]:
        """Collective over the data-parallel ranks: gather picklable values in the order of ``dp_rank``."""
        return _gather(value, self.dp_size, self.data_control_group)

    def gather_from_all(self, value: _T) -> list[_T]:
        """Collective over all trainer ranks: gather picklable values in the order of ranks."""
        return _gather(value, self.world_size, self.control_group)

    # The reducer interface that ``algo.mismatch`` and the observer expect.
    sum, max, gather = sum_over_data, max_over_data, gather_over_data

    def _combine(self, values: dict[str, float], how: Callable[[list[float]], float]) -> dict[str, float]:
        parts = self.gather_over_data(values)
        keys = dict.fromkeys(key for part in parts for key in part)
        return {key: how([part[key] for part in parts if key in part]) for key in keys}

    def close(self) -> None:
        """Destroy the process groups; :meth:`init` may be called again."""
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()


def _gather[Value](value: Value, num: int, group: ProcessGroup) -> list[Value]:
    """Collective over a group of ``num`` ranks."""
    if num == 1:
        return [value]
    gathered: list[Any] = [None] * num
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def _wait(in_flight: list[tuple[dist.Work, Tensor]]) -> None:
    for work, _ in in_flight:
        work.wait()


def _with_sizes(message: list[Tensor]) -> list[Tensor]:
    """The tensors to send: the number of parts, the bytes of each part, and the parts that are not empty."""
    sizes = [part.numel() for part in message]
    return [torch.tensor([len(sizes)]), torch.tensor(sizes), *(part for part in message if part.numel())]


def _broadcast(message: list[Tensor] | None, group: ProcessGroup) -> list[Tensor]:
    """Collective over a group: broadcast the message of its first rank."""
    share = partial(dist.broadcast, group=group, group_src=0)
    if message is None:
        return _received(share)
    for part in _with_sizes(message):
        share(part)
    return message


def _received(fill: Callable[[Tensor], Any]) -> list[Tensor]:
    """Receive a message; ``fill`` receives one tensor of :func:`_with_sizes` in place."""
    num_parts = torch.empty(1, dtype=torch.int64)
    fill(num_parts)
    sizes = torch.empty(int(num_parts), dtype=torch.int64)
    fill(sizes)
    message = [torch.empty(size, dtype=torch.uint8) for size in sizes.tolist()]
    for part in filter(Tensor.numel, message):
        fill(part)
    return message


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def limit_host_threads(device: torch.device) -> None:
    """On GPU machines, use one host thread per operation, unless OMP_NUM_THREADS is set. PyTorch otherwise starts a
    thread per core: 0.13 s instead of 0.1 ms with two processes of 64 threads on two cores."""
    if device.type == "cuda" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def _connect(device: torch.device, world_size: int, timeout: timedelta) -> None:
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        # Single process: no rendezvous, so no port to choose.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=world_size, timeout=timeout)


def _axes() -> dict[str, int]:
    return {
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "tp_size": parallel_state.get_tensor_model_parallel_world_size(),
        "tp_rank": parallel_state.get_tensor_model_parallel_rank(),
        "pp_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "pp_rank": parallel_state.get_pipeline_model_parallel_rank(),
        "cp_size": parallel_state.get_context_parallel_world_size(),
        "cp_rank": parallel_state.get_context_parallel_rank(),
        "dp_size": parallel_state.get_data_parallel_world_size(),
        "dp_rank": parallel_state.get_data_parallel_rank(),
        "ep_size": parallel_state.get_expert_model_parallel_world_size(),
        "ep_rank": parallel_state.get_expert_model_parallel_rank(),
        "etp_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "etp_rank": parallel_state.get_expert_tensor_parallel_rank(),
    }


def _groups(deadline_s: float) -> dict[str, ProcessGroup]:
    timeout = timedelta(seconds=deadline_s)
    return {
        "tp_group": parallel_state.get_tensor_model_parallel_group(),
        "pp_group": parallel_state.get_pipeline_model_parallel_group(),
        "cp_group": parallel_state.get_context_parallel_group(),
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "ep_group": parallel_state.get_expert_model_parallel_group(),
        "etp_group": parallel_state.get_expert_tensor_parallel_group(),
        "expert_dp_group": parallel_state.get_expert_data_parallel_group(),
        "control_group": dist.new_group(backend="gloo", timeout=timeout),
        "data_control_group": parallel_state.get_data_parallel_group_gloo(),
    }


def _replica_group(axes: dict[str, int], control: ProcessGroup, deadline_s: float) -> ProcessGroup:
    """Collective: the group of ranks with the same ``dp_rank``. Its first rank is at 0 on all other axes."""
    if axes["dp_size"] in (1, axes["world_size"]):
        return control  # one replica of all ranks, or replicas of one rank, which need no group
    data_ranks: list[Any] = [None] * axes["world_size"]
    dist.all_gather_object(data_ranks, axes["dp_rank"], group=control)
    members = [[rank for rank, r in enumerate(data_ranks) if r == data_rank] for data_rank in range(axes["dp_size"])]
    groups = [dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=deadline_s)) for ranks in members]
    return groups[axes["dp_rank"]]
