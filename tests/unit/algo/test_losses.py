"""Losses against a loop over tokens in Python floats, with the gradient written out by hand."""

import dataclasses
import math

import pytest
import torch
from algo_cases import noise, packed, random_samples, with_logprobs

from megatron_fp8rl.algo.load_function import load_loss
from megatron_fp8rl.config import AlgoConfig
from megatron_fp8rl.types import LossInputs
from tests.tolerances import FLOAT64_EXP, FLOAT64_ORDER

MAX_COMPLETION = 16
PLAIN = AlgoConfig(correction="off")
AGGREGATE = {"grpo": "sequence", "dapo": "token", "dr_grpo": "constant", "gspo": "sequence", "cispo": "token"}


def call(cfg: AlgoConfig, mb, trainer, entropy, batch, max_completion_tokens: int = MAX_COMPLETION):
    """(loss, metrics) of the loss that ``cfg`` names."""
    inputs = LossInputs(
        mb=mb,
        batch=batch,
        trainer_logprobs_T=trainer,
        entropy_T=entropy,
        cfg=cfg,
        max_completion_tokens=max_completion_tokens,
    )
    return load_loss(cfg)(inputs)


def loop_weights(log_ratios: list[float], cfg: AlgoConfig) -> list[float]:
    """Importance weights of one sequence, from its log ratios old - rollout at loss tokens."""
    ratios = [math.exp(x) for x in log_ratios]
    product, mean = math.exp(sum(log_ratios)), math.exp(sum(log_ratios) / len(log_ratios))
    low, high = cfg.correction_low, cfg.correction_high
    result = {
        "off": [1.0] * len(ratios),
        "truncate": [min(r, high) for r in ratios],
        "mask": [r if low <= r <= high else 0.0 for r in ratios],
        "sequence_truncate": [min(product, high)] * len(ratios),
        "sequence_mask": [product if low <= product <= high else 0.0] * len(ratios),
        "geometric_mask": [min(r, 2.0) if low <= mean <= high else 0.0 for r in ratios],
    }[cfg.correction]
    vetoed = cfg.correction != "off" and cfg.veto_below is not None and min(ratios) < cfg.veto_below
    return [0.0] * len(ratios) if vetoed else result


def loop_loss(batch, trainer, entropy, cfg: AlgoConfig):
    """(loss, {token: d loss / d trainer logprob}) of a batch of one microbatch."""
    (mb,) = batch.microbatches
    total, gradient = 0.0, {}
    for s in range(len(mb.names)):
        tokens = [t for t in range(len(mb.tokens_T)) if mb.loss_mask_T[t] and mb.sequence_ids_T[t] == s]
        if not tokens:
            continue
        old = [mb.old_logprobs_T[t].item() for t in tokens]
        now = [trainer[t].item() for t in tokens]
        weights = loop_weights([o - mb.rollout_logprobs_T[t].item() for o, t in zip(old, tokens, strict=True)], cfg)
        sequence_ratio = math.exp(sum(n - o for n, o in zip(now, old, strict=True)) / len(tokens))
        share = {
            "token": 1 / batch.num_loss_tokens,
            "sequence": 1 / (batch.num_sequences * len(tokens)),
            "constant": 1 / (batch.num_sequences * MAX_COMPLETION),
        }[cfg.loss_options.get("aggregate", AGGREGATE[cfg.loss])]
        for t, o, n, w in zip(tokens, old, now, weights, strict=True):
            token_ratio = math.exp(n - o)
            value, slope = loop_surrogate(
                sequence_ratio if cfg.loss == "gspo" else token_ratio, n, mb.advantages_T[t].item(), cfg
            )
            difference = n - mb.ref_logprobs_T[t].item()
            reweight = w * min(max(token_ratio, 1 - cfg.clip_low), 1 + cfg.clip_high)
            value = w * value - cfg.kl_coef * reweight * (math.exp(-difference) - 1 + difference)
            slope = w * slope - cfg.kl_coef * reweight * difference
            total -= share * (value + cfg.entropy_coef * entropy[t].item())
            gradient[t] = -share * slope
    return total, gradient


def loop_surrogate(ratio: float, logprob: float, advantage: float, cfg: AlgoConfig) -> tuple[float, float]:
    clipped = min(max(ratio, 1 - cfg.clip_low), 1 + cfg.clip_high)
    if cfg.loss == "cispo":
        return clipped * advantage * logprob, clipped * advantage
    value, slope = ratio * advantage, ratio * advantage
    if clipped * advantage < value:
        value, slope = clipped * advantage, 0.0
    dual_clip = cfg.loss_options.get("dual_clip")
    if dual_clip is not None and advantage < 0 and value < dual_clip * advantage:
        value, slope = dual_clip * advantage, 0.0
    return value, slope


