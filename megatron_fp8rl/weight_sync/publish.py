"""Send the trainer's weights to the engines, and verify that they arrived.

In: a policy on all trainer ranks, a fleet of engines on rank 0. Out: engines that sample from the new weights, and a
:class:`PublishReport`. Runs on every trainer rank; only rank 0 sends requests to the engines.

    rank 0     pauses the engines                                           weight_sync/engines.py
    all ranks  quantize and digest their weights, round by round            weight_sync/pack.py, weight_sync/sender.py
    all ranks  send them to the engine workers                              weight_sync/transports/
    engines    load them                                                    rollout/vllm_plugin/receiver.py
    engines    digest the tensors that their kernels read                   rollout/vllm_plugin/kernel_weights.py
    rank 0     compares digests by name, and resumes the engines            weight_sync/verify.py

With ``weight_sync.spare_weights`` engines receive weights while they sample, and pause only to copy and verify them.

The first publication to an engine has two passes. The first sends one layer of each kind through vLLM's loaders. The
second writes all weights directly into the tensors that the kernels read, after a check that those of that layer are
equal. Later publications only write directly. If a replica is new, all take both passes; if one dies, the publication
is repeated without it.

With ``lora.merge`` False, weights are the frozen base, which only a first publication sends and verifies. In every
publication the workers also load the adapter from a folder (weight_sync/publish_adapter.py), and digest it.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_fp8rl.types import KVScales, PublishReport
from megatron_fp8rl.weight_sync.agreement import TrainerRankError, together
from megatron_fp8rl.weight_sync.digest import combine
from megatron_fp8rl.weight_sync.engines import Engines, NoReplicaError, Receivers, TransportError
from megatron_fp8rl.weight_sync.plan import Plan
from megatron_fp8rl.weight_sync.plan_inputs import PlanInputs
from megatron_fp8rl.weight_sync.publish_adapter import AdapterFolders, WrittenAdapter
from megatron_fp8rl.weight_sync.sender import ShardSender
from megatron_fp8rl.weight_sync.transports.choose import resolve
from megatron_fp8rl.weight_sync.verify import Expected, all_match, verify, verify_kv_scales

if TYPE_CHECKING:
    from megatron_fp8rl.trainer.policy import Policy

_log = logging.getLogger(__name__)

_GROUP_MARGIN_S = 60.0  # the other ranks wait this much longer than the engines' deadline


@dataclass
class _Sent:
    """Rank 0's view of the publication in progress."""

    version: int
    expected: Expected
    mode: str = "direct"  # of the current round: see rollout/vllm_plugin/receiver.py
    kv_scales: KVScales | None = None
    adapter: WrittenAdapter | None = None
    paused_at: float = 0.0
    pause_s: float = 0.0
    connect_s: float = 0.0
    prepare_s: float = 0.0
    pack_s: float = 0.0
    send_s: float = 0.0
    load_s: float = 0.0
    verify_s: float = 0.0


