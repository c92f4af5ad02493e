"""The per-layer probe on a running engine: equal ends differ by rounding alone, and a damaged weight is named."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_weights import publish, random_weights

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.diagnose.engine_probe import load_probe, record_prefill
from megatron_fp8rl.diagnose.operations import compare, operation_names, table
from megatron_fp8rl.rollout.errors import EngineError
from tests.helpers.dist import run_ranks

PROMPT = [(7 * i) % 90 + 3 for i in range(45)]
DAMAGED = {  # a weight of the checkpoint -> the operations that multiply by it
    "": [],
    "model.layers.1.self_attn.k_proj.weight": ["layer.1.qkv"],
    "model.layers.0.mlp.experts.3.down_proj.weight": ["layer.0.experts"],
    "model.layers.1.post_attention_layernorm.weight": ["layer.1.post_norm"],
}


def trainer_side(cfg: RunConfig, weights: dict[str, torch.Tensor], recording: Path) -> dict[str, tuple]:
    """Runs on a trainer rank: the probe of every damage, on one model."""
    from megatron_fp8rl.diagnose.trainer_probe import TrainerProbe
    from megatron_fp8rl.trainer.model.build import build_chunks, load_hf
    from megatron_fp8rl.trainer.parallel import Parallel

    parallel = Parallel.init(cfg.parallel, deadline_s=60)
    chunks = build_chunks(cfg, parallel)
    engine, result = load_probe(recording), {}
    for name in DAMAGED:
        changed = weights | ({name: weights[name] * 1.25} if name else {})
        load_hf(chunks, changed.__getitem__, cfg.model, parallel)
        probe = TrainerProbe(chunks, cfg, parallel)
        result[name] = probe.record(PROMPT), probe.replay(engine)
    parallel.close()
    return result


def test_the_operation_that_differs_is_named(fleet, tmp_path):
    cfg = replace(fleet.cfg, precision=replace(fleet.cfg.precision, trainer="blockwise"))
    weights = random_weights(cfg, 7)
    publish(fleet, weights, version=41)
    recording = tmp_path / "engine.safetensors"
    engine = fleet.sync(record_prefill(fleet.clients[0], PROMPT, recording), 60.0)
    assert list(sorted(engine)) == sorted(operation_names(cfg.model))
    assert engine["layer.0.qkv"].shape == (len(PROMPT), 8 * 128) and engine["logits"].shape == (1, 128)

    (actual,) = run_ranks(1, trainer_side, cfg, weights, recording)
    for name, expected in DAMAGED.items():
        rows = compare(engine, *actual[name], cfg.model)
        # What follows inherits the difference and has none of its own.
        assert [row.name for row in rows if row.is_beyond_rounding] == expected, f"{name}\n{table(rows)}"
    sound = {row.name: row for row in compare(engine, *actual[""], cfg.model)}
    assert sound["embedding"].total_max == sound["layer.0.input"].isolated_max == 0
    # Our kernels multiply at both ends of a CPU, and the sums of the residual stream are one rounding.
    for name in ("layer.0.qkv", "layer.0.o_proj", "layer.0.middle", "layer.1.qkv", "final"):
        assert sound[name].isolated_max == 0, name
    # A sum differs by no more than its two parts do, and one unit of its rounding.
    parts = sound["layer.0.input"].total_max + sound["layer.0.o_proj"].total_max
    unit = engine["layer.0.middle"].abs().max().item() * 2**-7
    assert sound["layer.0.middle"].total_max <= parts + unit
    router = "layer.1.router"
    chosen = [
        logits.topk(cfg.model.experts_per_token).indices.sort().values
        for logits in (engine[router], actual[""][1][router])
    ]
    assert (chosen[0] != chosen[1]).any(1).sum() <= 1


def test_a_probe_without_its_prefill_says_so(fleet, tmp_path):
    client = fleet.clients[0]
    with pytest.raises(EngineError, match="no prefill of the whole prompt was seen"):
        fleet.sync(client.collective_rpc("start_probe", num_tokens=9), 120.0)
        fleet.sync(client.collective_rpc("finish_probe", path=str(tmp_path / "none")), 120.0)
