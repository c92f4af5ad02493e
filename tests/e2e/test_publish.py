"""Publication over HTTP to engines in processes of their own, and an engine that dies in the middle of one."""

import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from engine_weights import policy_of, sample, write_hf_dir
from inprocess import random_weights, set_weights

from megatron_fp8rl.rollout.fleet import Fleet
from megatron_fp8rl.weight_sync.engines import NoReplicaError
from megatron_fp8rl.weight_sync.plan_inputs import PlanInputs
from megatron_fp8rl.weight_sync.publish import WeightExporter
from megatron_fp8rl.weight_sync.transports import choose
from megatron_fp8rl.weight_sync.transports.process_group import GlooTransport


def test_publications_over_http(fleet):
    """Two policies alternate: each is verified, sampled under its version, and reproduced later."""
    cfg = replace(fleet.cfg, weight_sync=replace(fleet.cfg.weight_sync, bucket_bytes=1 << 20))
    weights = [random_weights(cfg, seed) for seed in (1, 2)]
    policy = policy_of(cfg, weights[0])
    exporter = WeightExporter(policy, fleet, PlanInputs.of(cfg))
    reports, completions = [], []
    for version, index in ((11, 0), (12, 1), (13, 0)):
        set_weights(policy, weights[index])
        reports.append(exporter.publish(version))
        completions.append(sample(fleet))
    exporter.close()
    assert [c.version_spans for c in completions] == [((0, v),) for v in (11, 12, 13)]
    assert completions[0].rollout_logprobs == completions[2].rollout_logprobs != completions[1].rollout_logprobs
    assert reports[0].checksum == reports[2].checksum != reports[1].checksum
    assert reports[0].num_fp8_tensors == 4 + 3 * cfg.model.num_experts  # of layer 0; layer 1 is BF16
    assert max(report.pause_s for report in reports) < 30.0
    assert not list(Path("/dev/shm").glob(f"megatron_fp8rl-{os.getpid()}-*"))


class KillingTransport(GlooTransport):
    """Kills replica 0 between two rounds."""

    fleet: Fleet
    kill_at = -1

    def send(self, number, messages):
        if number == self.kill_at:
            KillingTransport.kill_at = -1
            os.killpg(self.fleet.clients[0].replica.process_group, signal.SIGKILL)
        super().send(number, messages)


def test_an_engine_killed_in_the_middle_is_named(engine_cfg, tmp_path, monkeypatch):
    """Gloo notices by its messages or by the request; the deadline is 150 s."""
    weight_sync = replace(engine_cfg.weight_sync, transport="gloo", bucket_bytes=200_000)
    engine = replace(engine_cfg.engine, max_replica_restarts=0)
    cfg = replace(engine_cfg, weight_sync=weight_sync, engine=engine)
    with Fleet.start(cfg, write_hf_dir(cfg, tmp_path / "hf"), tmp_path) as fleet:
        monkeypatch.setitem(choose.TRANSPORTS, "gloo", KillingTransport)
        KillingTransport.fleet = fleet
        exporter = WeightExporter(policy_of(cfg, random_weights(cfg, 1)), fleet, PlanInputs.of(cfg))
        exporter.publish(1)
        assert len(sample(fleet).token_ids) == 8
        KillingTransport.kill_at = 2
        started = time.monotonic()
        with pytest.raises(
            NoReplicaError, match="(?s)no rollout replica is left.*rollout-0 was killed by signal 9"
        ) as end:
            exporter.publish(2)
        assert KillingTransport.kill_at == -1
        assert re.search("policy version 2.*replica 0.*rollout-0 was killed by signal 9", str(end.value.__cause__))
        assert time.monotonic() - started < 100.0
        exporter.close()
