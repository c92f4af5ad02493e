"""Turns of trainer and engines: who moves when, and that a failing engine stops every rank."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron_fp8rl.runtime.colocation import ColocatedMemory, ResidencyError
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.policy import Policy
from tests.helpers.dist import run_ranks
from tests.helpers.training import DENSE, continue_training, run_config

PARTS = ("params", "gradients", "optimizer")


class FakeFleet:
    """Records calls, and the policy state that is offloaded at that moment."""

    def __init__(self, policy, events, fails_at=None):
        self.policy, self.events, self.fails_at = policy, events, fails_at

    def sleep(self):
        self._note("sleep")

    def wake(self, *tags):
        self._note(f"wake {' '.join(tags) or 'all'}")

    def _note(self, what):
        if what == self.fails_at:
            raise TimeoutError("rollout-0 did not answer within 1 s")
        self.events.append((what, self.policy.offload.offloaded))


def _build(cfg, fails_at=None):
    policy = Policy.build(cfg, Parallel.init(cfg.parallel, deadline_s=60))
    events = []
    fleet = FakeFleet(policy, events, fails_at) if policy.parallel.rank == 0 else None
    return policy, events, ColocatedMemory(cfg, policy, fleet)


def _two_steps(cfg):
    policy, events, colocated = _build(cfg)
    away = []
    for _ in range(2):
        with colocated.publication():
            events.append(("publish", policy.offload.offloaded))
        away.append(policy.offload.offloaded)
        colocated.train()
        away.append(policy.offload.offloaded)
        continue_training(policy, 1)
        assert policy.offload.offloaded == away[-1]
    assert colocated.take_metrics() == {}  # no GPU
    return events, away


def test_each_side_gives_back_before_the_other_takes():
    cfg = run_config(model=DENSE, params="bf16", world_size=2, tensor=2)  # FP32 master weights from the start
    cfg = replace(cfg, engine=replace(cfg.engine, sleep_level=2), optim=replace(cfg.optim, offload=PARTS))
    (events, away), (others, also_away) = run_ranks(2, _two_steps, cfg)
    step = [
        ("wake weights", ("gradients", "optimizer")),
        ("publish", ("gradients", "optimizer")),
        ("wake all", PARTS),
        ("sleep", PARTS),
    ]
    assert events == 2 * step
    assert away == also_away == 2 * [PARTS, ("optimizer",)]  # which an update fetches
    assert others == [("publish", ("gradients", "optimizer"))] * 2


def test_nothing_moves_unless_asked_for():
    ((events, away),) = run_ranks(1, _two_steps, run_config(model=DENSE))
    assert events == [("publish", ())] * 2 and away == [()] * 4


def _failing(cfg, fails_at):
    _policy, events, colocated = _build(cfg, fails_at)
    with pytest.raises(ResidencyError, match="on trainer rank 0: TimeoutError: rollout-0 did not answer"):
        with colocated.publication():
            events.append(("publish", ()))
        colocated.train()
    return [what for what, _ in events]


@pytest.mark.parametrize("fails_at", ["wake weights", "wake all", "sleep"])
def test_a_failing_engine_stops_every_rank(fails_at):
    cfg = run_config(model=DENSE, world_size=2)
    cfg = replace(cfg, engine=replace(cfg.engine, sleep_level=1))
    events, others = run_ranks(2, _failing, cfg, fails_at)
    order = ["wake weights", "publish", "wake all", "sleep"]
    assert events == order[: order.index(fails_at)]
    assert others == [what for what in events if what == "publish"]


def test_engines_without_memory_are_told_what_holds_it(monkeypatch):
    import torch

    for name, gib in {"mem_get_info": (9, 140), "memory_reserved": 17.5, "memory_allocated": 0.5}.items():
        actual = tuple(x << 30 for x in gib) if isinstance(gib, tuple) else gib * 2**30
        monkeypatch.setattr(torch.cuda, name, lambda device, actual=actual: actual)
    parallel = SimpleNamespace(
        device=torch.device("cuda", 1), barrier=lambda name: None, broadcast_object=lambda text: text
    )
    policy = SimpleNamespace(parallel=parallel, offload=SimpleNamespace(away=()))
    colocated = ColocatedMemory(run_config(model=DENSE), policy, FakeFleet(policy, [], fails_at="wake all"))
    expected = "9.0 of 140.0 GiB of GPU 1 are free; the trainer's tensors take 0.5 GiB and its allocator reserves 17.5"
    with pytest.raises(ResidencyError, match=expected):
        colocated._call_engines("wake for sampling", lambda fleet: fleet.wake())