def evaluate(batch, cfg: AlgoConfig, trainer_noise: float = 0.3):
    """(loss, gradients per microbatch, metrics summed) of all microbatches of one rank's batch."""
    total, gradients, sums = 0.0, [], {}
    for mb in batch.microbatches:
        trainer = (mb.rollout_logprobs_T + noise(mb, "trainer", trainer_noise)).requires_grad_()
        entropy = mb.rollout_logprobs_T.abs() + 0.5
        loss, metrics = call(cfg, mb, trainer, entropy, batch)
        loss.backward()
        total += loss.item()
        gradients.append(trainer.grad)
        for key, value in metrics.items():
            combine = max if key.endswith("/max") else float.__add__
            sums[key] = combine(sums.get(key, 0.0), float(value))
    return total, gradients, sums


OPTIONS = [
    *((loss, {"aggregate": a}) for loss in ("grpo", "gspo", "cispo") for a in ("token", "sequence", "constant")),
    *((loss, {}) for loss in AGGREGATE),
    *((loss, {"dual_clip": 1.1}) for loss in AGGREGATE if loss != "cispo"),
    ("gspo", {"aggregate": "token", "dual_clip": 1.1}),
]


@pytest.mark.parametrize(("loss", "options"), OPTIONS)
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_loss_and_gradient_match_a_loop(loss, options, kl_coef):
    cfg = AlgoConfig(
        loss=loss,
        loss_options=options,
        kl_coef=kl_coef,
        entropy_coef=kl_coef / 3,
        clip_low=0.1,
        clip_high=0.15,
        correction_high=1.3,
    )
    batch = with_logprobs(packed(random_samples(seed=1))[0])
    (mb,) = batch.microbatches
    loss, (gradient,), _ = evaluate(batch, cfg)
    trainer = mb.rollout_logprobs_T + noise(mb, "trainer", 0.3)
    expected_loss, expected_gradient = loop_loss(batch, trainer, mb.rollout_logprobs_T.abs() + 0.5, cfg)
    assert loss == pytest.approx(expected_loss, rel=FLOAT64_EXP["rtol"])
    dense = torch.zeros_like(gradient)
    for t, value in expected_gradient.items():
        dense[t] = value
    torch.testing.assert_close(gradient, dense, **FLOAT64_EXP)
    assert dense.count_nonzero() > 10


@pytest.mark.parametrize(
    ("correction", "low", "high"),
    [
        ("off", 0.0, 2.0),
        ("truncate", 0.0, 1.1),
        ("mask", 0.8, 1.25),
        ("sequence_truncate", 0.0, 1.1),
        ("sequence_mask", 0.5, 2.0),
        ("geometric_mask", 0.9, 1.1),
    ],
)
@pytest.mark.parametrize("veto_below", [None, 0.6])
def test_correction_in_the_loss_matches_a_loop(correction, low, high, veto_below):
    cfg = AlgoConfig(correction=correction, correction_low=low, correction_high=high, veto_below=veto_below)
    batch = with_logprobs(packed(random_samples(seed=2))[0])
    (mb,) = batch.microbatches
    loss, (gradient,), sums = evaluate(batch, cfg)
    trainer = mb.rollout_logprobs_T + noise(mb, "trainer", 0.3)
    expected_loss, expected_gradient = loop_loss(batch, trainer, mb.rollout_logprobs_T, cfg)
    assert loss == pytest.approx(expected_loss, rel=FLOAT64_EXP["rtol"])
    for t, value in expected_gradient.items():
        assert gradient[t].item() == pytest.approx(value, rel=FLOAT64_EXP["rtol"], abs=FLOAT64_EXP["atol"])
    if correction == "off":
        assert sums["correction/fraction_corrected/mean"] == sums["correction/fraction_vetoed/mean"] == 0
        assert sums["correction/weight/mean"] == batch.num_loss_tokens
    else:
        assert 0 < sums["correction/fraction_corrected/mean"] < batch.num_loss_tokens
        assert (sums["correction/fraction_vetoed/mean"] > 0) == (veto_below is not None)


