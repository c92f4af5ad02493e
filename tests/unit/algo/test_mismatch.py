"""Mismatch weights, metrics and alarms against loops over tokens."""

import dataclasses
import math

import pytest
import torch
from algo_cases import LocalReducer, packed, random_samples, with_logprobs

from megatron_fp8rl.algo.mismatch import (
    InexactError,
    LogprobError,
    MismatchAlarm,
    limited,
    log_ratio,
    mismatch_metrics,
    require_exact,
    weights,
    with_measured_bounds,
)
from megatron_fp8rl.config import AlgoConfig
from megatron_fp8rl.types import TrainBatch
from tests.tolerances import FLOAT64_EXP

VETO = 0.6
CFG = AlgoConfig(correction="mask", correction_low=0.8, correction_high=1.25, veto_below=VETO)


class Ranks:
    """The reducer of one of several ranks; it computes the others' values itself."""

    def __init__(self, others):
        self.others = others

    def gather(self, value):
        collected = []

        class Collect(LocalReducer):
            def gather(self, value):
                collected.append(value)
                return [value]

        for batch in self.others:
            mismatch_metrics([batch], dataclasses.replace(CFG, alarm_action="warn"), Collect())
        return [value, *collected]


def loop_tokens(batches):
    """(name, environment, position, d) of every loss token."""
    return [
        (
            mb.names[int(mb.sequence_ids_T[t])],
            mb.environments[int(mb.sequence_ids_T[t])],
            int(mb.completion_positions_T[t]),
            (mb.old_logprobs_T[t] - mb.rollout_logprobs_T[t]).item(),
        )
        for batch in batches
        for mb in batch.microbatches
        for t in range(len(mb.tokens_T))
        if mb.loss_mask_T[t]
    ]


def loop_metrics(tokens):
    d = [token[3] for token in tokens]
    w = [math.exp(x) for x in d]
    n = len(d)
    vetoed_names = {token[0] for token, ratio in zip(tokens, w, strict=True) if ratio < VETO}
    vetoed = [token[0] in vetoed_names for token in tokens]
    corrected = [v or not 0.8 <= ratio <= 1.25 for v, ratio in zip(vetoed, w, strict=True)]
    return {
        "mismatch/abs_logprob_diff/mean": sum(map(abs, d)) / n,
        "mismatch/abs_logprob_diff/max": max(map(abs, d)),
        "mismatch/kl_k1/mean": -sum(d) / n,
        "mismatch/kl_k3/mean": sum(ratio - 1 - x for ratio, x in zip(w, d, strict=True)) / n,
        "mismatch/multiplicative_error/mean": sum(math.exp(abs(x)) for x in d) / n,
        "mismatch/effective_sample_size/mean": sum(w) ** 2 / (n * sum(ratio**2 for ratio in w)),
        "mismatch/chi_square/mean": sum(ratio**2 for ratio in w) / n - 1,
        "mismatch/ratio/mean": sum(w) / n,
        "mismatch/ratio/max": max(w),
        "mismatch/ratio/min": min(w),
        "mismatch/fraction_corrected/mean": sum(corrected) / n,
        "mismatch/fraction_vetoed/mean": sum(vetoed) / n,
    }


