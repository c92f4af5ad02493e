"""Publish the trainer's weights to the engines, and prove that they arrived.

In:  a policy on all trainer ranks, a fleet of engines on rank 0.
Out: engines that sample from the new weights, and a :class:`PublishReport`.
Runs on every trainer rank; rank 0 alone talks to the engines.

    all ranks  pack their parts of a bucket (FP8 where blocks allow)        weights/gather.py
    rank 0     puts the bucket together, digests it                         weights/digest.py
    rank 0     hands it to the engines while the next one is prepared       weights/transport.py
    engines    slice, fuse and load it                                      rollout/transfer.py
    engines    digest what their kernels hold                               rollout/worker.py
    rank 0     compares by name                                             weights/verify.py
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.fp8.layers import LayerTable
from megatron_fp8rl.rollout.wire import BucketInfo, unpack
from megatron_fp8rl.types import KVScales, PublishReport
from megatron_fp8rl.weights.digest import combine, digests
from megatron_fp8rl.weights.gather import Gather, Piece, together
from megatron_fp8rl.weights.plan import Bucket, EngineLayout, Plan, TrainerLayout, Transfer, plan, scale_range
from megatron_fp8rl.weights.save import save_hf
from megatron_fp8rl.weights.transport import Transport, TransportError, build_transport
from megatron_fp8rl.weights.verify import Expected, verify, verify_kv_scales

if TYPE_CHECKING:
    from megatron_fp8rl.rollout.fleet import Fleet
    from megatron_fp8rl.trainer.policy import Policy

__all__ = ["WeightExporter", "save_hf"]

_GROUP_MARGIN_S = 60.0  # how much longer the other ranks wait than rank 0 gives the engines


class Engines:
    """All replicas of a fleet, driven together from a blocking thread. Every call has what is left of one deadline."""

    def __init__(self, fleet: Fleet, rollout_tensor: int, deadline_s: float):
        self.num_replicas = len(fleet.clients)
        self.workers_per_replica = rollout_tensor
        self._fleet = fleet
        self._deadline_s = deadline_s
        self._end = time.monotonic() + deadline_s

    def start_clock(self) -> None:
        """Begin a publication: from now on ``deadline_s`` for all calls in all."""
        self._end = time.monotonic() + self._deadline_s

    def call(self, what: str, method: Callable[[int, Any], Awaitable[Any]]) -> list[Any]:
        """``method(i, client)`` on all replicas at once; results in their order.

        Raises TransportError with the replica and ``what`` as soon as one fails or the deadline passes.
        """

        async def one(index: int, client: Any) -> Any:
            try:
                return await method(index, client)
            except Exception as error:  # of any layer of the client; the cause says which
                raise TransportError(f"{what}: replica {index}: {error}") from error

        async def everywhere() -> list[Any]:
            return await asyncio.gather(*(one(i, client) for i, client in enumerate(self._fleet.clients)))

        left_s = self._end - time.monotonic()
        try:
            return self._fleet.sync(everywhere(), max(left_s, 0.1))
        except TimeoutError as error:
            raise TransportError(
                f"{what}: not all engines answered; the publication had {self._deadline_s:.0f} s "
                "(rollout.update_deadline_s). Look at the engines' logs for one that hangs"
            ) from error

    def init_transfer(self, infos: Sequence[dict[str, Any]]) -> None:
        """See :class:`megatron_fp8rl.weights.transport.Receivers`."""
        self.call("init_weight_transfer_engine", lambda i, client: client.init_transfer(infos[i]))

    def update_weights(self, info: dict[str, Any]) -> None:
        """See :class:`megatron_fp8rl.weights.transport.Receivers`."""
        what = f"bucket {info['bucket'] + 1} of {info['num_buckets']} ({info['names'][0]} to {info['names'][-1]})"
        self.call(what, lambda _, client: client.update_weights(info))


@dataclass
class _Sent:
    """What rank 0 knows about the publication under way."""

    version: int
    expected: Expected
    whole: dict[str, str] = field(default_factory=dict)  # digests of whole tensors, by Hugging Face name
    kv_scales: KVScales | None = None
    paused_at: float = 0.0
    pause_s: float = 0.0


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
        self.plan: Plan = plan(
            cfg.model,
            LayerTable.build(cfg.model, cfg.precision),
            TrainerLayout.from_config(cfg.parallel),
            EngineLayout.from_config(cfg.rollout),
            bucket_bytes=cfg.rollout.bucket_bytes,
        )
        self._group = None
        if parallel.world_size > 1:
            timeout = timedelta(seconds=cfg.rollout.update_deadline_s + _GROUP_MARGIN_S)
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._gather = Gather(
            self.plan,
            cfg.model,
            dict(policy.named_tensors()),
            scales=cfg.precision.scales,
            rank=self.rank,
            group=self._group,
            device=parallel.device,
        )
        self._engines = None
        self._transport = transport
        self._is_connected = False
        self._previous: Expected | None = None
        self._num_publications = 0
        together(lambda: self._set_up(fleet), self._group)

    def _set_up(self, fleet: Fleet | None) -> None:
        self._gather.check()
        if self.rank != 0:
            return
        if fleet is None:
            raise ValueError("WeightExporter: trainer rank 0 needs the fleet of engines to publish to")
        rollout = self.cfg.rollout
        self._engines = Engines(fleet, rollout.tensor, rollout.update_deadline_s)
        if self._transport is None:
            self._transport = build_transport(rollout.transport, self._engines, deadline_s=rollout.update_deadline_s)

    def publish(self, version: int, kv_scales: KVScales | None = None) -> PublishReport:
        """Collective: bring all engines to the current weights and call them policy ``version``.

        ``kv_scales`` are set with them where the engines keep an FP8 KV cache.

        Returns the same report on every rank. Raises, on every rank, TransportError when an engine fails or does not
        answer within ``rollout.update_deadline_s``, WeightMismatch or KVScaleMismatch when an engine holds something
        else than what was sent, and ValueError when a weight is not finite.
        """
        started = time.perf_counter()
        sent = _Sent(version, Expected(version, [{} for _ in range(self.plan.engine.tensor)]), kv_scales=kv_scales)
        if self._engines is not None:
            self._engines.start_clock()
        ready: tuple[int, dict[int, list[Piece]]] | None = None  # a bucket whose pieces rank 0 has
        for index, bucket in enumerate(self.plan.buckets):

            def deliver_and_pack(bucket: Bucket = bucket) -> dict[int, Piece]:
                if ready is not None and self.rank == 0:
                    self._deliver(sent, *ready)
                return self._gather.pack(bucket)

            own = together(deliver_and_pack, self._group)
            ready = index, self._gather.collect(bucket, own)

        def finish() -> PublishReport | None:
            if self.rank != 0:
                return None
            assert ready is not None
            self._deliver(sent, *ready)
            self._finish(sent)
            return self._report(sent, time.perf_counter() - started)

        report = together(finish, self._group)
        self._num_publications += 1
        if self._group is not None:
            carried = [report]
            dist.broadcast_object_list(carried, src=0, group=self._group)
            report = carried[0]
        assert report is not None
        return report

    def _deliver(self, sent: _Sent, index: int, pieces: dict[int, list[Piece]]) -> None:
        """Rank 0: put a bucket together, digest it and start sending it."""
        assert self._transport is not None
        bucket = self.plan.buckets[index]
        info = _describe(bucket, sent.version, index, len(self.plan.buckets))
        slot = self._transport.reserve(bucket.num_bytes)
        device = self._gather.device
        # On a GPU the bucket is put together and digested there, and crosses to the host in one piece.
        buffer = slot if device.type == "cpu" else torch.empty(bucket.num_bytes, dtype=torch.uint8, device=device)
        tensors = dict(unpack(buffer, info))
        self._gather.assemble(bucket, pieces, tensors)
        _require_finite(tensors)
        # Before they leave, so that damage on any part of the way shows.
        self._digest(sent, bucket, tensors)
        if buffer is not slot:
            slot.copy_(buffer)
        if index == 0:
            self._stop_engines(sent)
        self._transport.send(info)

    def _digest(self, sent: _Sent, bucket: Bucket, tensors: dict[str, Tensor]) -> None:
        """Digests of whole tensors, and of the slice of each that every engine rank has to hold."""
        slices: list[tuple[int, str, Tensor]] = []
        for transfer in bucket.transfers:
            for rank, kept in enumerate(transfer.slices):
                if kept is not None and not _is_whole(transfer, kept):
                    slices += [(rank, name, part) for name, part in _cut(transfer, kept, tensors)]
        values = digests([*tensors.values(), *(part for _, _, part in slices)])
        whole = dict(zip(tensors, values))
        sent.whole |= whole
        for transfer in bucket.transfers:
            for rank, kept in enumerate(transfer.slices):
                if kept is not None and _is_whole(transfer, kept):
                    names = (transfer.name, transfer.scale_name) if transfer.is_fp8 else (transfer.name,)
                    sent.expected.by_rank[rank] |= {name: whole[name] for name in names}
        for (rank, name, _), value in zip(slices, values[len(tensors) :]):
            sent.expected.by_rank[rank][name] = value

    def _stop_engines(self, sent: _Sent) -> None:
        """Rank 0: the first bucket is ready, so the engines pause as late as they can."""
        assert self._engines is not None and self._transport is not None
        if not self._is_connected:
            self._transport.connect()
            self._is_connected = True
        sent.paused_at = time.perf_counter()
        self._engines.call("pause", lambda _, client: client.pause("keep"))
        self._engines.call("start_weight_update", lambda _, client: client.start_update())

    def _finish(self, sent: _Sent) -> None:
        """Rank 0: wait for the last bucket, have it proven, and let the engines go on."""
        assert self._engines is not None and self._transport is not None
        self._transport.wait()
        self._engines.call("finish_weight_update", lambda _, client: client.finish_update(sent.version))
        if sent.kv_scales is not None:  # finishing an update sets them to 1
            held = self._engines.call("set_kv_scales", lambda _, client: client.set_kv_scales(sent.kv_scales))
            verify_kv_scales(held, sent.kv_scales, sent.version)
        every = self.cfg.observe.verify_every
        if every and self._num_publications % every == 0:
            reports = self._engines.call("weight_digests", lambda _, client: client.weight_digests())
            verify(reports, sent.expected, self._previous)
        self._previous = sent.expected
        # The prefix cache is empty: pausing dropped it, and nothing has run since.
        self._engines.call("resume", lambda _, client: client.resume())
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
            checksum=combine(sent.whole),
        )

    def close(self) -> None:
        """Release memory, files and connections. Harmless when called again, or after an error."""
        if self._transport is not None:
            self._transport.close()


def _describe(bucket: Bucket, version: int, index: int, num_buckets: int) -> BucketInfo:
    return BucketInfo(
        version=version,
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


def _require_finite(tensors: dict[str, Tensor]) -> None:
    """Raise ValueError that names the weights that are NaN or infinite. An FP8 block that is not has such a scale."""
    checked = {name: t for name, t in tensors.items() if t.dtype != torch.float8_e4m3fn}
    scales = [t.reshape(-1) for t in checked.values() if t.dtype == torch.float32]
    others = [t for t in checked.values() if t.dtype != torch.float32]
    # Scales of thousands of experts in one look; only a failure is worth one look each.
    if (not scales or torch.cat(scales).isfinite().all()) and all(t.isfinite().all() for t in others):
        return
    wrong = [name.removesuffix("_scale_inv") for name, t in checked.items() if not t.isfinite().all()]
    more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
    raise ValueError(
        f"not published, for they hold NaN or infinity: {', '.join(wrong[:5])}{more}; lower optim.lr and resume from "
        "the last checkpoint"
    )