@pytest.mark.parametrize("loss", AGGREGATE)
@pytest.mark.parametrize("correction", ["truncate", "sequence_mask", "geometric_mask"])
def test_any_split_gives_the_same_loss_and_gradient(loss, correction):
    """Over microbatches of other sizes and over data-parallel ranks, with filler microbatches."""
    cfg = AlgoConfig(loss=loss, correction=correction, correction_high=1.5, kl_coef=0.1, entropy_coef=0.02)
    samples = random_samples(seed=3, count=11)
    results = []
    for max_tokens, data_size, alignment in ((4096, 1, 1), (40, 1, 4), (24, 1, 8), (24, 3, 2), (20, 4, 1)):
        total, by_token, metrics = 0.0, {}, {}
        for batch in packed(samples, max_tokens=max_tokens, data_size=data_size, alignment=alignment):
            loss, gradients, sums = evaluate(with_logprobs(batch), cfg)
            total += loss
            for key, value in sums.items():
                combine = max if key.endswith("/max") else float.__add__
                metrics[key] = combine(metrics.get(key, 0.0), value)
            for mb, gradient in zip(batch.microbatches, gradients, strict=True):
                for t in mb.loss_mask_T.nonzero().flatten().tolist():
                    token = (mb.names[int(mb.sequence_ids_T[t])], int(mb.completion_positions_T[t]))
                    assert token not in by_token
                    by_token[token] = gradient[t].item()
        results.append((total, by_token, metrics))
    for total, by_token, metrics in results[1:]:
        assert total == pytest.approx(results[0][0], rel=FLOAT64_ORDER["rtol"])
        assert by_token == pytest.approx(results[0][1], rel=FLOAT64_ORDER["rtol"], abs=FLOAT64_ORDER["atol"])
        assert metrics == pytest.approx(results[0][2], rel=FLOAT64_ORDER["rtol"])


@pytest.mark.parametrize("loss", ["dapo", "gspo", "cispo"])
@pytest.mark.parametrize("has_old", [True, False])
def test_on_policy_gradient_is_reinforce(loss, has_old):
    """All policies equal: every ratio is 1, nothing is clipped, and d loss / d logprob = -advantage / tokens."""
    batch = with_logprobs(packed(random_samples(seed=4))[0], old_noise=0.0)
    mb = dataclasses.replace(batch.microbatches[0], **({} if has_old else {"old_logprobs_T": None}))
    batch = dataclasses.replace(batch, microbatches=(mb,))
    _, (gradient,), sums = evaluate(
        batch, AlgoConfig(loss=loss, loss_options={"aggregate": "token"} if loss == "gspo" else {}), trainer_noise=0.0
    )
    expected = -mb.advantages_T * mb.loss_mask_T / batch.num_loss_tokens
    torch.testing.assert_close(gradient, expected, **FLOAT64_ORDER)
    assert sums["loss/update_ratio/max"] == sums["correction/weight/max"] == 1.0
    assert sums["loss/clip_fraction_low/mean"] == sums["loss/clip_fraction_high/mean"] == 0


def test_infinities_and_nan_under_the_mask_are_harmless():
    batch = with_logprobs(packed(random_samples(seed=5))[0])
    (mb,) = batch.microbatches
    cfg = AlgoConfig(
        kl_coef=0.1, entropy_coef=0.1, correction="geometric_mask", correction_high=1.5, loss_options={"dual_clip": 2.0}
    )
    trainer = mb.rollout_logprobs_T + noise(mb, "trainer", 0.3)
    outcomes = []
    for filler in (0.0, float("-inf"), float("inf"), float("nan")):

        def spoil(values, filler=filler):
            return torch.where(mb.loss_mask_T, values, filler)

        spoilt = dataclasses.replace(
            mb,
            old_logprobs_T=spoil(mb.old_logprobs_T),
            ref_logprobs_T=spoil(mb.ref_logprobs_T),
            rollout_logprobs_T=spoil(mb.rollout_logprobs_T),
        )
        leaf = spoil(trainer).requires_grad_()
        loss, metrics = call(cfg, spoilt, leaf, spoil(trainer.abs()), batch)
        loss.backward()
        assert (leaf.grad[~mb.loss_mask_T] == 0).all()
        outcomes.append((loss.item(), leaf.grad, metrics))
    for loss, gradient, metrics in outcomes[1:]:
        assert loss == outcomes[0][0]
        assert torch.equal(gradient, outcomes[0][1])
        assert all(torch.equal(metrics[key], outcomes[0][2][key]) for key in metrics)


