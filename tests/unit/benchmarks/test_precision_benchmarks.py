"""The pure parts of the benchmarks of precision: their data, and what they make of losses and gradients."""

from __future__ import annotations

import argparse
import asyncio
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import mismatch, recipes
from benchmarks.runner import parse
from benchmarks.synthetic import Language, as_sample
from model_configs import tiny

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
        "decoder.layers.3.mlp.experts.17.linear_fc2.weight": "down",
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


def test_arms_of_recipes_are_precisions_and_differ():
    assert len({str(recipes.precision_of(arm)) for arm in recipes.ARMS}) == len(recipes.ARMS) - 1  # one has another seed
    options = parse(recipes.Recipes(), ["--model", "tiny", "small_moe"])
    found = [arm["arm"] for arm in recipes.Recipes().arms(options) if arm["model"] == "tiny"]
    assert found == ["bf16", "bf16, other seed", *recipes.FP8] or torch.cuda.is_available()


def test_tables_and_plot_of_recipes(tmp_path):
    head = {"model": "small", "layers": 2, "best_loss": 1.0, "steps": 30, "tokens": 64, "device": "none"}
    rows = [
        head | {"measured": "loss", "arm": arm, "losses": [3.0 - 0.01 * i for i in range(30)], "step_s": 0.1}
        for arm in recipes.ARMS
    ]
    rows += [head | {"measured": "noise", "arm": arm, "snr_db": {"qkv": [20.0, 25.0]}} for arm in recipes.FP8]
    lines = recipes.lines(rows)
    assert len({line["recipe"] for line in lines}) == len(recipes.ARMS) == 14
    assert {line["qkv dB"] for line in lines} == {"-", "20.0 to 25.0"}
    assert not recipes.lines([row | {"run": "A"} for row in rows if row["arm"] != "bf16"])  # no BF16 in that run
    recipes.plot(rows, tmp_path / "recipes.png")
    assert (tmp_path / "recipes.png").stat().st_size > 10_000


def test_engines_of_the_mismatch_table():
    options = argparse.Namespace(rollout=["bf16", "fp8", "fp8_kv"], scales=["pow2", "fp32"], experts="te")
    engines = [(e.rollout, e.scales) for e in mismatch.plan_engines(options)]
    assert engines == [("bf16", "pow2")] + [(r, s) for r in ("fp8", "fp8_kv") for s in ("pow2", "fp32")]


class _Client:
    async def prompt_logprobs(self, token_ids):
        """Of all tokens but the first; the last one of the first sample comes out 0.25 lower than it was sampled."""
        return [-9.0, -9.0, -0.5, -1.0 - 4e-6, -1.75 if token_ids[0] == 10 else -2.5]


def test_the_engine_s_prefill_is_compared_with_what_it_sampled():
    samples = [as_sample(str(i), range(10 + i, 16 + i), 3, (-0.5, -1.0, -1.5 - i)) for i in range(2)]
    fleet = SimpleNamespace(
        clients=(_Client(),),
        cfg=SimpleNamespace(rollout=SimpleNamespace(request_deadline_s=60.0)),
        sync=lambda coroutine, deadline_s: asyncio.run(coroutine),
    )
    own = mismatch.prefilled(fleet, samples)
    assert [s.token_ids for s in own] == [s.token_ids for s in samples]
    assert own[0].rollout_logprobs == (0.0, 0.0, 0.0, -0.5, -1.0 - 4e-6, -1.75)
    cfg = tiny.tiny_qwen3()
    warm = mismatch.WarmTrainer("tiny", SimpleNamespace(cfg=cfg), LANGUAGE, (), argparse.Namespace(), None)
    numbers = mismatch._numbers(warm.recomputed(mismatch.PREFILL, mismatch.Engine("fp8", "pow2"), fleet, samples))
    assert numbers["tokens"] == 6 and numbers["abs_logprob_diff/max"] == pytest.approx(0.25)
    assert numbers["abs_logprob_diff/mean"] == pytest.approx((0.25 + 2 * 4e-6) / 6, rel=1e-2)
    # Three of six have the same bits, two more are equal to the rounding of sums.
    assert numbers["equal_share"] == pytest.approx(3 / 6) and numbers["rounding_share"] == pytest.approx(5 / 6, abs=1e-4)


def test_table_of_mismatches():
    head = {"model": "qwen3_8b", "layers": 8, "warm_steps": 9, "linear": "auto", "moe": "auto", "attention": "auto"}
    head |= {"compile": "eager", "batch_invariant": True, "experts": "auto", "scales": "pow2", "rollout": "fp8"}
    head |= {"abs_logprob_diff/mean": 0.01, "abs_logprob_diff/max": 0.2, "kl_k3/mean": 1e-4, "equal_share": 0.25}
    head |= {"multiplicative_error/mean": 1.01, "trainer": "blockwise", "rounding_share": 1.0}
    rows = [head | {"warm_loss": loss} for loss in (1.5, 1.75, None)]
    line = mismatch.Mismatch().line(rows[0])
    assert line["d = 0, d < 1e-5"] == "25.0%, 100.0%" and line["mean d"] == "0.01000"
    assert line["linear / experts / attention"] == "auto / auto / auto, batch-invariant, eager"
    assert mismatch.warm_starts(rows) == "qwen3_8b: 9 steps, 1.500 to 1.750 nats"