@pytest.mark.parametrize(("max_tokens", "data_size"), [(4096, 1), (24, 1), (24, 3)])
def test_metrics_match_a_loop_over_all_ranks(max_tokens, data_size):
    batches = [
        with_logprobs(batch)
        for batch in packed(random_samples(seed=1, count=12), max_tokens=max_tokens, data_size=data_size)
    ]
    report = mismatch_metrics(batches[:1], CFG, Ranks(batches[1:]))
    tokens = loop_tokens(batches)
    assert report.metrics == pytest.approx(loop_metrics(tokens), rel=FLOAT64_EXP["rtol"])
    assert 0 < report.metrics["mismatch/fraction_vetoed/mean"] < report.metrics["mismatch/fraction_corrected/mean"] < 1

    for part in report.by_environment:
        own = [abs(token[3]) for token in tokens if token[1] == part.label]
        assert part.num_tokens == len(own)
        assert part.abs_logprob_diff_mean == pytest.approx(sum(own) / len(own), rel=FLOAT64_EXP["rtol"])
    assert [part.label for part in report.by_environment] == ["e0", "e1"]

    assert [part.label for part in report.by_position] == ["0", "1", "2-3", "4-7", "8-15"]
    for part in report.by_position:
        first, last = (int(part.label.split("-")[0]), int(part.label.split("-")[-1]))
        own = [abs(token[3]) for token in tokens if first <= token[2] <= last]
        assert part.num_tokens == len(own)
        assert part.abs_logprob_diff_max == pytest.approx(max(own), rel=FLOAT64_EXP["rtol"])
    assert sum(part.num_tokens for part in report.by_position) == len(tokens)

    by_name = {}
    for name, _, _, d in tokens:
        by_name.setdefault(name, []).append(abs(d))
    ranked = sorted(by_name, key=lambda name: (-sum(by_name[name]) / len(by_name[name]), name))
    assert [part.label for part in report.worst] == ranked[:5]
    assert report.worst[0].num_tokens == len(by_name[ranked[0]])


def test_equal_policies_have_no_mismatch():
    batch = with_logprobs(packed(random_samples(seed=2))[0], old_noise=0.0)
    metrics = mismatch_metrics([batch], AlgoConfig(), LocalReducer()).metrics
    for key, value in metrics.items():
        is_one = any(name in key for name in ("multiplicative_error", "effective_sample_size", "/ratio/"))
        assert value == (1.0 if is_one else 0.0), key


def test_an_exact_run_stops_at_any_difference_and_names_the_worst_sequence():
    equal, other = (
        mismatch_metrics([with_logprobs(packed(random_samples(seed=2))[0], old_noise=noise)], CFG, LocalReducer())
        for noise in (0.0, 1e-9)
    )
    require_exact(equal)
    assert other.metrics["mismatch/abs_logprob_diff/max"] > 0
    with pytest.raises(InexactError, match=f"precision.exact.*{other.worst[0].label}.*No weight was changed"):
        require_exact(other)


def test_an_exact_run_compares_the_tokens_that_the_current_weights_sampled():
    mb = with_logprobs(packed(random_samples(seed=2))[0], old_noise=0.0).microbatches[0]
    tokens = mb.loss_mask_T.nonzero()[:, 0]

    def report(stale: list[int], wrong: list[int]):
        old, is_stale = mb.old_logprobs_T.clone(), torch.zeros_like(mb.loss_mask_T)
        old[tokens[wrong]] -= 0.25
        is_stale[tokens[stale]] = True
        batch = TrainBatch(
            microbatches=(dataclasses.replace(mb, old_logprobs_T=old, stale_T=is_stale),),
            num_loss_tokens=1,
            num_sequences=1,
        )
        return mismatch_metrics([batch], CFG, LocalReducer())

    mixed = report(stale=[0, 1, 5], wrong=[0, 5])
    require_exact(mixed)
    assert mixed.fraction_stale == pytest.approx(3 / len(tokens))
    assert mixed.metrics["mismatch/abs_logprob_diff/max"] == 0.25  # of all tokens
    found = report(stale=[0, 1], wrong=[0, 5])
    name = mb.names[int(mb.sequence_ids_T[tokens[5]])]
    with pytest.raises(InexactError, match=rf"up to 0.25 nats .* over {len(tokens) - 2} tokens.*{name}"):
        require_exact(found)
    everything = report(stale=list(range(len(tokens))), wrong=[3])
    require_exact(everything)
    assert everything.fraction_stale == 1 and everything.current is None


def test_no_loss_tokens_give_no_metrics():
    report = mismatch_metrics([], AlgoConfig(), LocalReducer())
    assert report.metrics == {} and report.alarms == () and report.worst == ()


