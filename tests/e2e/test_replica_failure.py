"""Replicas that die: rollouts and rewards are those of a run in which none did, and successors hold current weights."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from engine_weights import DigitShare, OneRank, policy_of, write_hf_dir
from inprocess import random_weights, set_weights

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.data.prompts import PromptStream
from megatron_fp8rl.data.tokenizer import character_tokenizer
from megatron_fp8rl.rollout.agents.requests import Requests
from megatron_fp8rl.rollout.errors import RequestLostError
from megatron_fp8rl.rollout.fleet import Fleet
from megatron_fp8rl.rollout.stream import Groups, RolloutStream
from megatron_fp8rl.types import Completion
from megatron_fp8rl.weight_sync.plan_inputs import PlanInputs
from megatron_fp8rl.weight_sync.publish import WeightExporter
from tests.helpers.processes import until

NUM_STEPS = 4
BACK_S = 200.0


@pytest.fixture(scope="module")
def pair(engine_cfg: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    engine = replace(
        engine_cfg.engine, num_replicas=2, kv_cache_bytes=16 << 20, max_replica_restarts=7, record_routed_experts=False
    )
    sampling = replace(engine_cfg.sampling, prompts_per_step=8, completions_per_prompt=2, max_completion_tokens=96)
    weight_sync = replace(engine_cfg.weight_sync, transport="gloo")
    cfg = replace(engine_cfg, engine=engine, sampling=sampling, weight_sync=weight_sync)
    folder = tmp_path_factory.mktemp("pair")
    with Fleet.start(cfg, write_hf_dir(cfg, folder / "hf"), folder) as fleet:
        yield fleet


def signal_replicas(fleet: Fleet, number: signal.Signals, *indices: int) -> None:
    for client in [client for client in fleet.clients if client.name in {f"rollout-{i}" for i in indices}]:
        os.killpg(client.replica.process_group, number)


def kill(fleet: Fleet, *indices: int) -> None:
    signal_replicas(fleet, signal.SIGKILL, *indices)


def stop(fleet: Fleet, *indices: int) -> None:
    """Let the replicas hang: SIGSTOP."""
    signal_replicas(fleet, signal.SIGSTOP, *indices)


def kill_while_asked(fleet: Fleet, *indices: int) -> None:
    """Kill replicas during requests. They are stopped first, so that no request is answered."""
    asked = [client for client in fleet.clients if client.name in {f"rollout-{i}" for i in indices}]
    stop(fleet, *indices)

    def watch() -> None:
        until(lambda: all(client.num_running > 2 for client in asked), "requests", BACK_S)
        kill(fleet, *indices)

    threading.Thread(target=watch, daemon=True).start()


def curve(fleet: Fleet, accidents: dict[str, Callable[[], None]]) -> list[list]:
    """Per step (name, reward, tokens, log-probabilities) of all rollouts; weights differ at every step."""
    cfg = fleet.cfg
    policy = policy_of(cfg, random_weights(cfg, 0))
    exporter = WeightExporter(policy, fleet, PlanInputs.of(cfg))
    stream = RolloutStream(cfg, fleet, PromptStream(cfg, character_tokenizer()), DigitShare(), OneRank())
    stream.republish = lambda: exporter.publish(stream.version)
    result = []
    try:
        for version in range(NUM_STEPS):
            set_weights(policy, random_weights(cfg, version))
            accidents.get(f"train {version}", lambda: None)()
            exporter.publish(version)
            stream.after_update(version)
            assert {client.version for client in fleet.clients} == {version}
            accidents.get(f"sample {version}", lambda: None)()
            result.append(contents(stream.next_groups()))
    finally:
        exporter.close()
    return result


def contents(groups: Groups) -> list:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return [(r.name, r.reward, r.completions[0].token_ids, r.completions[0].rollout_logprobs) for r in rollouts]


@pytest.mark.long
def test_a_run_in_which_replicas_die_is_the_run_in_which_none_does(pair: Fleet):
    def training() -> None:
        assert [client.name for client in pair.clients] == ["rollout-1"]  # it has done the other's work
        kill(pair, 1)  # the publication waits for the first that comes back

    def all_back() -> None:
        until(lambda: len(pair.clients) + len(pair._joining) == 2, "two replicas", BACK_S)
        assert pair.take_metrics()["rollout/replicas_lost/sum"] == 2

    expected = curve(pair, {})
    assert pair.take_metrics() == {
        "rollout/replicas/min": 2,
        "rollout/replicas_lost/sum": 0,
        "rollout/replicas_joined/sum": 0,
        "rollout/num_retried/sum": 0,
    }
    first = {client.name: client.replica.process_group for client in pair.clients}
    seen = curve(
        pair,
        {
            "sample 0": lambda: kill_while_asked(pair, 0),
            "train 1": training,
            "train 2": all_back,
            # nobody is left: the weights are published again in the middle of a step
            "sample 3": lambda: kill_while_asked(pair, 0, 1),
        },
    )
    assert seen == expected
    assert len({tuple(map(str, step)) for step in seen}) == NUM_STEPS
    last = {client.name: client.replica.process_group for client in pair.clients}
    assert last and all(first[name] != group for name, group in last.items())
    metrics = pair.take_metrics()
    assert metrics["rollout/replicas_lost/sum"] == 2 and metrics["rollout/num_retried/sum"] >= 2
    assert metrics["rollout/replicas/min"] == 0


@pytest.mark.long
def test_a_request_that_ends_engines_costs_two_and_no_other_request(engine_cfg: RunConfig, tmp_path):
    """A token id below 0 ends an engine. The endpoint rejects it, so it is sent as the trainer's own request."""
    engine = replace(
        engine_cfg.engine, num_replicas=3, kv_cache_bytes=16 << 20, max_replica_restarts=0, record_routed_experts=False
    )
    cfg = replace(engine_cfg, engine=engine)

    async def ask_all(fleet: Fleet) -> list:
        requests = Requests(fleet)
        poison = requests.ask([-1], 1, 0)
        others = [requests.ask([5, 6, 7 + i], 2, i, max_tokens=128) for i in range(11)]
        return await asyncio.gather(poison, *others, return_exceptions=True)

    with Fleet.start(cfg, write_hf_dir(cfg, tmp_path / "hf"), tmp_path) as fleet:
        poisoned, *others = fleet.sync(ask_all(fleet), BACK_S)
        assert isinstance(poisoned, RequestLostError) and "Traceback" not in poisoned.summary
        assert [[type(completion) for completion in completions] for completions in others] == [[Completion] * 2] * 11
        assert len(fleet.clients) == 1 and fleet.take_metrics()["rollout/replicas_lost/sum"] == 2


