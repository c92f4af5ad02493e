"""Accuracy and pass@k of sampled completions, with 95 % intervals. Pure.

With n >= k completions, c of them passing, the unbiased estimate of pass@k is the fraction of k-subsets with a passing
completion, 1 - C(n - c, k) / C(n, k) (Chen et al., arXiv:2107.03374, section 2.1). 1 - (1 - c/n)^k is biased low.

The intervals cover the choice of problems and the sampling of completions, which are correlated within a problem:

    accuracy   Wilson score interval over n / (1 + (m - 1) rho) trials, with m completions per problem and their
               intraclass correlation rho (analysis-of-variance estimator)
    difference percentile bootstrap that draws problems, the same for both sides, and the seeds of each side
    pass@k     percentile bootstrap of the mean over problems, with a fixed seed. If all problems agree on 0 or 1, the
               bootstrap is uninformative, and the Wilson interval over the problems is used instead
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
NUM_RESAMPLES = 10_000
_Z = 1.959963984540054  # quantile (1 + CONFIDENCE) / 2 of the normal distribution
_SEED = 20210707
_RESAMPLES_AT_ONCE = 500  # bounds the memory of the resampled values [resamples, problems, ks]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A proportion, or a difference of proportions, and its 95 % interval."""

    value: float
    low: float
    high: float


def pass_at_k(num_completions: int, num_passed: int, k: int) -> float:
    """Unbiased estimate for one problem, as a product of factors between 0 and 1, which cannot overflow. Raises
    ValueError if k is not in 1..num_completions, or for invalid counts."""
    if not 0 <= num_passed <= num_completions:
        raise ValueError(f"{num_passed} of {num_completions} completions passed: not a count")
    if not 1 <= k <= num_completions:
        raise ValueError(
            f"pass@{k} needs at least {max(k, 1)} completions of a problem, and k >= 1; there are {num_completions}"
        )
    none_passes = 1.0
    for i in range(num_completions - num_passed + 1, num_completions + 1):
        none_passes *= max(0.0, 1.0 - k / i)
    return 1.0 - none_passes


def wilson(successes: float, trials: float) -> Estimate:
    """A proportion with its Wilson score interval; raises ValueError without trials. Both numbers may be fractional,
    unlike those of ``scipy.stats.binomtest``."""
    if trials <= 0:
        raise ValueError(f"a proportion of {trials} trials")
    share = successes / trials
    center = (share + _Z**2 / (2 * trials)) / (1 + _Z**2 / trials)
    reach = _Z / (1 + _Z**2 / trials) * math.sqrt(share * (1 - share) / trials + _Z**2 / (4 * trials**2))
    # At the ends the formula gives 0 and 1 up to rounding.
    low = 0.0 if share == 0 else max(0.0, center - reach)
    high = 1.0 if share == 1 else min(1.0, center + reach)
    return Estimate(value=share, low=low, high=high)


def accuracy(counts: Sequence[tuple[int, int]]) -> Estimate:
    """Fraction of passed completions, from (completions, passed) per problem, with equal weight for all problems."""
    sampled, passed = _columns(counts)
    share = float(np.mean(passed / sampled))
    trials = sampled.sum() / design_effect(counts)
    return wilson(share * trials, float(trials))


def design_effect(counts: Sequence[tuple[int, int]]) -> float:
    """Variance inflation by correlation within problems, 1 + (m - 1) rho: 1 for independent completions, m for
    identical ones. If all completions of all problems agree, rho is 1."""
    sampled, passed = _columns(counts)
    total, problems = sampled.sum(), len(sampled)
    if total == problems:
        return 1.0
    size = (total - (sampled**2).sum() / total) / (problems - 1) if problems > 1 else total / problems
    if problems == 1 or passed.sum() in (0, total):
        return float(total / problems)
    rates = passed / sampled
    between = (sampled * (rates - passed.sum() / total) ** 2).sum() / (problems - 1)
    within = (passed * (1 - rates)).sum() / (total - problems)
    rho = (between - within) / (between + (size - 1) * within)
    return float(1 + (total / problems - 1) * min(1.0, max(0.0, rho)))


def pass_at_ks(counts: Sequence[tuple[int, int]], ks: Sequence[int]) -> dict[int, Estimate]:
    """pass@k over problems for every k, from (completions, passed) per problem. Deterministic. Raises ValueError if a
    problem has fewer completions than a k."""
    table = np.array([[pass_at_k(n, c, k) for k in ks] for n, c in counts])  # [problems, ks]
    if not table.size:
        raise ValueError("pass@k of no problems or no k")
    low, high = _interval_of_means(table)
    estimates = {}
    for column, k in enumerate(ks):
        value = float(table[:, column].mean())
        if value in (0.0, 1.0):
            estimates[k] = wilson(value * len(table), len(table))
        else:
            estimates[k] = Estimate(value=value, low=float(low[column]), high=float(high[column]))
    return estimates


def difference(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> Estimate:
    """Mean of second minus first, each [seeds, problems], with the interval of the paired bootstrap. Deterministic.

    Rows are runs with different seeds; columns are the same problems on both sides. Raises ValueError for other shapes.
    """
    sides = [np.array(side, dtype=np.float64) for side in (first, second)]
    if any(side.ndim != 2 or not side.size for side in sides) or sides[0].shape[1] != sides[1].shape[1]:
        raise ValueError(f"[seeds, problems] of the same problems are needed, not {[side.shape for side in sides]}")
    rng, num_problems = np.random.default_rng(_SEED), sides[0].shape[1]
    drawn = []
    for _ in range(NUM_RESAMPLES // _RESAMPLES_AT_ONCE):
        problems = rng.multinomial(num_problems, np.full(num_problems, 1 / num_problems), size=_RESAMPLES_AT_ONCE)
        means = []
        for side in sides:
            seeds = rng.multinomial(len(side), np.full(len(side), 1 / len(side)), size=_RESAMPLES_AT_ONCE)
            means.append(np.einsum("ds,dp,sp->d", seeds, problems, side, optimize=True) / (len(side) * num_problems))
        drawn.append(means[1] - means[0])
    low, high = np.quantile(np.concatenate(drawn), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(value=float(sides[1].mean() - sides[0].mean()), low=float(low), high=float(high))


def powers_of_two(num_completions: int) -> tuple[int, ...]:
    """1, 2, 4, ... and the number itself: the default values of k."""
    powers = (1 << exponent for exponent in range(num_completions.bit_length()))
    return tuple(sorted({*powers, num_completions}))


def _interval_of_means(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(low, high), float64 [ks], of the mean over problems."""
    if len(table) == 1:  # nothing to resample
        return table[0], table[0]
    from scipy.stats import bootstrap  # takes a second to import

    how = dict(n_resamples=NUM_RESAMPLES, confidence_level=CONFIDENCE, method="percentile", batch=_RESAMPLES_AT_ONCE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # columns in which all problems agree; their interval is that value
        interval = bootstrap((table,), np.mean, axis=0, rng=np.random.default_rng(_SEED), **how).confidence_interval
    return interval.low, interval.high


def _columns(counts: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """(completions, passed) as float64 [problems]."""
    if not counts:
        raise ValueError("accuracy of no problems")
    sampled, passed = np.array(counts, dtype=np.float64).T
    if (sampled < 1).any():
        raise ValueError(f"problem {int(np.argmin(sampled))} has no completions")
    return sampled, passed
