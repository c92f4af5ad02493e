"""pass@k against enumeration and exact fractions; intervals against published values and by simulation."""

from fractions import Fraction
from itertools import combinations
from math import comb

import numpy as np
import pytest
from scipy.stats import bootstrap

from megatron_fp8rl.algo.pass_at_k import (
    Estimate,
    accuracy,
    design_effect,
    difference,
    pass_at_k,
    pass_at_ks,
    powers_of_two,
    wilson,
)


def test_it_is_the_share_of_subsets_with_a_passing_completion():
    for n in range(1, 9):
        for c in range(n + 1):
            completions = [True] * c + [False] * (n - c)
            for k in range(1, n + 1):
                subsets = list(combinations(completions, k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-14)


def test_it_is_the_formula_of_the_paper_in_exact_fractions_also_where_binomials_overflow_floats():
    for n, k in ((200, 1), (200, 100), (1000, 10), (10_000, 5_000), (10_000, 9_999)):
        for c in (0, 1, 2, n // 100, n // 2, n - k, n - k + 1, n - 1, n):
            exact = 1 - Fraction(comb(n - c, k), comb(n, k))
            assert pass_at_k(n, c, k) == pytest.approx(float(exact), rel=1e-11, abs=1e-15), (n, c, k)


def test_it_has_no_bias_where_the_obvious_estimate_has():
    """Over all outcomes of n trials of probability p, weighted exactly: the expectation is 1 - (1 - p)^k."""
    n, k, p = 6, 4, Fraction(3, 10)
    outcomes = [(c, comb(n, c) * p**c * (1 - p) ** (n - c)) for c in range(n + 1)]
    truth = float(1 - (1 - p) ** k)
    assert sum(pass_at_k(n, c, k) * float(weight) for c, weight in outcomes) == pytest.approx(truth, abs=1e-14)
    obvious = sum((1 - (1 - c / n) ** k) * float(weight) for c, weight in outcomes)
    assert obvious < truth - 0.03


@pytest.mark.parametrize(("n", "c", "k"), [(4, 2, 5), (4, 2, 0), (4, 5, 1), (4, -1, 1), (0, 0, 1)])
def test_impossible_counts_are_refused(n, c, k):
    with pytest.raises(ValueError, match="completions"):
        pass_at_k(n, c, k)


def test_wilson_agrees_with_published_intervals():
    """Newcombe, Statistics in Medicine 17 (1998), table I, method 3."""
    for successes, trials, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        actual = wilson(successes, trials)
        assert (round(actual.low, 4), round(actual.high, 4)) == (low, high)
    assert wilson(20, 20).high == 1.0


def test_accuracy_of_single_completions_is_wilsons_and_equal_completions_count_once():
    assert accuracy([(1, 1)] * 30 + [(1, 0)] * 70) == wilson(30, 100)
    actual = accuracy([(8, 8)] * 30 + [(8, 0)] * 70)
    assert (actual.low, actual.high) == pytest.approx((wilson(30, 100).low, wilson(30, 100).high))


def test_the_design_effect_is_1_for_independent_and_m_for_equal_completions():
    rng = np.random.default_rng(3)
    independent = [(8, int(c)) for c in rng.binomial(8, 0.4, size=4000)]
    assert design_effect(independent) == pytest.approx(1.0, abs=0.1)
    assert design_effect([(8, 8), (8, 0), (8, 0), (8, 8)]) == pytest.approx(8.0)
    assert design_effect([(8, 0)] * 5) == 8.0, "nothing but failures says nothing of resemblance"
    assert design_effect([(8, 3)]) == 8.0


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    """Problems of Beta(1, 2) difficulty: accuracy 1/3, pass@4 = 1 - B(1, 6) / B(1, 2) = 2/3."""
    rng = np.random.default_rng(11)
    hits = {"accuracy": 0, "pass@4": 0}
    num_tries = 100
    for _ in range(num_tries):
        counts = [(8, int(rng.binomial(8, p))) for p in rng.beta(1, 2, size=60)]
        actual = {"accuracy": accuracy(counts), "pass@4": pass_at_ks(counts, [4])[4]}
        for name, truth in (("accuracy", 1 / 3), ("pass@4", 2 / 3)):
            hits[name] += actual[name].low <= truth <= actual[name].high
    assert all(0.88 <= hit / num_tries <= 1.0 for hit in hits.values()), hits


def test_estimates_over_problems_are_means_and_repeat_exactly():
    counts = [(8, 0), (8, 1), (8, 4), (8, 8), (8, 2)]
    actual = pass_at_ks(counts, (1, 4, 8))
    assert actual[1].value == pytest.approx(accuracy(counts).value) == pytest.approx(15 / 40)
    assert actual[8].value == pytest.approx(4 / 5)
    assert all(value.low < value.value < value.high for value in actual.values())
    assert actual == pass_at_ks(counts, (1, 4, 8))
    assert actual[4] == pass_at_ks(counts, (4,))[4], "other k do not change an interval"


def test_problems_that_all_agree_get_no_interval_of_width_zero():
    assert pass_at_ks([(4, 0)] * 20, (2,))[2] == wilson(0, 20)
    assert pass_at_ks([(4, 4)] * 20, (2,))[2] == wilson(20, 20)


def test_default_ks():
    assert [powers_of_two(n) for n in (1, 2, 6, 8)] == [(1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8)]


def test_a_difference_of_single_runs_is_the_bootstrap_of_paired_differences():
    generator = np.random.default_rng(0)
    first = generator.binomial(4, 0.3, size=300) / 4
    second = np.clip(first + generator.choice([0, 0, 0.25], size=300), 0, 1)
    actual = difference([first], [second])
    theirs = bootstrap((second - first,), np.mean, rng=generator, method="percentile").confidence_interval
    assert actual.value == pytest.approx((second - first).mean())
    assert (actual.low, actual.high) == pytest.approx((theirs.low, theirs.high), abs=0.002)
    assert actual == difference([first], [second])
    assert difference([first], [first]) == Estimate(value=0.0, low=0.0, high=0.0)


def test_seeds_widen_a_difference():
    """Two runs with one rate each: the interval of their mean reaches from the worst to the best pair of draws."""
    actual = difference([[0.2] * 50, [0.4] * 50], [[0.5] * 50])
    assert actual.value == pytest.approx(0.2)
    assert (actual.low, actual.high) == pytest.approx((0.1, 0.3))


@pytest.mark.parametrize("second", [[], [[]], [[1.0]]])
def test_a_difference_needs_the_same_problems(second):
    with pytest.raises(ValueError, match="of the same problems are needed"):
        difference([[1.0, 0.0]], second)