@pytest.mark.parametrize("action", ["warn", "stop"])
def test_alarm_names_metric_threshold_and_worst_sequence(action):
    batch = with_logprobs(packed(random_samples(seed=3))[0], old_noise=1.0)
    cfg = AlgoConfig(alarm_action=action)
    if action == "stop":
        with pytest.raises(MismatchAlarm) as info:
            mismatch_metrics([batch], cfg, LocalReducer())
        report = info.value.report
        assert str(info.value) == "; ".join(report.alarms)
    else:
        report = mismatch_metrics([batch], cfg, LocalReducer())
    message = report.alarms[0]
    for part in ("mismatch/abs_logprob_diff/mean", "above 0.5", report.worst[0].label):
        assert part in message
    assert mismatch_metrics([with_logprobs(packed(random_samples(seed=3))[0])], cfg, LocalReducer()).alarms == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, float(value)) for field in ("rollout_logprobs", "old_logprobs") for value in ("nan", "-inf")]
    + [("rollout_logprobs", 3.0), ("rollout_logprobs", 0.01)],
)
def test_what_is_no_logprob_is_named_on_every_rank(field, value):
    batches = [with_logprobs(batch) for batch in packed(random_samples(seed=4, count=12), max_tokens=24, data_size=2)]
    mb = batches[1].microbatches[0]
    t = int(mb.loss_mask_T.nonzero()[0])
    spoilt = getattr(mb, f"{field}_T").clone()
    spoilt[t] = value
    broken = dataclasses.replace(
        batches[1], microbatches=(dataclasses.replace(mb, **{f"{field}_T": spoilt}), *batches[1].microbatches[1:])
    )
    name = mb.names[int(mb.sequence_ids_T[t])]
    with pytest.raises(LogprobError, match=f"{field} of {name} is .* at completion token") as info:
        mismatch_metrics([broken], CFG, LocalReducer())
    assert f"{value:.4g}" in str(info.value)

    class Both:
        """A healthy rank that learns of the other's failure."""

        def gather(self, mine):
            sick = type(mine)()
            sick.add(broken.microbatches[0], CFG)
            return [mine, sick]

    with pytest.raises(LogprobError, match=name):
        mismatch_metrics(batches[:1], CFG, Both())


def test_old_logprobs_are_required():
    with pytest.raises(ValueError, match="with_old_logprobs"):
        mismatch_metrics(packed(random_samples(seed=5)), AlgoConfig(), LocalReducer())


def test_weights_by_hand():
    """Two sequences: ratios (2, 1/2, 4) and (1/10, 1); the last token is outside the mask."""
    ratios = torch.tensor([2.0, 0.5, 4.0, 0.1, 1.0, 9.0], dtype=torch.float64)
    mask = torch.tensor([True, True, True, True, True, False])
    ids = torch.tensor([0, 0, 0, 1, 1, 1])
    expected = {
        "off": [1, 1, 1, 1, 1],
        "truncate": [2, 0.5, 3, 0.1, 1],
        "mask": [2, 0.5, 0, 0, 1],
        "sequence_truncate": [3, 3, 3, 0.1, 0.1],  # products 4 and 0.1
        "sequence_mask": [0, 0, 0, 0, 0],
        "geometric_mask": [2, 0.5, 2, 0, 0],  # means 1.587 and 0.316; a token is capped at 2
    }
    for correction, values in expected.items():
        cfg = AlgoConfig(correction=correction, correction_low=0.4, correction_high=3.0, veto_below=None)
        result = weights(ratios.log(), mask, ids, cfg)
        torch.testing.assert_close(result.weights_T, torch.tensor([*values, 1], dtype=torch.float64), **FLOAT64_EXP)
        assert not result.vetoed_T.any() and not result.corrected_T[5]
    assert result.corrected_T.tolist() == [False, False, True, True, True, False], "of geometric_mask"
    cfg = AlgoConfig(correction="truncate", correction_high=3.0, veto_below=0.2)
    vetoed = weights(ratios.log(), mask, ids, cfg)
    torch.testing.assert_close(vetoed.weights_T, torch.tensor([2, 0.5, 3, 0, 0, 1], dtype=torch.float64), **FLOAT64_EXP)
    assert vetoed.vetoed_T.tolist() == [False, False, False, True, True, False]
    assert vetoed.corrected_T.tolist() == [False, False, True, True, True, False]


