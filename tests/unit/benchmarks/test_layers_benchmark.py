"""benchmarks/layers.py on a tiny model, on whatever this machine has."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest
import torch

from benchmarks import experts, layers, linears
from benchmarks.timing import Budget
from benchmarks.training import MODELS, single_rank
from megatron_fp8rl.config import PrecisionConfig

BF16 = PrecisionConfig(trainer="bf16", rollout="bf16", experts="te")
FP8 = PrecisionConfig(trainer="blockwise", rollout="bf16", experts="deep_gemm")


@pytest.mark.parametrize("precision", [BF16, FP8], ids=["bf16", "grouped fp8"])
def test_layers_are_timed_alone_and_in_whole_steps(monkeypatch, precision):
    monkeypatch.setattr(layers, "_STEPS", 1)
    cfg = layers.run_of("small_moe", 1, precision, tokens=256)
    with single_rank(cfg) as parallel:
        alone = layers.measure_layers(cfg, parallel, 1, length=64)
        step = layers.measure_steps(cfg, parallel, length=64)
    assert alone["ms"] > 0 and alone["first_s"] > 0 and 1 <= alone["busiest"] < 2
    assert step["step_ms"] > 0 and step["tokens_per_s"] == pytest.approx(256e3 / step["step_ms"], abs=0.1)


def test_experts_with_fused_swiglu_are_the_same_function():
    from megatron_fp8rl.trainer.model.layers import Experts

    cfg = layers.run_of("small_moe", 1, BF16, tokens=256)
    with single_rank(cfg) as parallel:
        (experts_of_a_layer,) = (m for m in layers.random_chunks(cfg, parallel)[0].modules() if isinstance(m, Experts))
        experts_of_a_layer.applies_router_weights = True  # as on a GPU
        hidden, probs = torch.randn(64, cfg.model.hidden_size).bfloat16(), torch.rand(64)
        counts = torch.full((16,), 4)
        with torch.no_grad():
            fused, plain = (
                forward(hidden, counts, probs)[0]
                for forward in (experts_of_a_layer.forward, lambda *args: Experts.forward(experts_of_a_layer, *args))
            )
    assert "forward" in vars(experts_of_a_layer) and (fused - plain).norm() < 2**-7 * plain.norm()


def test_a_row_for_each_arm_that_has_none_and_an_error_for_one_that_fails(monkeypatch):
    def fake(what, cfg, rounds):
        if cfg.precision.trainer == "blockwise":
            raise RuntimeError("no memory")
        assert cfg.model.num_layers == 2 and rounds == 3
        assert (cfg.model.vocab_size == layers.VOCABULARY) == (what == "layers")
        return {"ms": 2.0} if what == "layers" else {"vocabulary": cfg.model.vocab_size}

    monkeypatch.setattr(layers, "apart", fake)
    options = argparse.Namespace(layers=2, rounds=3, budget=Budget(60), is_known=lambda row: row["arm"] == "known")
    found = list(layers.measure("tiny_moe", {"te bf16": BF16, "known": BF16, "grouped fp8": FP8}, options))
    assert [row["arm"] for row in found] == ["te bf16", "grouped fp8"]
    assert found[0]["ms"] == 2.0 and found[0]["vocabulary"] == MODELS["tiny_moe"]().vocab_size
    assert found[0]["pattern"] == "balanced"
    assert found[1]["error"] == "no memory" and found[1]["layers"] == 2


def test_a_process_of_its_own_brings_a_row_or_says_why_not(monkeypatch):
    cfg = replace(layers.run_of("tiny_moe", 1, BF16, tokens=2 * layers.LENGTH), name="small")
    with pytest.raises(RuntimeError, match="RuntimeError: world_size .1. is not divisible"):
        layers.apart("layers", replace(cfg, parallel=replace(cfg.parallel, expert=3)), 1)
    monkeypatch.setattr(layers, "_LIMIT_S", 0.5)
    with pytest.raises(RuntimeError, match="layers of small took more than 0 s"):
        layers.apart("layers", cfg, 1)


def test_every_arm_is_told_against_bf16_of_the_same_layers():
    row = {"measured": "layers", "what": "m", "layers": 4, "tokens": 100, "device": "NVIDIA H200"}
    rows = [
        row | {"arm": "te bf16", "ms": 140.0, "step_ms": 300.0, "peak_GiB": 20.0},
        row | {"arm": "te bf16", "layers": 8, "ms": 9.0},
        row | {"arm": "grouped fp8", "ms": 100.0, "step_ms": 250.0, "peak_GiB": 19.0},
        row | {"arm": "te blockwise", "error": "no memory"},
        row | {"arm": "grouped fp8", "layers": 2, "ms": 50.0, "busiest": 8.6},  # of a router that did not balance
        {"measured": "linears", "ms": 1.0},
    ]
    bf16, other, fp8 = layers.table(rows)
    assert (fp8["bf16 : this, ms"], fp8["bf16 : this, step_ms"], other["bf16 : this, ms"]) == (1.4, 1.2, 1.0)
    assert bf16["layers"] == 4 and "measured" not in bf16
    assert layers.told(rows)[2].startswith("m, 4 layers, grouped fp8: 100.0 ms, 1.4x of BF16 in speed, 19.0 GiB;")


def test_arms_differ_in_kernels_and_recipe_alone():
    for arms, model in ((experts.LAYER_ARMS, "qwen3_30b_a3b"), (linears.LAYER_ARMS, "qwen3_8b")):
        runs = {arm: layers.run_of(model, 4, precision) for arm, precision in arms.items()}
        first = next(iter(runs.values()))
        assert all(replace(run, precision=first.precision) == first for run in runs.values())
        assert any(run.precision.trainer == "bf16" for run in runs.values())
