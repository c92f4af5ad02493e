"""From shard to shard over HTTP to an engine of two workers: one request for a publication, each worker its slices."""

from dataclasses import replace

from engine_weights import policy_of, sample, write_hf_dir
from inprocess import random_weights, set_weights

from megatron_fp8rl.rollout.fleet import Fleet
from megatron_fp8rl.weight_sync.plan_inputs import PlanInputs
from megatron_fp8rl.weight_sync.publish import WeightExporter


def test_two_workers_get_their_slices(engine_cfg, tmp_path):
    engine = replace(engine_cfg.engine, tensor=2, record_routed_experts=False)
    weight_sync = replace(engine_cfg.weight_sync, bucket_bytes=200_000)
    cfg = replace(engine_cfg, engine=engine, weight_sync=weight_sync)
    weights = [random_weights(cfg, seed) for seed in (1, 2)]
    seen = {}
    with Fleet.start(cfg, write_hf_dir(cfg, tmp_path / "hf"), tmp_path) as fleet:
        for transport in ("ipc", "gloo"):
            chosen = replace(cfg, weight_sync=replace(cfg.weight_sync, transport=transport))
            policy = policy_of(chosen, weights[0])
            exporter = WeightExporter(policy, fleet, PlanInputs.of(chosen))
            for version, index in ((1, 0), (2, 1), (3, 0)):
                set_weights(policy, weights[index])
                report = exporter.publish(version)
                seen[transport, version] = report.checksum, sample(fleet).rollout_logprobs
            exporter.close()
    assert seen["ipc", 1] == seen["ipc", 3] == seen["gloo", 1]
    assert seen["ipc", 2] == seen["gloo", 2] != seen["ipc", 1]
    assert 0 < report.load_s < report.seconds
