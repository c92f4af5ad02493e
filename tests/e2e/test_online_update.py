"""An engine that was updated online is the engine that loads the same weights from disk; damage on the way is named."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import inprocess
import pytest
import torch

from megatron_fp8rl.config import ModelConfig, PrecisionConfig, RolloutConfig, RunConfig
from megatron_fp8rl.weight_sync.publish import Engines, WeightExporter
from megatron_fp8rl.weight_sync.transport import SharedMemoryTransport
from megatron_fp8rl.weight_sync.verify import WeightMismatch

DENSE = ModelConfig(
    family="qwen3",
    num_layers=3,
    hidden_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=96,  # vLLM pads it to 128
    ffn_hidden_size=256,
)
MOE = ModelConfig(
    family="qwen3_moe",
    num_layers=3,
    hidden_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=96,
    num_experts=4,
    experts_per_token=2,
    moe_ffn_hidden_size=128,
)
BF16 = PrecisionConfig(trainer="bf16", rollout="bf16")
EDGES = PrecisionConfig(bf16_first_layers=1, bf16_last_layers=1)
CASES = {
    "dense_bf16": (DENSE, BF16, "shm"),
    "dense_edges_tied": (dataclasses.replace(DENSE, tie_embeddings=True), EDGES, "gloo"),
    "moe_bf16": (MOE, BF16, "gloo"),
    "moe_edges": (MOE, EDGES, "shm"),
    "moe_fp8": (MOE, PrecisionConfig(), "shm"),
}


def config(case: str, bucket_bytes: int, transport: str = "") -> RunConfig:
    model, precision, own_transport = CASES[case]
    transport = transport or own_transport
    rollout = RolloutConfig(transport=transport, bucket_bytes=bucket_bytes, update_deadline_s=120.0)
    return RunConfig(name=case, model=model, precision=precision, rollout=rollout)


def update_and_reload(case: str, folder: Path, transport: str = "") -> dict:
    """Log-probabilities after two online updates, and of a fresh engine that loads the second one's checkpoint."""
    cfg = config(case, 100_000, transport)  # several buckets; modules are split between them
    first, second = (inprocess.random_weights(cfg, seed) for seed in (1, 2))
    inprocess.write_checkpoint(cfg, second, folder)
    llm = inprocess.build_engine(cfg, folder, load_format="dummy")
    result = {}
    policy = inprocess.policy_of(cfg, first)
    exporter = WeightExporter(policy, inprocess.InProcessFleet(llm), cfg)
    for version, weights in ((1, first), (2, second)):  # by vLLM's loaders and then directly; directly alone
        inprocess.set_weights(policy, weights)
        result["report"] = exporter.publish(version)
        result[f"online_{version}"] = inprocess.prompt_logprobs(llm)
    exporter.close()
    result["num_buckets"] = len(exporter.plan.buckets)
    result["num_held"] = len(llm.collective_rpc("weight_digests")[0]["digests"])
    result["num_sent"] = sum(len(bucket.tensors) for bucket in exporter.plan.buckets)
    del llm, exporter
    inprocess.free_engines()
    result["fresh"] = inprocess.prompt_logprobs(inprocess.build_engine(cfg, folder, load_format="auto"))
    return result


@pytest.mark.parametrize("case", CASES)
def test_online_update_equals_a_fresh_load(case, tmp_path):
    result = inprocess.call(update_and_reload, case, tmp_path)
    assert torch.equal(result["online_2"], result["fresh"])
    assert (result["online_1"] - result["fresh"]).abs().max() > 0.01  # the first weights were others
    assert result["num_buckets"] > 3
    # Everything that was sent is verified under its own name, and nothing else is in the engine.
    assert result["num_held"] == result["num_sent"]
    num_fp8 = {"bf16": 0, "edges": 4 + 3 * 4, "fp8": 3 * (4 + 3 * 4), "edges_tied": 7}[case.partition("_")[2]]
    assert result["report"].num_fp8_tensors == num_fp8