def test_kl_gradient_is_that_of_the_true_kl():
    """The expectation over a small vocabulary, exactly: sum_v p_v grad(term_v) = grad KL(p || reference)."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_()
    ref = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(-1)
    logp = logits.log_softmax(-1)
    (expected,) = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits, retain_graph=True)

    batch = packed(random_samples(seed=0, count=1, longest=1), alignment=6)[0]
    (mb,) = batch.microbatches
    assert len(mb.tokens_T) == 6
    everything = torch.ones(6, dtype=torch.bool)
    old = logp.detach()
    mb = dataclasses.replace(
        mb,
        loss_mask_T=everything,
        advantages_T=torch.zeros(6, dtype=torch.float64),
        rollout_logprobs_T=old,
        old_logprobs_T=old,
        ref_logprobs_T=ref,
    )
    cfg = AlgoConfig(kl_coef=1.0)
    batch = dataclasses.replace(batch, microbatches=(mb,), num_loss_tokens=1)
    leaf = old.clone().requires_grad_()
    call(cfg, mb, leaf, old, batch, max_completion_tokens=1)[0].backward()
    (actual,) = torch.autograd.grad(logp, logits, grad_outputs=old.exp() * leaf.grad)
    torch.testing.assert_close(actual, expected, **FLOAT64_ORDER)


def test_extreme_ratios_stay_finite():
    batch = with_logprobs(packed(random_samples(seed=6))[0])
    (mb,) = batch.microbatches
    for shift in (-1e4, 1e4):
        leaf = (mb.old_logprobs_T.float() + shift).requires_grad_()
        loss, metrics = call(PLAIN, mb, leaf, leaf.detach(), batch)
        loss.backward()
        assert torch.isfinite(loss) and torch.isfinite(leaf.grad).all()
        assert all(torch.isfinite(value) for value in metrics.values())


def test_clip_fractions_count_what_lost_its_gradient():
    batch = with_logprobs(packed(random_samples(seed=7))[0])
    (mb,) = batch.microbatches
    names = ("low", "high", "dual")
    for dual_clip in (None, 1.05):
        options = {"dual_clip": dual_clip}
        cfg = AlgoConfig(clip_low=0.1, clip_high=0.1, loss_options=options, correction="off")
        _, (gradient,), sums = evaluate(batch, cfg)
        fractions = [sums[f"loss/clip_fraction_{name}/mean"] for name in names]
        assert sum(fractions) == int(((gradient == 0) & mb.loss_mask_T).sum())
        assert [fraction > 0 for fraction in fractions] == [True, True, dual_clip is not None]


def test_kl_without_a_reference_is_refused():
    batch = with_logprobs(packed(random_samples(seed=8))[0])
    mb = dataclasses.replace(batch.microbatches[0], ref_logprobs_T=None)
    with pytest.raises(ValueError, match="kl_coef needs reference"):
        call(AlgoConfig(kl_coef=0.1), mb, mb.old_logprobs_T, mb.old_logprobs_T, batch)


def test_sft_loss_is_the_mean_cross_entropy():
    generator = torch.Generator().manual_seed(1)
    samples = random_samples(seed=9)
    for max_tokens in (4096, 32):
        batch = packed(samples, max_tokens=max_tokens)[0]
        total, reference, count = 0.0, 0.0, 0
        for mb in batch.microbatches:
            logits = torch.randn(len(mb.tokens_T), 100, generator=generator, dtype=torch.float64)
            logprobs = logits.log_softmax(-1).gather(1, mb.targets_T[:, None])[:, 0]
            total += call(AlgoConfig(loss="sft"), mb, logprobs, logprobs, batch)[0].item()
            chosen = mb.loss_mask_T
            reference += torch.nn.functional.cross_entropy(logits[chosen], mb.targets_T[chosen], reduction="sum").item()
            count += int(chosen.sum())
        assert count == batch.num_loss_tokens
        assert total == pytest.approx(reference / count, rel=FLOAT64_ORDER["rtol"])


def test_gspo_limits_the_mean_of_a_sequence_and_not_its_tokens():
    """Log ratios +30 and -29.5 of a sequence: the mean is 0.25, and the gradient of both tokens is its ratio's."""
    samples = [s for s in random_samples(seed=7, count=40) if s.num_loss_tokens == 2][:1]
    (batch,) = packed(samples)
    (mb,) = with_logprobs(batch, old_noise=0.0).microbatches
    offsets = torch.zeros_like(mb.old_logprobs_T)
    offsets[mb.loss_mask_T] = torch.tensor([30.0, -29.5], dtype=torch.float64)
    leaf = (mb.old_logprobs_T + offsets).requires_grad_()
    cfg = AlgoConfig(loss="gspo", clip_high=1.0, correction="off")
    loss, _ = call(cfg, mb, leaf, leaf.detach(), batch)
    loss.backward()
    expected = -mb.advantages_T * math.exp(0.25) / 2 * mb.loss_mask_T
    assert loss.item() == pytest.approx(expected.sum().item(), rel=FLOAT64_EXP["rtol"])
    torch.testing.assert_close(leaf.grad, expected, **FLOAT64_EXP)
