"""Engines whose workers hold shards."""

import asyncio

import torch

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.rollout.vllm_plugin.spare_weights import SpareWeights
from megatron_fp8rl.weight_sync.plan_inputs import PlanInputs
from megatron_fp8rl.weight_sync.schedule import Message
from megatron_fp8rl.weight_sync.transports.base import Peer, Transport
from megatron_fp8rl.weight_sync.transports.choose import open_transport
from megatron_fp8rl.weight_sync.transports.signed_store import open_store
from tests.helpers.exports import config, digests_of, report_of
from tests.helpers.fields import set_fields

CPU = torch.device("cpu")


class Worker:
    """An engine worker without an engine."""

    def __init__(self, engine_rank: int):
        self.engine_rank = engine_rank
        self.held: dict[str, torch.Tensor] = {}
        self.transport: Transport | None = None
        self.die_at = -1
        self.spare: SpareWeights | None = None

    def join(self, info: dict) -> None:
        self.inputs = PlanInputs.from_json(info["config"])
        self.schedules = self.inputs.slices(), self.inputs.whole(info["proof_layers"])
        peer = Peer(
            rank=info["rank_offset"] + self.engine_rank,
            num_trainers=info["num_trainers"],
            num_replicas=info["num_replicas"],
            num_engine_ranks=self.inputs.engine.ranks,
        )
        store = open_store(info["host"], info["port"], info["timeout_s"], is_master=False, secret=info["secret"])
        self.transport = open_transport(info["kind"], peer, store, CPU, info["timeout_s"], self.schedules)

    def stage(self, info: dict) -> None:
        if self.spare is None:
            self.spare = SpareWeights(self.schedules[0], self.engine_rank, CPU, on_host=True)
        self.spare.start(self.transport, info["attempt"], info["version"])
        self.spare.wait(60.0)

    def update(self, info: dict) -> None:
        try:
            self._update(info)
        except Exception as error:
            self.transport.fail(str(error))  # as the engine does, so that nobody waits for this worker
            raise

    def _update(self, info: dict) -> None:
        schedule = self.schedules[info["mode"] == "reload"]
        self.held.clear()
        if info["mode"] == "switch":
            for number, messages in enumerate(schedule.rounds):
                for message in messages.received_by(self.engine_rank):
                    self._keep(message, self.spare.inbox(message, number))
            return
        self.transport.begin(info["attempt"], schedule.rounds)
        for number, messages in enumerate(schedule.rounds):
            self.transport.receive(number)
            if number == self.die_at:
                raise ConnectionError("rollout-0 died with exit code -9")
            for message in messages.received_by(self.engine_rank):
                self._keep(message, self.transport.inbox(message, number))
            self.transport.release(number)
        self.transport.finish()

    def _keep(self, message: Message, inbox: torch.Tensor) -> None:
        for part in message.parts:
            data = inbox[part.offset : part.offset + part.num_bytes].view(getattr(torch, part.dtype))
            target = self.held.setdefault(part.name, torch.empty(part.kept_shape, dtype=data.dtype))
            place = target.narrow(part.transfer.axis, part.start - part.kept[0], part.stop - part.start)
            place.copy_(data.view(part.shape))


class Replica:
    """The calls that an exporter makes."""

    name = "rollout-0"

    def __init__(self, cfg: RunConfig):
        self.workers = [Worker(rank) for rank in range(cfg.engine.ranks)]
        self.version = None
        self.calls: list[str] = []

    async def _everywhere(self, method: str, info) -> None:
        await asyncio.gather(*(asyncio.to_thread(getattr(worker, method), dict(info)) for worker in self.workers))

    async def proof_layers(self) -> list[dict]:
        return [{"layers": [0]} for _ in self.workers]

    async def init_transfer(self, info) -> None:
        await self._everywhere("join", info)

    async def pause(self, mode) -> None:
        self.calls.append("pause")

    async def start_update(self) -> None:
        self.calls.append("start")

    async def update_weights(self, info) -> None:
        self.calls.append(info["mode"])
        await self._everywhere("update", info)

    async def stage_weights(self, info) -> None:
        self.calls.append("stage")
        await self._everywhere("stage", info)

    async def finish_update(self, version) -> None:
        self.version = version

    async def weight_digests(self, *, names: bool = True) -> list[dict]:
        return [report_of(worker.engine_rank, self.version, digests_of(worker.held)) for worker in self.workers]

    async def resume(self) -> None:
        self.calls.append("resume")


def shard_config(kind: str, transport: str, layout: dict[str, int], engine: dict[str, int]) -> RunConfig:
    cfg = config(kind, layout)
    return set_fields(cfg, **{"tensor": 1, "transport": transport} | engine)
