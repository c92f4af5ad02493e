"""Publications as deltas into the spare memory of a real engine: proven, and equal to a fresh load of the checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import inprocess
import pytest
import torch
from engine_weights import policy_of
from test_online_update import config

from megatron_fp8rl.weight_sync.publish import WeightExporter
from megatron_fp8rl.weight_sync.transports.delta_group import DeltaGlooTransport
from megatron_fp8rl.weight_sync.verify import WeightMismatch


def publish_deltas(case: str, folder: Path) -> dict:
    cfg = config(case, 100_000)
    rollout = dataclasses.replace(cfg.rollout, transport="gloo", spare_weights="host", delta_weights=True)
    cfg = dataclasses.replace(cfg, rollout=rollout)
    first = inprocess.random_weights(cfg, 1)
    # A step of an optimizer: every weight moves by a thousandth of its spread, one norm by more.
    second = {name: (tensor.float() + 5e-5 * torch.randn(tensor.shape)).bfloat16() for name, tensor in first.items()}
    inprocess.write_checkpoint(cfg, second, folder)
    llm = inprocess.build_engine(cfg, folder, load_format="dummy")
    policy = policy_of(cfg, first)
    exporter = WeightExporter(policy, inprocess.InProcessFleet(llm), cfg)
    found: dict = {"bytes": [], "reports": []}
    for version, weights in ((1, first), (2, first), (3, second), (4, second), (5, first), (6, second)):
        inprocess.set_weights(policy, weights)
        found["reports"].append(exporter.publish(version))
        transport = exporter.sender._transport
        assert isinstance(transport, DeltaGlooTransport)
        found["bytes"].append(transport.num_sent_bytes)
    found["online"] = inprocess.prompt_logprobs(llm)
    found["total"] = exporter.plan.num_bytes

    # A receiver whose base is another one: the digests name what came of it.
    spare = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.weight_transfer_engine._spare
    spare._memory.view(torch.uint8)[:4096] ^= 0x10
    inprocess.set_weights(policy, first)
    try:
        exporter.publish(7)
        found["damaged"] = None
    except WeightMismatch as error:
        found["damaged"] = str(error)
    exporter.close()
    del llm, exporter
    inprocess.free_engines()
    found["fresh"] = inprocess.prompt_logprobs(inprocess.build_engine(cfg, folder, load_format="auto"))
    return found


@pytest.mark.parametrize("case", ["moe_edges", "dense_edges_tied"])
def test_deltas_are_proven_and_equal_a_fresh_load(case, tmp_path):
    found = inprocess.call(publish_deltas, case, tmp_path)
    assert torch.equal(found["online"], found["fresh"])
    sent, total = found["bytes"], found["total"]
    assert sent[0] == 0  # not into spare memory
    assert sent[1] >= total  # the first into spare memory is whole
    assert 0 < sent[2] < 0.7 * total and 0 < sent[4] < 0.7 * total
    assert sent[3] < 0.02 * total  # nothing changed
    checksums = [report.checksum for report in found["reports"]]
    assert checksums[0] == checksums[1] == checksums[4] != checksums[2] == checksums[3] == checksums[5]
    assert found["damaged"] is not None and "corrupted" in found["damaged"]
