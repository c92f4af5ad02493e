"""Publications into spare memory: the engine samples while weights arrive, and pauses for the switch alone."""

import asyncio
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_weights import Reference, policy_of, random_weights, recorded, write_hf_dir
from inprocess import set_weights

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.rollout.fleet import Fleet
from megatron_fp8rl.types import Completion
from megatron_fp8rl.weight_sync.engines import TransportError
from megatron_fp8rl.weight_sync.plan_inputs import PlanInputs
from megatron_fp8rl.weight_sync.publish import WeightExporter
from megatron_fp8rl.weight_sync.transports import choose
from megatron_fp8rl.weight_sync.transports.base import Transport
from megatron_fp8rl.weight_sync.verify import WeightMismatch
from tests.helpers.fields import set_fields
from tests.tolerances import ENGINE_LOGPROB_MAX, ENGINE_LOGPROB_MEAN

PROMPT = list(range(20, 40))
NETWORK_S = 2.0  # of a slow network, over all rounds
LENGTHS = (900, 700)  # tokens: of two requests after another, so that one is always being sampled


def with_spare(cfg: RunConfig, where: str, transport: str) -> RunConfig:
    return set_fields(
        cfg,
        spare_weights=where,
        transport=transport,
        bucket_bytes=100_000,
        max_replica_restarts=0,
        max_completion_tokens=max(LENGTHS),
    )


@pytest.fixture(params=["ipc", "gloo"])
def slow(request, monkeypatch):
    """The trainer's end of a slow transport that can fail; the engine's end is the real one."""
    kind = request.param

    class Slow(choose.TRANSPORTS[kind]):
        num_rounds = 1
        before = staticmethod(lambda transport, number, messages: None)

        def begin(self, attempt, rounds):
            super().begin(attempt, rounds)
            Slow.num_rounds = len(rounds)

        def send(self, number, messages):
            time.sleep(NETWORK_S / Slow.num_rounds)
            Slow.before(self, number, messages)
            super().send(number, messages)

    monkeypatch.setitem(choose.TRANSPORTS, kind, Slow)
    return kind, Slow


async def sampling(fleet: Fleet, published: threading.Event) -> list[Completion]:
    """Completions of successive requests until the weights arrive."""
    client = fleet.clients[0]

    async def one_after_another(num_tokens: int) -> list[Completion]:
        how = replace(client.sampling, max_tokens=num_tokens, stop_token_ids=())
        result = []
        while not published.is_set():
            result += await client.generate(PROMPT, 1, num_tokens + len(result), sampling=how)
        return result

    return [made for several in await asyncio.gather(*map(one_after_another, LENGTHS)) for made in several]


def flip(transport: Transport, number: int, messages) -> None:
    for message in messages:
        for part in message.parts:
            if part.name == "model.layers.0.self_attn.o_proj.weight" and part.start == 0:
                transport.slot(number)[message.out_offset + part.offset] ^= 0x10


def test_an_engine_samples_while_weights_arrive(engine_cfg, tmp_path: Path, slow):
    kind, transport = slow
    cfg = with_spare(engine_cfg, "device", kind)
    weights = [random_weights(cfg, seed) for seed in (1, 2)]
    policy = policy_of(cfg, weights[0])
    with Fleet.start(cfg, write_hf_dir(cfg, tmp_path / "hf"), tmp_path) as fleet:
        exporter = WeightExporter(policy, fleet, PlanInputs.of(cfg))
        exporter.publish(1)  # new: through vLLM's loaders, while it pauses

        set_weights(policy, weights[1])
        published = threading.Event()
        running = fleet.submit(sampling(fleet, published))
        staged = exporter.publish(2)
        published.set()
        completions = running.result(timeout=240.0)
        assert staged.seconds > NETWORK_S > 2 * staged.pause_s
        assert {version for c in completions for _, version in c.version_spans} == {1, 2}
        completion = max(completions, key=lambda completion: len(completion.version_spans))
        (first, _), (second, _) = completion.version_spans
        assert first == 0 < second < len(completion.token_ids)
        # A token takes 2 to 20 ms here: many were sampled while weights travelled.
        old = [
            c.version_spans[1][0] if c.max_version == 2 else len(c.token_ids) for c in completions if c.min_version == 1
        ]
        assert sum(old) > 50, old
        tokens = [*PROMPT, *completion.token_ids]
        for start, stop, held in ((0, second, weights[0]), (second, len(completion.token_ids), weights[1])):
            routes = recorded(completion).astype("int64")
            if start:  # the context was computed again: the engine chose other experts for it, and kept those of then
                routes[: len(PROMPT) + start - 1] = -1
            expected = Reference(cfg, held).logprobs(tokens, 1.0, routes)[len(PROMPT) - 1 :]
            difference = (torch.tensor(completion.rollout_logprobs) - expected).abs()[start:stop]
            assert difference.mean() < ENGINE_LOGPROB_MEAN and difference.max() < ENGINE_LOGPROB_MAX

        exporter.inputs = replace(PlanInputs.of(cfg), weight_sync=replace(cfg.weight_sync, spare_weights="none"))
        set_weights(policy, weights[0])
        direct = exporter.publish(3)
        assert direct.pause_s > NETWORK_S
        print(f"\n{kind}: pause {direct.pause_s:.3f} s without, {staged.pause_s:.3f} s with spare memory")
        exporter.inputs = PlanInputs.of(cfg)

        transport.before = staticmethod(flip)
        set_weights(policy, weights[1])
        with pytest.raises(WeightMismatch, match="o_proj.weight in replica 0 rank 0: corrupted"):
            exporter.publish(4)
        exporter.close()


def test_an_engine_that_dies_while_weights_arrive_is_named(engine_cfg, tmp_path: Path, slow):
    kind, _transport = slow
    cfg = with_spare(engine_cfg, "host", kind)
    with Fleet.start(cfg, write_hf_dir(cfg, tmp_path / "hf"), tmp_path) as fleet:
        exporter = WeightExporter(policy_of(cfg, random_weights(cfg, 1)), fleet, PlanInputs.of(cfg))
        exporter.publish(1)
        exporter.publish(2)  # from host memory
        group = fleet.clients[0].replica.process_group
        threading.Timer(NETWORK_S / 2, os.killpg, (group, signal.SIGKILL)).start()
        started = time.monotonic()
        with pytest.raises(TransportError) as end:
            exporter.publish(3)
        assert "rollout-0 was killed by signal 9" in f"{end.value} {end.value.__cause__}"
        assert time.monotonic() - started < 110.0
        exporter.close()
