"""vLLM weight-transfer engines: how an engine worker receives a bucket of weights and loads it.

In:  requests of vLLM's weight-update API (``init``, ``start``, ``update`` once per bucket, ``finish``) that describe
     buckets (:class:`BucketInfo`).
Out: the model's kernel parameters, replaced in place by vLLM's layerwise reload, which slices and fuses tensors of a
     checkpoint as a fresh load does.
Runs in every engine worker; ``rollout/plugin.py`` registers the engines. ``fp8rl_shm`` reads a file in shared memory,
``fp8rl_gloo`` a broadcast of trainer rank 0.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from megatron_fp8rl.rollout.wire import BucketInfo, GlooGroup, read_file, unpack


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """Shared memory needs no introduction."""


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """Where the group meets. ``rank_offset`` is the rank of the first worker of this replica; the trainer is rank 0."""

    host: str
    port: int
    rank_offset: int
    world_size: int
    timeout_s: float


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One bucket: the fields of :class:`BucketInfo`, and the file that holds the bytes when they travel in one."""

    version: int
    bucket: int
    num_buckets: int
    num_bytes: int
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    offsets: list[int]
    path: str = ""

    @property
    def info(self) -> BucketInfo:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(BucketInfo)}
        return BucketInfo(**fields)


def _is_news(record: logging.LogRecord) -> bool:
    """False for the warning that the rotary embedding received no weights: it has none."""
    return not (record.msg == "%s: Failed to load weights" and record.args == ("RotaryEmbedding",))


class _LayerwiseTransferEngine(WeightTransferEngine):
    """Loads buckets through vLLM's layerwise reload and keeps count of them.

    ``version`` is the policy version whose weights were loaded last, or None before the first publication. An update
    that fails or loses a bucket leaves no version.
    """

    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.version: int | None = None
        self._incoming: int | None = None
        self._num_received = 0
        self._num_expected = 0
        # vLLM 0.25.1 warns at every update about modules without weights; remove when its reload skips them.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(_is_news)

    def start_weight_update(self) -> None:
        self.version = self._incoming = None
        self._num_received = self._num_expected = 0
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load one bucket. Raises RuntimeError when it is not the next one of the update."""
        if update_info.bucket != self._num_received or self._incoming not in (None, update_info.version):
            raise RuntimeError(
                f"bucket {update_info.bucket} of policy version {update_info.version} arrived where bucket "
                f"{self._num_received} of version {self._incoming} was due; publish again from the start"
            )
        self._incoming = update_info.version
        buffer = self._receive(update_info)
        # The reload keeps references until the last tensor of a module has come, so the bytes are this engine's own.
        self.model.load_weights(unpack(buffer, update_info.info))
        self._num_received += 1
        self._num_expected = update_info.num_buckets

    def _receive(self, update_info: UpdateInfo) -> torch.Tensor:
        """The bucket's bytes in memory that nobody else writes to: uint8 on this worker's device."""
        raise NotImplementedError

    def finish_weight_update(self) -> None:
        """Complete the update. Raises RuntimeError when a bucket is missing."""
        if self._incoming is None or self._num_received != self._num_expected:
            raise RuntimeError(
                f"policy version {self._incoming}: {self._num_received} of {self._num_expected} buckets have arrived; "
                "publish again from the start"
            )
        finalize_layerwise_reload(self.model, self.model_config)
        self.version = self._incoming

    def shutdown(self) -> None:
        """Nothing is held between updates."""

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        raise NotImplementedError("the trainer sends through megatron_fp8rl.weights.transport")


class ShmWeightTransferEngine(_LayerwiseTransferEngine):
    """Copies a bucket out of a file in shared memory; the trainer may refill the file when the request returns."""

    init_info_cls = NoInitInfo

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        """Nothing to set up."""

    def _receive(self, update_info: UpdateInfo) -> torch.Tensor:
        return read_file(update_info.path, update_info.num_bytes).to(self.device)


class GlooWeightTransferEngine(_LayerwiseTransferEngine):
    """Receives a bucket as a broadcast over TCP, from another host if need be."""

    init_info_cls = GlooInitInfo
    _group: GlooGroup | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Collective: joins the trainer and the workers of all replicas."""
        parallel = self.parallel_config
        self._group = GlooGroup(
            host=init_info.host,
            port=init_info.port,
            rank=init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank,
            world_size=init_info.world_size,
            timeout_s=init_info.timeout_s,
        )

    def _receive(self, update_info: UpdateInfo) -> torch.Tensor:
        if self._group is None:
            raise RuntimeError("weights arrived before init_weight_transfer_engine set up the gloo group")
        buffer = torch.empty(update_info.num_bytes, dtype=torch.uint8)
        self._group.broadcast(buffer)
        return buffer.to(self.device)

    def shutdown(self) -> None:
        self._group = None
