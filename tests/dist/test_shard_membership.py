"""Publications from shard to shard while replicas come and go: those that are left hold what they would have held."""

from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.weight_sync.plan_inputs import PlanInputs
from megatron_fp8rl.weight_sync.publish import WeightExporter
from tests.helpers.dist import run_ranks
from tests.helpers.exports import Fleet, build
from tests.helpers.shards import Replica, shard_config
from tests.helpers.training import continue_training


class Member(Replica):
    async def abandon_update(self) -> None:
        self.calls.append("abandon")
        for worker in self.workers:
            worker.transport.close()


class Changing(Fleet):
    """A fleet whose members a test chooses."""

    dead: tuple = ()

    def __init__(self, members):
        self.clients = tuple(members)

    def has_lost_replica(self, clients):
        self.clients = tuple(client for client in self.clients if client not in self.dead)
        return any(client in self.dead for client in clients)


def publish_through_changes(cfg: RunConfig):
    """Runs on a rank: on rank 0 the reports, the calls to three replicas, and their final weights."""
    policy = build(cfg)
    members = [Member(cfg) for _ in range(3)]
    fleet = Changing(members[:2])
    exporter = WeightExporter(policy, fleet if policy.parallel.rank == 0 else None, PlanInputs.of(cfg))
    reports = [exporter.publish(1)]

    async def die(info) -> None:
        fleet.dead = (members[1],)
        raise ConnectionError("rollout-1 died with exit code -9")  # without a word to the others

    members[1].update_weights = die
    continue_training(policy, 1)
    reports.append(exporter.publish(2))  # without it, in the end
    fleet.clients = (members[0], members[2])
    reports.append(exporter.publish(3))
    exporter.close()
    held = [[worker.held for worker in member.workers] for member in members]
    return reports, [member.calls for member in members], held


@pytest.mark.parametrize("transport", ["ipc", "gloo"])
@pytest.mark.long
def test_a_publication_is_repeated_without_a_dead_replica_and_the_next_one_reaches_its_successor(transport):
    cfg = shard_config("moe", transport, dict(world_size=2, expert=2), dict(tensor=2, num_replicas=2))
    cfg = replace(cfg, engine=replace(cfg.engine, deadline_scale=0.4))
    ranks = run_ranks(2, publish_through_changes, cfg, deadline_s=400)
    assert all(reports == ranks[0][0] for reports, _, _ in ranks)
    reports, calls, held = ranks[0]
    assert reports[0].checksum != reports[1].checksum == reports[2].checksum
    first = ["pause", "start", "reload", "start", "compare", "resume"]
    assert calls[0] == [*first, "pause", "start", "direct", "abandon", *first, *first]
    assert calls[2] == first
    for worker, other in zip(held[0], held[2], strict=True):
        assert worker.keys() == other.keys()
        for name, tensor in worker.items():
            assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name
