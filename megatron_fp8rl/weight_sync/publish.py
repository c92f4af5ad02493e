"""Publish the trainer's weights to the engines, and prove that they arrived.

In:  a policy on all trainer ranks, a fleet of engines on rank 0.
Out: engines that sample from the new weights, and a :class:`PublishReport`.
Runs on every trainer rank; rank 0 alone talks to the engines.

By way of rank 0 (rollout.transport shm, gloo):
    all ranks  pack their parts of a bucket (FP8 where blocks allow)        weight_sync/gather.py
    rank 0     puts the bucket together, digests it                         weight_sync/digest.py
    rank 0     hands it to the engines while the next one is prepared       weight_sync/transport.py
From shard to shard (ipc, nccl):
    all ranks  quantize and digest what they send, round by round           weight_sync/pack.py, weight_sync/shards.py
    all ranks  send it to the engine workers that keep it                   weight_sync/transports/base.py
Either way:
    engines    load it                                                      rollout/vllm_plugin/receiver.py
    engines    digest what their kernels hold                               rollout/vllm_plugin/worker.py
    rank 0     compares by name                                             weight_sync/verify.py

The first publication to an engine goes twice: through vLLM's own loaders, then straight into the tensors that its
kernels read, where the engine compares before it writes. Later ones go straight there (rollout.weight_update direct).
Replicas come and go between publications; when one is new, all of them take its two rounds, in step. One that dies in the
middle of a publication costs a repetition without it.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.types import KVScales, PublishReport
from megatron_fp8rl.weight_sync.digest import combine, prepare_digests
from megatron_fp8rl.weight_sync.engines import Engines, NoReplicaError
from megatron_fp8rl.weight_sync.finite import require_finite
from megatron_fp8rl.weight_sync.gather import Gather, Piece, TrainerRankError, together
from megatron_fp8rl.weight_sync.plan import Bucket, Plan, Transfer, scale_range
from megatron_fp8rl.weight_sync.save_hf import save_hf
from megatron_fp8rl.weight_sync.shards import ShardSender, resolve
from megatron_fp8rl.weight_sync.transport import Transport, TransportError, build_transport
from megatron_fp8rl.weight_sync.verify import Expected, holds_all, verify, verify_kv_scales
from megatron_fp8rl.weight_sync.wire import BucketInfo, PlanInputs, unpack

if TYPE_CHECKING:
    from megatron_fp8rl.rollout.fleet import Fleet
    from megatron_fp8rl.trainer.policy import Policy

__all__ = ["Engines", "WeightExporter", "save_hf"]

_log = logging.getLogger(__name__)

_GROUP_MARGIN_S = 60.0  # how much longer the other ranks wait than rank 0 gives the engines


@dataclass
class _Sent:
    """What rank 0 knows about the publication under way."""

    version: int
    expected: Expected
    mode: str = "direct"  # of the round under way: see rollout/vllm_plugin/receiver.py
    kv_scales: KVScales | None = None
    paused_at: float = 0.0
    pause_s: float = 0.0
    pack_s: float = 0.0
    send_s: float = 0.0
    load_s: float = 0.0
    verify_s: float = 0.0


class WeightExporter:
    """Publishes the weights of a policy to a fleet, any number of times.

    Collective: the constructor and every method but :meth:`close` run on all trainer ranks. ``fleet`` is None on all
    but rank 0. When anything fails on any rank, every rank raises the same error; the engines stay paused then, for
    they hold weights of no version.
    """

    def __init__(self, policy: Policy, fleet: Fleet | None, cfg: RunConfig, *, transport: Transport | None = None):
        parallel = policy.parallel
        self.cfg = cfg
        self.rank = parallel.rank
        inputs = PlanInputs.of(cfg)
        self.plan: Plan = inputs.plan
        self._group = None
        if parallel.world_size > 1:
            longest_s = cfg.rollout.update_deadline_s + cfg.rollout.start_deadline_s  # rank 0 may wait for a replica
            timeout = timedelta(seconds=longest_s + _GROUP_MARGIN_S)
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._gather = Gather(
            self.plan,
            cfg.model,
            dict(policy.named_tensors()),
            scales=cfg.precision.scales,
            rank=self.rank,
            group=self._group,
            device=parallel.device,
            in_canonical_form=inputs.loaders_requantize and parallel.device.type == "cuda",
        )
        self._engines = None
        self._transport = transport
        self._is_connected = False
        self._num_replicas = 0  # that take part, and whether one does for the first time
        self._has_new = True
        self._previous: Expected | None = None
        self._num_publications = 0
        on_gpu, one_host = parallel.device.type == "cuda", _one_host(parallel.world_size)
        one_host = one_host and cfg.rollout.placement != "remote"
        colocated = cfg.rollout.placement == "colocated"
        kind = resolve(cfg.rollout.transport, on_gpu=on_gpu, one_host=one_host, colocated=colocated)
        together(lambda: self._set_up(fleet, kind), self._group)
        self._shards: ShardSender | None = None
        if kind == "ipc" and not one_host:
            raise ValueError("rollout.transport = ipc: the trainer's ranks are on several hosts; choose nccl or auto")
        if kind in ("ipc", "nccl") and transport is None:
            self._shards = ShardSender(
                kind,
                inputs,
                self._gather.parameters,
                self._engines,
                rank=self.rank,
                group=self._group,
                device=parallel.device,
            )
            together(self._shards.check, self._group)

    def _set_up(self, fleet: Fleet | None, kind: str) -> None:
        self._gather.check()
        if self.rank != 0:
            return
        if fleet is None:
            raise ValueError("WeightExporter: trainer rank 0 needs the fleet of engines to publish to")
        rollout = self.cfg.rollout
        self._engines = Engines(fleet, rollout.tensor, rollout.update_deadline_s)
        if self._transport is None and kind in ("shm", "gloo"):
            self._transport = build_transport(kind, self._engines, deadline_s=rollout.update_deadline_s)
        if self._transport is not None:
            self._transport.config = PlanInputs.of(self.cfg).to_json()

    def publish(self, version: int, kv_scales: KVScales | None = None) -> PublishReport:
        """Collective: bring all engines to the current weights and call them policy ``version``.

        ``kv_scales`` are set with them where the engines keep an FP8 KV cache.

        Returns the same report on every rank. Raises, on every rank, TransportError when an engine fails or does not
        answer within ``rollout.update_deadline_s``, WeightMismatch or KVScaleMismatch when an engine holds something
        else than what was sent, and ValueError when a weight is not finite. A replica that dies is left out, and the
        publication repeated; when it was the last, and none comes back, that is a TransportError.
        """
        failure: Exception | None = None
        while True:
            try:
                self._meet()
                return self._publish(version, kv_scales)
            except NoReplicaError as error:
                raise error from failure
            except (TransportError, TrainerRankError) as error:
                if not self._may_repeat():
                    raise
                _log.warning("policy version %d is published again, for a replica has died: %s", version, error)
                failure = error

    def _meet(self) -> None:
        """Collective: settle which replicas take part."""
        found = together(lambda: None if self._engines is None else self._engines.meet(), self._group)
        must_connect, self._has_new, self._num_replicas = self._from_rank_0(found)
        self._is_connected = self._is_connected and not must_connect

    def _may_repeat(self) -> bool:
        """Collective: whether a replica has died, so that what failed may succeed without it."""
        lost = together(lambda: self._engines is not None and self._engines.lost_one(), self._group)
        if self._transport is not None and lost:
            self._transport.reset()
        return self._from_rank_0(lost)

    def _from_rank_0(self, value: Any) -> Any:
        carried = [value]
        if self._group is not None:
            dist.broadcast_object_list(carried, src=0, group=self._group)
        return carried[0]

    def _publish(self, version: int, kv_scales: KVScales | None) -> PublishReport:
        """Collective: one attempt."""
        started = time.perf_counter()
        sent = _Sent(version, Expected(version, [{} for _ in range(self.plan.engine.tensor)]), kv_scales=kv_scales)
        for sent.mode in self._modes():
            if self._shards is not None:
                self._send_shards(sent, self._shards)
            else:
                self._send_buckets(sent)

        def finish() -> PublishReport | None:
            if self.rank != 0:
                return None
            self._prove_and_resume(sent)
            return self._report(sent, time.perf_counter() - started)

        report = together(finish, self._group)
        self._num_publications += 1
        return self._from_rank_0(report)

    def _modes(self) -> tuple[str, ...]:
        if self.cfg.rollout.weight_update == "reload":
            return ("reload",)
        return ("reload", "compare") if self._has_new else ("direct",)

    def _send_shards(self, sent: _Sent, shards: ShardSender) -> None:
        """Collective: one round trip of all weights, from shard to shard."""
        if not self._is_connected:
            shards.connect(self._num_replicas)
            self._is_connected = True
        together(lambda: self._stop_engines(sent) if self.rank == 0 else None, self._group)
        sums = together(lambda: shards.send(sent.version, sent.mode), self._group)
        sent.pack_s += shards.pack_s
        sent.send_s += shards.send_s
        if sent.mode == self._modes()[-1]:
            found = shards.digests(sums)
            if self.rank == 0:
                sent.expected.by_rank[:] = found
        together(lambda: self._finish_update(sent) if self.rank == 0 else None, self._group)

    def _send_buckets(self, sent: _Sent) -> None:
        """Collective: one round trip of all weights, by way of rank 0."""
        ready: tuple[int, dict[int, list[Piece]]] | None = None  # a bucket whose pieces rank 0 has
        for index, bucket in enumerate(self.plan.buckets):

            def deliver_and_pack(bucket: Bucket = bucket) -> dict[int, Piece]:
                if ready is not None and self.rank == 0:
                    self._deliver(sent, *ready)
                started = time.perf_counter()
                own = self._gather.pack(bucket)
                sent.pack_s += time.perf_counter() - started
                return own

            own = together(deliver_and_pack, self._group)
            ready = index, self._gather.collect(bucket, own)

        def finish() -> None:
            if self.rank == 0:
                assert ready is not None and self._transport is not None
                self._deliver(sent, *ready)
                started = time.perf_counter()
                self._transport.wait()
                sent.send_s += time.perf_counter() - started
                self._finish_update(sent)

        together(finish, self._group)

    def _deliver(self, sent: _Sent, index: int, pieces: dict[int, list[Piece]]) -> None:
        """Rank 0: put a bucket together, digest it and start sending it."""
        assert self._transport is not None
        bucket = self.plan.buckets[index]
        info = _describe(bucket, sent.version, index, len(self.plan.buckets), sent.mode)
        started = time.perf_counter()
        slot = self._transport.reserve(bucket.num_bytes)
        sent.send_s += time.perf_counter() - started
        started = time.perf_counter()
        device = self._gather.device
        # On a GPU the bucket is put together and digested there, and crosses to the host in one piece.
        buffer = slot if device.type == "cpu" else torch.empty(bucket.num_bytes, dtype=torch.uint8, device=device)
        tensors = dict(unpack(buffer, info))
        self._gather.assemble(bucket, pieces, tensors)
        require_finite(tensors)
        # Before they leave, so that damage on any part of the way shows.
        self._digest(sent, bucket, tensors)
        if buffer is not slot:
            slot.copy_(buffer)
        sent.pack_s += time.perf_counter() - started
        if index == 0:
            if not self._is_connected:
                self._transport.connect()
                self._is_connected = True
            self._stop_engines(sent)
        self._transport.send(info)

    def _digest(self, sent: _Sent, bucket: Bucket, tensors: dict[str, Tensor]) -> None:
        """Digests of the slice of each tensor that every engine rank has to hold."""
        slices: list[tuple[int, str, Tensor]] = []
        for transfer in bucket.transfers:
            for rank, kept in enumerate(transfer.slices):
                if kept is not None and (rank == 0 or not _is_whole(transfer, kept) or transfer.slices[0] != kept):
                    slices += [(rank, name, part) for name, part in _cut(transfer, kept, tensors)]
        for (rank, name, _), value in zip(slices, prepare_digests([part for _, _, part in slices])()):
            sent.expected.by_rank[rank][name] = value
        for transfer in bucket.transfers:  # what every engine rank keeps whole is digested once
            for rank, kept in enumerate(transfer.slices):
                if rank and kept is not None and _is_whole(transfer, kept) and transfer.slices[0] == kept:
                    names = (transfer.name, transfer.scale_name) if transfer.is_fp8 else (transfer.name,)
                    sent.expected.by_rank[rank] |= {name: sent.expected.by_rank[0][name] for name in names}

    def _stop_engines(self, sent: _Sent) -> None:
        """Rank 0: weights are ready to be sent, so the engines pause as late as they can."""
        assert self._engines is not None
        if not sent.paused_at:
            sent.paused_at = time.perf_counter()
            self._engines.call("pause", lambda _, client: client.pause("keep"))
        self._engines.call("start_weight_update", lambda _, client: client.start_update())

    def _finish_update(self, sent: _Sent) -> None:
        """Rank 0: everything has been sent and loaded."""
        assert self._engines is not None
        self._engines.call("finish_weight_update", lambda _, client: client.finish_update(sent.version))

    def _prove_and_resume(self, sent: _Sent) -> None:
        """Rank 0: have what the engines hold proven, and let them go on."""
        assert self._engines is not None
        if sent.kv_scales is not None:  # finishing an update sets them to 1
            held = self._engines.call("set_kv_scales", lambda _, client: client.set_kv_scales(sent.kv_scales))
            verify_kv_scales(held, sent.kv_scales, sent.version)
        every = self.cfg.observe.verify_every
        if every and (self._has_new or self._num_publications % every == 0):
            started = time.perf_counter()
            reports = self._engines.call("weight_digests", lambda _, client: client.weight_digests(names=False))
            if not holds_all(reports, sent.expected):
                reports = self._engines.call("weight_digests", lambda _, client: client.weight_digests())
                verify(reports, sent.expected, self._previous)
            sent.verify_s = time.perf_counter() - started
            sent.load_s = max(worker.get("load_s", 0.0) for workers in reports for worker in workers)
        self._previous = sent.expected
        # The prefix cache is empty: pausing dropped it, and nothing has run since.
        self._engines.call("resume", lambda _, client: client.resume())
        self._engines.note_success()
        sent.pause_s = time.perf_counter() - sent.paused_at

    def _report(self, sent: _Sent, seconds: float) -> PublishReport:
        transfers = self.plan.transfers
        return PublishReport(
            version=sent.version,
            num_tensors=len(transfers),
            num_fp8_tensors=sum(t.is_fp8 for t in transfers),
            num_bytes=self.plan.num_bytes,
            seconds=seconds,
            pause_s=sent.pause_s,
            checksum=combine({str(rank): combine(held) for rank, held in enumerate(sent.expected.by_rank)}),
            pack_s=sent.pack_s,
            send_s=sent.send_s,
            load_s=sent.load_s,
            verify_s=sent.verify_s,
        )

    def close(self) -> None:
        """Release memory, files and connections. Harmless when called again, or after an error."""
        if self._transport is not None:
            self._transport.close()
        if self._shards is not None:
            self._shards.close()


def _one_host(world_size: int) -> bool:
    """Whether torchrun started all trainer ranks on one host; the engines are on that of rank 0."""
    return world_size <= int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def _describe(bucket: Bucket, version: int, index: int, num_buckets: int, mode: str) -> BucketInfo:
    return BucketInfo(
        version=version,
        mode=mode,
        bucket=index,
        num_buckets=num_buckets,
        num_bytes=bucket.num_bytes,
        names=[t.name for t in bucket.tensors],
        dtypes=[t.dtype for t in bucket.tensors],
        shapes=[list(t.shape) for t in bucket.tensors],
        offsets=[t.offset for t in bucket.tensors],
    )


def _is_whole(transfer: Transfer, kept: tuple[int, int]) -> bool:
    return kept == (0, transfer.shape[transfer.axis])


def _cut(transfer: Transfer, kept: tuple[int, int], tensors: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    """The part of a tensor, and of its scales, that an engine rank keeps."""
    ranges = [(transfer.name, kept)]
    if transfer.is_fp8:
        ranges.append((transfer.scale_name, scale_range(kept)))
    return [(name, tensors[name].narrow(transfer.axis, first, end - first)) for name, (first, end) in ranges]