@pytest.mark.long
def test_a_replica_that_dies_in_the_middle_of_a_publication_costs_a_repetition(pair: Fleet):
    weight_sync = replace(pair.cfg.weight_sync, bucket_bytes=200_000)
    cfg = replace(pair.cfg, weight_sync=weight_sync)
    policy = policy_of(cfg, random_weights(cfg, 0))
    until(lambda: len(pair.clients) + len(pair._joining) == 2, "two replicas", BACK_S)
    exporter = WeightExporter(policy, pair, PlanInputs.of(cfg))
    send_rounds = exporter.sender.send

    def send(version, sent_mode):
        transport = exporter.sender._transport
        deliver = transport.send

        def deliver_or_kill(number, messages) -> None:
            if number == 3 and sent_mode == mode:
                kill(pair, 1)
            deliver(number, messages)

        transport.send = deliver_or_kill
        try:
            return send_rounds(version, sent_mode)
        finally:
            transport.send = deliver

    exporter.sender.send = send
    for version, mode in ((5, "reload"), (6, "direct")):
        set_weights(policy, random_weights(cfg, version))
        started = time.monotonic()
        report = exporter.publish(version)
        assert time.monotonic() - started < 110.0, "within the deadline of 120 s"
        assert report.version == version and report.pause_s > 0
        assert [client.version for client in pair.clients] == [version] * len(pair.clients)
        if mode == "reload":
            until(lambda: len(pair._joining) == 1, "a joining replica", BACK_S)
            mode = ""
            exporter.publish(version)
            assert len(pair.clients) == 2
    assert [client.name for client in pair.clients] == ["rollout-0"]
    exporter.close()


@pytest.mark.long
def test_a_run_in_which_replicas_hang_is_the_run_in_which_none_does(pair: Fleet, caplog):
    """During rollouts and publications: hanging replicas are killed, named and replaced."""

    expected = curve(pair, {})
    until(lambda: len(pair.clients) + len(pair._joining) == 2, "two replicas", BACK_S)
    began = time.monotonic()
    assert curve(pair, {"sample 1": lambda: stop(pair, 0), "train 3": lambda: stop(pair, 1)}) == expected
    assert time.monotonic() - began < 6 * BACK_S
    assert "rollout-0 did not answer for 15 s" in caplog.text
    assert "rollout-1 did not answer for 15 s" in caplog.text
