"""What the trainer and the engine workers agree on when weights travel: the plan, the layout of a bucket, a gloo group.

Runs in the trainer and in engine workers; imports neither vLLM nor Megatron. A bucket is one block of bytes; its
description is small, plain JSON and travels with the request that tells the engine to load the bucket.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp8rl.config import ModelConfig, ParallelConfig, PrecisionConfig, RolloutConfig, RunConfig
from megatron_fp8rl.kernels.compat import gloo_group_on
from megatron_fp8rl.net.address import own_address
from megatron_fp8rl.precision.layer_table import LayerTable
from megatron_fp8rl.weight_sync.plan import EngineLayout, Plan, Range, TrainerLayout, plan, scale_range
from megatron_fp8rl.weight_sync.schedule import Exchange, exchange


@dataclass(frozen=True, kw_only=True)
class BucketInfo:
    """Description of one bucket of one publication."""

    version: int  # of the policy that the publication brings
    mode: str = "reload"  # how it is loaded: see rollout/vllm_plugin/receiver.py
    bucket: int  # index of this bucket
    num_buckets: int  # of the publication
    num_bytes: int  # of the bucket
    names: list[str]  # Hugging Face names; scales are "<weight name>_scale_inv"
    dtypes: list[str]  # "bfloat16", "float8_e4m3fn", "float32"
    shapes: list[list[int]]
    offsets: list[int]  # bytes from the start of the bucket

    def to_json(self) -> dict[str, Any]:
        """Keyword arguments that build the same object again."""
        return dict(self.__dict__)


def unpack(buffer: Tensor, info: BucketInfo) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) pairs: views of ``buffer``, which is uint8 [at least info.num_bytes]."""
    for name, dtype_name, shape, offset in zip(info.names, info.dtypes, info.shapes, info.offsets, strict=True):
        dtype = getattr(torch, dtype_name)
        num_bytes = math.prod(shape) * dtype.itemsize
        yield name, buffer[offset : offset + num_bytes].view(dtype).view(shape)


def read_file(path: str, num_bytes: int) -> Tensor:
    """The first ``num_bytes`` of a file, uint8, in memory of its own.

    Raises FileNotFoundError when the trainer has removed the file, and ValueError when it is shorter. (A shared mapping
    by torch would create a missing file and read zeros.)
    """
    buffer = torch.empty(num_bytes, dtype=torch.uint8)
    with open(path, "rb") as file:
        num_read = file.readinto(memoryview(buffer.numpy()))
    if num_read != num_bytes:
        raise ValueError(f"{path}: {num_read} bytes, where a bucket of {num_bytes} was announced")
    return buffer


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """What a plan is computed from: trainer ranks and engine workers that have the same inputs have the same plan."""

    model: ModelConfig
    precision: PrecisionConfig
    parallel: ParallelConfig
    rollout: RolloutConfig

    @classmethod
    def of(cls, cfg: RunConfig) -> PlanInputs:
        return cls(model=cfg.model, precision=cfg.precision, parallel=cfg.parallel, rollout=cfg.rollout)

    @property
    def loaders_requantize(self) -> bool:
        """Whether vLLM's loaders on a GPU bring FP8 blocks into canonical form (``fp8.blockwise.canonical``)."""
        is_deep_gemm = self.rollout.linear_backend in ("auto", "deep_gemm")
        return self.rollout.weight_update == "reload" and self.precision.scales == "pow2" and is_deep_gemm

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> PlanInputs:
        return _rebuild(cls, content)

    @functools.cached_property
    def plan(self) -> Plan:
        """Raises PlanError when tensors cannot be divided so."""
        return plan(
            self.model,
            LayerTable.build(self.model, self.precision),
            TrainerLayout.from_config(self.parallel),
            EngineLayout.from_config(self.rollout),
            bucket_bytes=self.rollout.bucket_bytes,
        )

    def exchanges(self) -> tuple[Exchange, Exchange]:
        """What engine ranks keep, and whole tensors for vLLM's loaders."""
        size = self.rollout.bucket_bytes
        return exchange(self.plan, self.model, bucket_bytes=size), exchange(
            self.plan, self.model, bucket_bytes=size, whole=True
        )

    def kept_by(self, engine_rank: int) -> dict[str, tuple[int, Range]]:
        """Wire tensor -> (axis, [start, stop)) that an engine rank keeps; without those of which it keeps nothing."""
        found = {}
        for transfer in self.plan.transfers:
            kept = transfer.slices[engine_rank]
            if kept is not None:
                found[transfer.name] = transfer.axis, kept
                if transfer.is_fp8:
                    found[transfer.scale_name] = transfer.axis, scale_range(kept)
        return found


def _rebuild(cls: type, content: Mapping[str, Any]) -> Any:
    """A configuration dataclass from what JSON made of it."""
    hints = typing.get_type_hints(cls)
    values = {}
    for item in dataclasses.fields(cls):
        value = content[item.name]
        if isinstance(value, Mapping):
            kinds = [hints[item.name], *typing.get_args(hints[item.name])]
            value = _rebuild(next(kind for kind in kinds if dataclasses.is_dataclass(kind)), value)
        values[item.name] = tuple(value) if isinstance(value, list) else value
    return cls(**values)


def gloo_group(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    """A gloo group that other hosts reach.

    By itself gloo listens on the address that the host's name resolves to, which on many nodes is one of loopback.
    ``GLOO_SOCKET_IFNAME`` is respected as usual.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return dist.ProcessGroupGloo(store, rank, world_size, timeout)
    return gloo_group_on(own_address(), store, rank, world_size, timeout)


class GlooGroup:
    """A process group of trainer rank 0 and all engine workers that leaves torch.distributed's own state alone.

    Collective: the constructor returns when all ``world_size`` members have called it, and raises after ``timeout_s``.
    Rank 0 listens on ``port``.
    """

    def __init__(self, *, host: str, port: int, rank: int, world_size: int, timeout_s: float):
        timeout = timedelta(seconds=timeout_s)
        self.timeout = timeout
        self._store = dist.TCPStore(host, port, world_size, rank == 0, timeout, wait_for_workers=True)
        prefix = dist.PrefixStore("megatron_fp8rl/weights", self._store)
        self._group = gloo_group(prefix, rank, world_size, timeout)

    def broadcast(self, buffer: Tensor) -> None:
        """Collective: rank 0's bytes into ``buffer`` (uint8, CPU, contiguous) of all members.

        Raises RuntimeError when a member has gone or does not take part in time.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = self.timeout
        self._group.broadcast([buffer], options).wait(self.timeout)
