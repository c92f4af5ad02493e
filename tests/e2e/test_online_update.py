"""An engine that was updated online is the engine that loads the same weights from disk; damage on the way is named."""

import dataclasses
from pathlib import Path

import inprocess
import pytest
import torch
from engine_weights import policy_of

from megatron_fp8rl.config import PrecisionConfig, RunConfig, WeightSyncConfig
from megatron_fp8rl.weight_sync.plan_inputs import PlanInputs
from megatron_fp8rl.weight_sync.publish import WeightExporter
from megatron_fp8rl.weight_sync.transports import choose
from megatron_fp8rl.weight_sync.transports.cuda_ipc import IpcTransport
from megatron_fp8rl.weight_sync.verify import WeightMismatch
from tests.helpers.models import small_model

DENSE = small_model((3, 128, 4, 2, 64, 96), ffn=256)  # vLLM pads it to 128
MOE = small_model((3, 128, 4, 2, 64, 96), experts=(4, 2, 128))
BF16 = PrecisionConfig(trainer="bf16", rollout="bf16")
EDGES = PrecisionConfig(bf16_first_layers=1, bf16_last_layers=1)
CASES = {
    "dense_bf16": (DENSE, BF16, "ipc"),
    "dense_edges_tied": (dataclasses.replace(DENSE, tie_embeddings=True), EDGES, "gloo"),
    "moe_bf16": (MOE, BF16, "gloo"),
    "moe_edges": (MOE, EDGES, "ipc"),
    "moe_fp8": (MOE, PrecisionConfig(), "ipc"),
}


def config(case: str, bucket_bytes: int) -> RunConfig:
    model, precision, transport = CASES[case]
    weight_sync = WeightSyncConfig(transport=transport, bucket_bytes=bucket_bytes)
    return RunConfig(name=case, model=model, precision=precision, weight_sync=weight_sync)


def update_and_reload(case: str, folder: Path) -> dict:
    """Log-probabilities after two online updates, and of a fresh engine that loads the second one's checkpoint."""
    cfg = config(case, 100_000)  # several rounds; modules are split between them
    first, second = (inprocess.random_weights(cfg, seed) for seed in (1, 2))
    inprocess.write_checkpoint(cfg, second, folder)
    llm = inprocess.build_engine(cfg, folder, load_format="dummy")
    result = {}
    policy = policy_of(cfg, first)
    exporter = WeightExporter(policy, inprocess.InProcessFleet(llm), PlanInputs.of(cfg))
    for version, weights in ((1, first), (2, second)):  # by vLLM's loaders and then directly; directly alone
        inprocess.set_weights(policy, weights)
        result["report"] = exporter.publish(version)
        result[f"online_{version}"] = inprocess.prompt_logprobs(llm)
    exporter.close()
    result["num_rounds"] = len(exporter.sender.inputs.slices().rounds)
    result["proven"] = llm.collective_rpc("proof_layers")[0]["layers"]
    result["num_held"] = len(llm.collective_rpc("weight_digests")[0]["digests"])
    result["num_sent"] = sum(len(list(transfer.wire_tensors())) for transfer in exporter.plan.transfers)
    del llm, exporter
    inprocess.free_engines()
    result["fresh"] = inprocess.prompt_logprobs(inprocess.build_engine(cfg, folder, load_format="auto"))
    return result


@pytest.mark.parametrize("case", CASES)
def test_online_update_equals_a_fresh_load(case, tmp_path):
    result = inprocess.call(update_and_reload, case, tmp_path)
    assert torch.equal(result["online_2"], result["fresh"])
    assert (result["online_1"] - result["fresh"]).abs().max() > 0.01  # the first weights were others
    assert result["num_rounds"] > 3
    # Everything that was sent is verified under its own name, and nothing else is in the engine.
    assert result["num_held"] == result["num_sent"]
    assert result["proven"] == ([0, 1] if "edges" in case else [0])  # those in BF16, and those in FP8
    num_fp8 = {"bf16": 0, "edges": 4 + 3 * 4, "fp8": 3 * (4 + 3 * 4), "edges_tied": 7}[case.partition("_")[2]]
    assert result["report"].num_fp8_tensors == num_fp8


class DamagingTransport(IpcTransport):
    """Changes the bytes of one tensor after their digest was taken. The engine's end of it is an IpcTransport."""

    damage: tuple[str, str] = ("", "")  # kind, name of the tensor
    previous: torch.Tensor  # its bytes in the publication before

    def send(self, number, messages):
        kind, name = self.damage
        for message in messages:
            for part in message.parts:
                if part.name == name:
                    start = message.out_offset + part.offset
                    data = self.slot(number)[start : start + part.num_bytes]
                    if kind == "flip":
                        data[7] ^= 0x10
                    elif kind == "scale":
                        data[:4].view(torch.float32).mul_(2.0)
                    elif kind == "stale":
                        data.copy_(self.previous)
        super().send(number, messages)


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
]


def damage_and_recover(folder: Path) -> list:
    """[(name, kind) of the mismatches] for each of DAMAGES; the clean publication that follows each has to pass."""
    cfg = config("moe_fp8", bucket_bytes=1 << 20)
    old, new = (inprocess.random_weights(cfg, seed) for seed in (1, 2))
    inprocess.write_checkpoint(cfg, old, folder)
    llm = inprocess.build_engine(cfg, folder, load_format="dummy")
    fleet = inprocess.InProcessFleet(llm)
    choose.TRANSPORTS["ipc"] = DamagingTransport  # in this process alone
    DamagingTransport.previous = old[NORM].view(torch.uint8)
    policy = policy_of(cfg, old)
    exporter = WeightExporter(policy, fleet, PlanInputs.of(cfg))
    result = []
    for kind, name, _ in DAMAGES:
        DamagingTransport.damage = ("", "")
        fleet.clients[0].paused = False
        inprocess.set_weights(policy, old)
        exporter.publish(1)
        DamagingTransport.damage = (kind, name)
        inprocess.set_weights(policy, new)
        try:
            exporter.publish(2)
            result.append([])
        except WeightMismatch as error:
            assert fleet.clients[0].paused, "an engine with wrong weights must not go on"
            result.append([(m.name, m.kind) for m in error.mismatches])
    exporter.close()
    return result


def test_damage_on_the_way_is_named(tmp_path):
    actual = inprocess.call(damage_and_recover, tmp_path)
    for (kind, name, expected), mismatches in zip(DAMAGES, actual, strict=True):
        assert mismatches == [expected], (kind, name)
