"""The pure parts of the benchmarks of precision: their data, and what they make of losses and gradients."""

from __future__ import annotations

import argparse
import math

import numpy as np
import pytest
import torch

from benchmarks import mismatch, probe, recipes
from benchmarks.synthetic import Language, as_sample

LANGUAGE = Language(128, num_words=16, num_successors=3, seed=4)


def test_walks_follow_the_tables():
    walks = LANGUAGE.walks(3000, 12, seed=1)
    assert np.array_equal(walks, LANGUAGE.walks(3000, 12, seed=1))
    assert not np.array_equal(walks, LANGUAGE.walks(3000, 12, seed=2))
    assert walks.min() >= 8 and walks.max() < 128 and len(np.unique(walks)) <= 16
    # A token has three successors under each of two tables; which one applies, the token before decides.
    behind, both = {}, {}
    for first, second, third in zip(walks[:, 4], walks[:, 5], walks[:, 6]):
        behind.setdefault((first, second), set()).add(third)
        both.setdefault(second, set()).add(third)
    assert max(map(len, behind.values())) == 3
    assert max(map(len, both.values())) > 3


def test_entropy_is_that_of_the_walks():
    p = 0.55 ** np.arange(3)
    p /= p.sum()
    assert LANGUAGE.entropy == pytest.approx(-(p * np.log(p)).sum())
    assert 0 < LANGUAGE.entropy < math.log(3)


def test_samples_carry_loss_behind_the_prompt():
    (sample,) = LANGUAGE.samples(1, 10, seed=3)
    assert sum(sample.loss_mask) == 9 and not sample.loss_mask[0]
    sampled = as_sample("a", (5, 6, 7, 8), 2, (-0.5, -1.0))
    assert sampled.rollout_logprobs == (0.0, 0.0, -0.5, -1.0) and sampled.loss_mask == (False, False, True, True)
    with pytest.raises(ValueError, match="2 completion tokens need as many finite"):
        as_sample("a", (5, 6, 7, 8), 2, (-0.5,))


def test_kinds_of_matrices():
    kinds = {
        "decoder.layers.3.self_attention.linear_qkv.weight": "qkv",
        "decoder.layers.3.self_attention.linear_proj.weight": "attention out",
        "decoder.layers.3.mlp.linear_fc1.weight": "gate and up",
        "decoder.layers.3.mlp.experts.linear_fc2.weight17": "down",
        "decoder.layers.3.mlp.router.weight": None,
        "decoder.layers.3.self_attention.q_layernorm.weight": None,
        "embedding.word_embeddings.weight": None,
    }
    assert {name: recipes.kind_of(name) for name in kinds} == kinds


def test_signal_to_noise_by_layer_with_experts_together():
    names = [f"decoder.layers.{layer}.mlp.experts.linear_fc1.weight{e}" for layer in (0, 1) for e in (0, 1)]
    exact = {name: torch.full((4, 4), 2.0) for name in names}
    rounded = {name: g + (0.02 if ".1." in name else 0.2) for name, g in exact.items()}
    rounded[names[1]] = exact[names[1]]  # half of layer 0 without noise: 3 dB better
    assert recipes.signal_to_noise(exact, rounded) == {"gate and up": [pytest.approx(23.01, abs=0.02), 40.0]}


def test_deviation_is_signed_and_from_the_second_half():
    reference = [1.0] * 100
    losses = [9.0] * 30 + [1.0] * 50 + [0.9] * 20
    worst, final = recipes.deviation(losses, reference)
    assert worst == pytest.approx(-0.1) and final == pytest.approx(0.9)


def test_tables_and_plot_of_recipes(tmp_path):
    head = {"model": "small", "layers": 2, "best_loss": 1.0, "steps": 30, "tokens": 64, "device": "none"}
    rows = [
        head | {"measured": "loss", "arm": arm.name, "losses": [3.0 - 0.01 * i for i in range(30)], "step_s": 0.1}
        for arm in recipes.ARMS
    ]
    rows += [head | {"measured": "noise", "arm": arm.name, "snr_db": {"qkv": [20.0, 25.0]}} for arm in recipes.FP8]
    lines = recipes.table(rows)
    assert len({line["recipe"] for line in lines}) == len(recipes.ARMS) == 11
    assert {line["qkv dB"] for line in lines} == {"-", "20.0 to 25.0"}
    recipes.plot(rows, tmp_path / "recipes.png")
    assert (tmp_path / "recipes.png").stat().st_size > 10_000


def test_engines_of_the_mismatch_table():
    options = argparse.Namespace(rollout=["bf16", "fp8", "fp8_kv"], scales=["pow2", "fp32"], experts="te")
    engines = [(e.rollout, e.scales) for e in mismatch.plan_engines(options)]
    assert engines == [("bf16", "pow2")] + [(r, s) for r in ("fp8", "fp8_kv") for s in ("pow2", "fp32")]


@pytest.mark.parametrize("program", [mismatch, probe, recipes])
def test_programs_explain_themselves_and_ask_for_a_gpu(program, capsys):
    with pytest.raises(SystemExit) as end:
        program.main(["--help"])
    assert end.value.code == 0 and "--quick" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU is told")
def test_without_a_gpu_they_say_so(capsys):
    assert probe.main(["grpo_qwen3_8b"]) == 2
    for program in (mismatch, recipes):
        with pytest.raises(SystemExit) as end:
            program.main(["--model", "qwen3_8b"])
        assert end.value.code == 2
    assert capsys.readouterr().err.count("GPU") == 3