def test_log_ratio_is_limited_and_masked_before_the_subtraction():
    infinite = float("-inf")
    ratio = log_ratio(
        torch.tensor([0.0, -100.0, infinite, -1.0]),
        torch.tensor([-100.0, 0.0, infinite, -1.5]),
        torch.tensor([True, True, False, True]),
    )
    assert ratio.tolist() == [100.0, -100.0, 0.0, 0.5]
    assert limited(ratio).tolist() == [20.0, -20.0, 0.0, 0.5]


def test_a_sequence_is_limited_after_its_sum():
    """Log ratios 30 and -29.5, of which each alone is beyond 20, are those of a sequence whose ratio is e^0.5."""
    log_ratios, ids = torch.tensor([30.0, -29.5, 19.0, 19.0], dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    cfg = AlgoConfig(correction="sequence_truncate", correction_high=1e12, veto_below=None)
    actual = weights(log_ratios, torch.ones(4, dtype=torch.bool), ids, cfg).weights_T
    expected = [math.exp(0.5)] * 2 + [math.exp(20)] * 2
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), **FLOAT64_EXP)
    cfg = AlgoConfig(correction="geometric_mask", correction_low=1.2, correction_high=1.3, veto_below=None)
    actual = weights(log_ratios, torch.ones(4, dtype=torch.bool), ids, cfg).weights_T
    torch.testing.assert_close(actual, torch.tensor([2, math.exp(-20), 0, 0], dtype=torch.float64), **FLOAT64_EXP)


def test_a_logprob_of_0_may_be_rounded_up():
    (batch,) = packed(random_samples(seed=4))
    (mb,) = with_logprobs(batch).microbatches
    almost = dataclasses.replace(mb, rollout_logprobs_T=torch.full_like(mb.rollout_logprobs_T, 1e-6))
    mismatch_metrics([dataclasses.replace(batch, microbatches=(almost,))], AlgoConfig(), LocalReducer())


@pytest.mark.parametrize("correction", ["truncate", "mask", "sequence_mask", "geometric_mask"])
def test_measured_bounds_enclose_1(correction):
    def bounds(noise: float, shift: float = 0.0) -> AlgoConfig:
        batch = with_logprobs(packed(random_samples(seed=6, count=30))[0], old_noise=noise)
        parts = tuple(dataclasses.replace(mb, old_logprobs_T=mb.old_logprobs_T + shift) for mb in batch.microbatches)
        cfg = AlgoConfig(correction=correction, correction_quantile=0.2, veto_below=None)
        return with_measured_bounds([dataclasses.replace(batch, microbatches=parts)], cfg, LocalReducer())

    is_mask = correction.endswith("mask")
    assert (bounds(0.0).correction_low, bounds(0.0).correction_high) == (float(is_mask), 1.0)
    lower, higher = bounds(0.3, shift=-5.0), bounds(0.3, shift=5.0)
    assert lower.correction_high == 1.0 and higher.correction_low == float(is_mask)
    assert math.exp(3) < higher.correction_high <= math.exp(20)
    assert (0 < lower.correction_low < math.exp(-3)) == is_mask


def test_without_a_quantile_or_loss_tokens_bounds_stay():
    (batch,) = (with_logprobs(batch) for batch in packed(random_samples(seed=6)))
    assert with_measured_bounds([batch], CFG, LocalReducer()) is CFG
    masked = tuple(dataclasses.replace(mb, loss_mask_T=mb.loss_mask_T & False) for mb in batch.microbatches)
    cfg = AlgoConfig(correction_quantile=0.1)
    assert with_measured_bounds([dataclasses.replace(batch, microbatches=masked)], cfg, LocalReducer()) is cfg
