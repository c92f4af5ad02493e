"""From shard to shard without GPUs: gloo in the place of NCCL, shared memory in the place of CUDA IPC, the same code.

The engine workers are threads of rank 0 that keep what arrives; what they hold has to be, byte for byte, what they cut
out of the whole tensors that one trainer rank publishes by way of rank 0.
"""

from __future__ import annotations

import asyncio
import functools
import time
from dataclasses import replace

import pytest
import torch
from test_export import Fleet, build, config, digests_of, layout_name, publish, report_of, timeless

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.weight_sync.transports.base import Fabric, Place, open_fabric, open_store
from megatron_fp8rl.weight_sync.wire import PlanInputs
from megatron_fp8rl.types import PublishReport
from tests.helpers.dist import run_ranks

CPU = torch.device("cpu")
CASES = [
    ("dense", "nccl", dict(world_size=2, tensor=2), dict()),
    ("dense", "ipc", dict(world_size=2, pipeline=2, virtual_stages=2), dict()),
    ("tied", "ipc", dict(world_size=2, tensor=2), dict()),
    ("moe", "nccl", dict(world_size=2, tensor=2), dict(tensor=2)),
    ("moe", "ipc", dict(world_size=2, expert=2), dict(tensor=2, expert=2, num_replicas=2)),
    ("moe", "nccl", dict(world_size=2, expert=2), dict(tensor=1)),
    ("moe", "nccl", dict(world_size=2, pipeline=2), dict(tensor=2, num_replicas=2)),
    ("moe", "ipc", dict(world_size=2), dict(tensor=2)),
    ("moe", "ipc", dict(world_size=4, tensor=2, expert=2, expert_tensor=2), dict(tensor=2, expert=2)),
    ("latent", "nccl", dict(world_size=2, tensor=2, expert=2), dict()),
]


class Worker:
    """An engine worker without an engine."""

    def __init__(self, engine_rank: int):
        self.engine_rank = engine_rank
        self.held: dict[str, torch.Tensor] = {}
        self.fabric: Fabric | None = None
        self.die_at = -1

    def join(self, info: dict) -> None:
        self.inputs = PlanInputs.from_json(info["config"])
        self.exchanges = self.inputs.exchanges()
        place = Place(
            rank=info["rank_offset"] + self.engine_rank,
            num_trainers=info["num_trainers"],
            num_replicas=info["num_replicas"],
            num_engine_ranks=self.inputs.rollout.tensor,
        )
        store = open_store(info["host"], info["port"], info["timeout_s"], is_master=False)
        self.fabric = open_fabric(info["kind"], place, store, CPU, info["timeout_s"], self.exchanges)

    def update(self, info: dict) -> None:
        try:
            self._update(info)
        except Exception as error:
            self.fabric.fail(str(error))  # as the engine does, so that nobody waits for this worker
            raise

    def _update(self, info: dict) -> None:
        exchange = self.exchanges[info["mode"] == "reload"]
        self.held.clear()
        self.fabric.begin(info["attempt"], exchange.rounds)
        for number, messages in enumerate(exchange.rounds):
            self.fabric.receive(number)
            if number == self.die_at:
                raise ConnectionError("rollout-0 died with exit code -9")
            for message in messages.received_by(self.engine_rank):
                inbox = self.fabric.inbox(message, number)
                for part in message.parts:
                    data = inbox[part.offset : part.offset + part.num_bytes].view(getattr(torch, part.dtype))
                    empty = torch.empty(part.kept_shape, dtype=data.dtype)
                    target = self.held.setdefault(part.name, empty)
                    target.narrow(part.transfer.axis, part.start - part.kept[0], part.stop - part.start).copy_(
                        data.view(part.shape)
                    )
            self.fabric.release(number)
        self.fabric.finish()


class Replica:
    """The calls that an exporter makes."""

    name = "rollout-0"

    def __init__(self, cfg: RunConfig):
        self.workers = [Worker(rank) for rank in range(cfg.rollout.tensor)]
        self.version = None
        self.calls: list[str] = []

    async def _everywhere(self, method: str, info) -> None:
        await asyncio.gather(*(asyncio.to_thread(getattr(worker, method), dict(info)) for worker in self.workers))

    async def init_transfer(self, info) -> None:
        await self._everywhere("join", info)

    async def pause(self, mode) -> None:
        self.calls.append("pause")

    async def start_update(self) -> None:
        self.calls.append("start")

    async def update_weights(self, info) -> None:
        self.calls.append(info["mode"])
        await self._everywhere("update", info)

    async def finish_update(self, version) -> None:
        self.version = version

    async def weight_digests(self, *, names: bool = True) -> list[dict]:
        return [report_of(worker.engine_rank, self.version, digests_of(worker.held)) for worker in self.workers]

    async def resume(self) -> None:
        self.calls.append("resume")