class WeightExporter:
    """Publishes the weights of a policy to a fleet, any number of times.

    Collective: the constructor and every method but :meth:`close`. ``fleet`` is None on all ranks but 0. If any rank
    fails, every rank raises its error, and engines, whose weights may be incomplete, stay paused.
    """

    def __init__(
        self,
        policy: Policy,
        fleet: Receivers | None,
        inputs: PlanInputs,
        adapters: AdapterFolders | None = None,  # of a policy whose adapters are not merged
    ):
        parallel, engine = policy.parallel, inputs.engine
        self.inputs = inputs
        self.rank = parallel.rank
        self.plan: Plan = inputs.plan
        self._group = None
        if parallel.world_size > 1:
            longest_s = engine.update_s + engine.start_s  # rank 0 may wait for a replica
            timeout = timedelta(seconds=longest_s + _GROUP_MARGIN_S)
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._is_connected = False
        self._num_replicas = 0  # that take part, and whether one of them is new
        self._has_new = True
        self._adapters = adapters
        self._previous: Expected | None = None
        self._base: Expected | None = None  # digests of the base of adapters
        self._num_publications = 0
        # Whether torchrun started all trainer ranks on one host. The engines run on the host of rank 0.
        one_host = parallel.world_size <= int(os.environ.get("LOCAL_WORLD_SIZE", parallel.world_size))
        kind = resolve(
            inputs.weight_sync.transport,
            on_gpu=parallel.device.type == "cuda",
            one_host=one_host and engine.placement != "remote",
            colocated=engine.placement == "colocated",
        )
        if kind == "ipc" and not one_host:
            raise ValueError(
                "weight_sync.transport = ipc works on one host, but trainer ranks are on several; choose nccl or auto"
            )
        self._engines = together(lambda: self._find_engines(fleet), self._group)
        self.sender = ShardSender(
            kind,
            inputs,
            dict(policy.named_tensors()),
            self._engines,
            rank=self.rank,
            group=self._group,
            device=parallel.device,
        )
        together(self.sender.check, self._group)
        if parallel.device.type == "cuda":
            together(self.sender.warm_up, self._group)

    def _find_engines(self, fleet: Receivers | None) -> Engines | None:
        if self.rank != 0:
            return None
        if fleet is None:
            raise ValueError("WeightExporter on trainer rank 0: fleet is None; pass the fleet of engines")
        return Engines(fleet, self.inputs.engine.update_s)

    def publish(self, version: int, kv_scales: KVScales | None = None) -> PublishReport:
        """Collective: send the current weights to all engines, as policy ``version``; return a report on every rank.

        ``kv_scales`` are the scales of an FP8 KV cache.

        Raises, on every rank:
            TransportError: an engine fails, misses its deadline, or no replica is left.
            WeightMismatch, KVScaleMismatch: an engine has other weights or scales than were sent.
            ValueError: a weight is not finite.
        """
        failure: Exception | None = None
        while True:
            try:
                self._begin_update()
                return self._publish(version, kv_scales)
            except NoReplicaError as error:
                raise error from failure
            except (TransportError, TrainerRankError) as error:
                if not self._may_repeat():
                    raise
                _log.warning("publishing policy version %d again, because a replica died: %s", version, error)
                failure = error

    def _begin_update(self) -> None:
        """Collective: fix the set of replicas."""
        members = together(lambda: None if self._engines is None else self._engines.begin_update(), self._group)
        must_connect, self._has_new, self._num_replicas = self._from_rank_0(members)
        self._is_connected = self._is_connected and not must_connect

    def _may_repeat(self) -> bool:
        """Collective: whether a replica has died, so that the publication may succeed without it."""
        lost = together(lambda: self._engines is not None and self._engines.has_lost_replica(), self._group)
        return self._from_rank_0(lost)

    def _from_rank_0(self, value: Any) -> Any:
        carried = [value]
        if self._group is not None:
            dist.broadcast_object_list(carried, src=0, group=self._group)
        return carried[0]

    def _publish(self, version: int, kv_scales: KVScales | None) -> PublishReport:
        """Collective: one attempt."""
        started = time.perf_counter()
        sent = _Sent(version, Expected(version, [{} for _ in range(self.plan.engine.size)]), kv_scales=kv_scales)
        self._prepare(sent)
        self._write_adapter(sent)
        for sent.mode in self._modes():
            self._send(sent)
            if sent.mode == "stage":
                self._switch(sent)

        def finish() -> PublishReport | None:
            if self.rank != 0:
                return None
            self._prove_and_resume(sent)
            return self._report(sent, time.perf_counter() - started)

        report = together(finish, self._group)
        self._num_publications += 1
        return self._from_rank_0(report)

    def _modes(self) -> tuple[str, ...]:
        if self._has_new:
            return "reload", "compare"
        if self._adapters is not None:
            return ()
        return ("direct",) if self.inputs.weight_sync.spare_weights == "none" else ("stage",)

    def _prepare(self, sent: _Sent) -> None:
        """Collective: do all preparation that does not need paused engines."""
        started = time.perf_counter()
        if not self._modes():
            return
        if not self._is_connected:
            self.sender.connect(self._num_replicas)
            self._is_connected = True
        connected = time.perf_counter()
        together(lambda: self.sender.prepare(self._modes()), self._group)
        sent.connect_s, sent.prepare_s = connected - started, time.perf_counter() - connected

    def _write_adapter(self, sent: _Sent) -> None:
        """Collective: gather the adapter, and write it while the engines sample."""
        if self._adapters is None:
            return
        started, adapters = time.perf_counter(), self._adapters
        tensors = together(adapters.gather, self._group)
        sent.adapter = together(lambda: adapters.write(tensors, self.plan) if tensors else None, self._group)
        sent.pack_s += time.perf_counter() - started

    def _send(self, sent: _Sent) -> None:
        """Collective: one pass over all weights."""
        sender = self.sender
        if sent.mode != "stage":
            together(lambda: self._stop_engines(sent) if self.rank == 0 else None, self._group)
        sums = together(lambda: sender.send(sent.version, sent.mode), self._group)
        sent.pack_s += sender.pack_s
        sent.send_s += sender.send_s
        if sent.mode == self._modes()[-1]:
            digests_by_rank = sender.digests(sums)
            if self.rank == 0:
                sent.expected.by_rank[:] = digests_by_rank
        if sent.mode != "stage":
            together(lambda: self._finish_update(sent) if self.rank == 0 else None, self._group)

    def _switch(self, sent: _Sent) -> None:
        """Collective: pause the engines and make them load the weights from their spare memory."""

        def switch() -> None:
            if self._engines is not None:
                self._stop_engines(sent)
                self._engines.update_weights({"version": sent.version, "mode": "switch", "attempt": 0})
                self._finish_update(sent)

        together(switch, self._group)

    def _stop_engines(self, sent: _Sent) -> None:
        """Rank 0: pause the engines. Call when weights are ready, so that they pause late."""
        assert self._engines is not None
        self._pause(sent)
        self._engines.call("start_weight_update", lambda _, client: client.start_update())

    def _pause(self, sent: _Sent) -> None:
        assert self._engines is not None
        if not sent.paused_at:
            sent.paused_at = time.perf_counter()
            self._engines.call("pause", lambda _, client: client.pause("keep"))

    def _finish_update(self, sent: _Sent) -> None:
        """Rank 0: complete the update after all weights are loaded."""
        assert self._engines is not None
        self._engines.call("finish_weight_update", lambda _, client: client.finish_update(sent.version))

    def _prove_and_resume(self, sent: _Sent) -> None:
        """Rank 0: verify the engines' weights and scales, and resume sampling."""
        assert self._engines is not None
        self._pause(sent)
        if sent.kv_scales is not None:  # vLLM resets them to 1 when an update finishes
            scales_of_rank = self._engines.call("set_kv_scales", lambda _, client: client.set_kv_scales(sent.kv_scales))
            verify_kv_scales(scales_of_rank, sent.kv_scales, sent.version)
        every = self.inputs.weight_sync.verify_every
        is_verified = bool(every) and (self._has_new or self._num_publications % every == 0)
        if is_verified and self._modes():
            started = time.perf_counter()
            reports = self._engines.call("weight_digests", lambda _, client: client.weight_digests(names=False))
            if not all_match(reports, sent.expected):
                reports = self._engines.call("weight_digests", lambda _, client: client.weight_digests())
                verify(reports, sent.expected, self._previous)
            sent.verify_s = time.perf_counter() - started
            sent.load_s = max(worker.get("load_s", 0.0) for workers in reports for worker in workers)
        if sent.adapter is not None:
            self._load_adapter(sent, sent.adapter, is_verified=is_verified)
        else:
            self._previous = sent.expected
        # The prefix cache is empty, because pause dropped it.
        self._engines.call("resume", lambda _, client: client.resume())
        self._engines.note_success()
        sent.pause_s = time.perf_counter() - sent.paused_at

    def _load_adapter(self, sent: _Sent, adapter: WrittenAdapter, *, is_verified: bool) -> None:
        """Rank 0: load the adapter in every worker, and compare its digests."""
        assert self._engines is not None
        if self._modes():
            self._base = sent.expected
        assert self._base is not None, "a replica whose base was not published would be new"
        started = time.perf_counter()
        path = str(adapter.folder)
        reports = self._engines.call("load_adapter", lambda _, client: client.load_adapter(path, sent.version))
        loaded = time.perf_counter()
        expected = Expected(sent.version, list(adapter.digests))
        if is_verified:
            verify(reports, expected, self._previous)
        self._previous = expected
        sent.load_s += loaded - started
        sent.verify_s += time.perf_counter() - loaded
        sums = {f"base of rank {rank}": combine(names) for rank, names in enumerate(self._base.by_rank)}
        sums |= {f"adapter of rank {rank}": combine(names) for rank, names in enumerate(expected.by_rank)}
        sent.expected = Expected(sent.version, [sums])

    def _report(self, sent: _Sent, seconds: float) -> PublishReport:
        transfers, adapter = self.plan.transfers if self._modes() else (), sent.adapter
        return PublishReport(
            version=sent.version,
            num_tensors=len(transfers) + (adapter.num_tensors if adapter else 0),
            num_fp8_tensors=sum(t.is_fp8 for t in transfers),
            num_bytes=(self.plan.num_bytes if transfers else 0) + (adapter.num_bytes if adapter else 0),
            seconds=seconds,
            pause_s=sent.pause_s,
            checksum=combine({str(rank): combine(held) for rank, held in enumerate(sent.expected.by_rank)}),
            connect_s=sent.connect_s,
            prepare_s=sent.prepare_s,
            pack_s=sent.pack_s,
            send_s=sent.send_s,
            load_s=sent.load_s,
            verify_s=sent.verify_s,
        )

    def close(self) -> None:
        """Release memory, files and connections. May be called repeatedly, and after an error."""
        self.sender.close()
        if self._adapters is not None:
            self._adapters.close()