@pytest.mark.parametrize(("case", "transport"), [("moe_edges", "ipc"), ("dense_edges_tied", "nccl")])
def test_from_shard_to_shard_equals_a_fresh_load(case, transport, tmp_path):
    """Shared memory in the place of CUDA IPC and gloo in that of NCCL; all else is what runs between GPUs."""
    result = inprocess.call(update_and_reload, case, tmp_path, transport)
    assert torch.equal(result["online_2"], result["fresh"])
    assert (result["online_1"] - result["fresh"]).abs().max() > 0.01
    assert result["num_held"] == result["num_sent"]


class DamagingTransport(SharedMemoryTransport):
    """Changes the bytes of one tensor, or the description of a bucket, after the exporter has let go of them."""

    damage: tuple[str, str] = ("", "")  # kind, name of the tensor in the bucket
    previous: torch.Tensor  # its bytes in the publication before

    def reserve(self, num_bytes):
        self.buffer = super().reserve(num_bytes)
        return self.buffer

    def send(self, info):
        kind, name = self.damage
        if name in info.names:
            at = info.names.index(name)
            start = info.offsets[at]
            if kind == "flip":
                self.buffer[start + 7] ^= 0x10
            elif kind == "scale":
                self.buffer[start : start + 4].view(torch.float32).mul_(2.0)
            elif kind == "stale":
                self.buffer[start : start + len(self.previous)] = self.previous
            elif kind == "missing":
                lists = ("names", "dtypes", "shapes", "offsets")
                rest = {key: [v for i, v in enumerate(getattr(info, key)) if i != at] for key in lists}
                info = dataclasses.replace(info, **rest)
        super().send(info)


Q = "model.layers.1.self_attn.q_proj.weight"
NORM = "model.layers.2.input_layernorm.weight"
EXPERT = "model.layers.0.mlp.experts.3.down_proj.weight"
DAMAGES = [
    ("flip", Q, (Q, "corrupted")),
    ("flip", NORM, (NORM, "corrupted")),
    ("flip", EXPERT, (EXPERT, "corrupted")),
    ("flip", "lm_head.weight", ("lm_head.weight", "corrupted")),
    ("scale", f"{EXPERT}_scale_inv", (EXPERT, "mis-scaled")),
    ("scale", f"{Q}_scale_inv", (Q, "mis-scaled")),
    ("stale", NORM, (NORM, "stale")),
    ("missing", NORM, (NORM, "stale")),  # what receives nothing stays as it is
    ("missing", EXPERT, (EXPERT, "stale")),
]


def damage_and_recover(folder: Path) -> list:
    """[(name, kind) of the mismatches] for each of DAMAGES; the clean publication that follows each has to pass."""
    cfg = config("moe_fp8", bucket_bytes=1 << 20)
    old, new = (inprocess.random_weights(cfg, seed) for seed in (1, 2))
    inprocess.write_checkpoint(cfg, old, folder)
    llm = inprocess.build_engine(cfg, folder, load_format="dummy")
    fleet = inprocess.InProcessFleet(llm)
    transport = DamagingTransport(Engines(fleet, 1, 120.0), deadline_s=120.0)
    transport.previous = old[NORM].view(torch.uint8)
    policy = inprocess.policy_of(cfg, old)
    exporter = WeightExporter(policy, fleet, cfg, transport=transport)
    found = []
    for kind, name, _ in DAMAGES:
        transport.damage = ("", "")
        fleet.clients[0].paused = False
        inprocess.set_weights(policy, old)
        exporter.publish(1)
        transport.damage = (kind, name)
        inprocess.set_weights(policy, new)
        try:
            exporter.publish(2)
            found.append([])
        except WeightMismatch as error:
            assert fleet.clients[0].paused, "an engine with wrong weights must not go on"
            found.append([(m.name, m.kind) for m in error.mismatches])
    exporter.close()
    return found


def test_damage_on_the_way_is_named(tmp_path):
    found = inprocess.call(damage_and_recover, tmp_path)
    for (kind, name, expected), mismatches in zip(DAMAGES, found, strict=True):
        assert mismatches == [expected], (kind, name)