def shard_config(kind: str, transport: str, layout: dict[str, int], engine: dict[str, int]) -> RunConfig:
    cfg = config(kind, layout)
    return replace(cfg, rollout=replace(cfg.rollout, **{"tensor": 1, "transport": transport} | engine))


def exporter_of(cfg: RunConfig):
    """Runs on a rank: (exporter, replicas on rank 0)."""
    from megatron_fp8rl.weight_sync.publish import WeightExporter

    policy = build(cfg)
    replicas = [Replica(cfg) for _ in range(cfg.rollout.num_replicas)]
    fleet = Fleet(replicas[0])
    fleet.clients = tuple(replicas)
    return WeightExporter(policy, fleet if policy.parallel.rank == 0 else None, cfg), policy, replicas


def publish_shards(cfg: RunConfig) -> tuple[PublishReport, list[list[dict[str, torch.Tensor]]], list[str]]:
    """Runs on a rank: (report, what each worker of each replica holds, calls that the first replica saw)."""
    exporter, _, replicas = exporter_of(cfg)
    exporter.publish(1)
    report = exporter.publish(2)
    exporter.close()
    return report, [[worker.held for worker in replica.workers] for replica in replicas], replicas[0].calls


@functools.cache
def whole(kind: str) -> tuple[PublishReport, dict[str, torch.Tensor]]:
    """By way of rank 0, from one rank."""
    report, tensors, _ = run_ranks(1, publish, kind, dict(world_size=1))[0]
    return report, tensors


@pytest.mark.parametrize(("kind", "transport", "layout", "engine"), CASES, ids=layout_name)
def test_every_worker_holds_its_slices_of_what_rank_0_would_have_sent(kind, transport, layout, engine):
    cfg = shard_config(kind, transport, layout, engine)
    ranks = run_ranks(layout["world_size"], publish_shards, cfg)
    whole_report, tensors = whole(kind)
    report, replicas, calls = ranks[0]
    assert all(other == report for other, _, _ in ranks)
    assert len(replicas) == cfg.rollout.num_replicas
    inputs = PlanInputs.of(cfg)
    for workers in replicas:
        for engine_rank, held in enumerate(workers):
            kept = {name: span for name, span in inputs.kept_by(engine_rank).items() if span[1][0] < span[1][1]}
            assert held.keys() == kept.keys()
            for name, (axis, (start, stop)) in kept.items():
                expected = tensors[name].narrow(axis, start, stop - start).contiguous()
                assert torch.equal(held[name].view(torch.uint8), expected.view(torch.uint8)), name
    if config(kind, layout).rollout.tensor == cfg.rollout.tensor and cfg.rollout.expert == 1:
        assert timeless(report) == timeless(whole_report)  # the checksum too
    first = ["pause", "start", "reload", "start", "compare", "resume"]
    assert calls == [*first, "pause", "start", "direct", "resume"]


def fail_shards(cfg: RunConfig, failure: str):
    """Runs on a rank: (type and text of the error that publish raised, seconds)."""
    exporter, policy, replicas = exporter_of(cfg)
    rank = policy.parallel.rank
    exporter.publish(1)
    if failure == "engine" and rank == 0:
        replicas[0].workers[1].die_at = 1
    elif failure == "late" and rank == 1:
        exporter._shards.send = lambda version, mode: time.sleep(16.0)
    elif failure == "nan" and rank == 1:
        with torch.no_grad():
            weight = "decoder.layers.1.mlp.experts.2.linear_fc1.weight"
            dict(policy.named_parameters())[weight][5, 7] = float("nan")
    started = time.monotonic()
    try:
        exporter.publish(2)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - started
    finally:
        exporter.close()
    return None


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
@pytest.mark.parametrize(
    ("failure", "error", "texts"),
    [
        ("engine", "TransportError", ["replica 0", "exit code -9"]),
        ("late", "TransportError", ["replica 0", "trainer rank 1", "within 7.2 s"]),
        ("nan", "ValueError", ["model.layers.1.mlp.experts.2.gate_proj.weight", "NaN"]),
    ],
)
def test_all_ranks_raise_the_same_error_before_the_deadline(transport, failure, error, texts):
    cfg = shard_config("moe", transport, dict(world_size=2, expert=2), dict(tensor=2))
    limit_s = 8.0 if failure == "late" else 100.0
    cfg = replace(cfg, rollout=replace(cfg.rollout, update_deadline_s=limit_s, bucket_bytes=100_000))
    for raised, message, seconds in run_ranks(2, fail_shards, cfg, failure, deadline_s=300):
        assert raised == error, message
        assert all(text in message for text in texts), message
        assert seconds < 50.0
