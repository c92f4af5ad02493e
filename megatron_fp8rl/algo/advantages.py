"""Advantage functions; each one is a value of ``algo.advantage``.

    (rewards, **options) -> advantages

``rewards`` are those of a prompt's completions, after the overlong rule; the result has a finite advantage for each.
``algo.advantage_options`` sets ``options``. Functions must be pure, because every rank computes the same advantages. A
user-defined function is ``module:function``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

_STD_EPS = 1e-6


def grpo(rewards: Sequence[float]) -> list[float]:
    """(reward - mean) / (std + 1e-6), with the sample standard deviation; 0 for equal rewards. arXiv 2402.03300."""
    if len(set(rewards)) < 2:  # the mean of equal numbers may differ from them by rounding errors
        return [0.0] * len(rewards)
    deviations = dr_grpo(rewards)
    scale = math.sqrt(math.fsum(d * d for d in deviations) / (len(rewards) - 1)) + _STD_EPS
    return [deviation / scale for deviation in deviations]


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """reward - mean; 0 for equal rewards. Dr.GRPO, arXiv 2503.20783."""
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    return [reward - mean for reward in rewards]
