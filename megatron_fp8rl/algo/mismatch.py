"""Train/rollout mismatch: importance weights and metrics, both without gradient.

mismatch_ratio = exp(old_logprobs - rollout_logprobs) is the importance weight of a token: 1 if engine (FP8 kernels,
possibly older weights) and trainer agree. :func:`weights` computes the factor that corrects the loss, and
:func:`with_measured_bounds` chooses its bounds. :func:`mismatch_metrics` measures the mismatch, names the worst
sequences and raises alarms.

Shapes: T = tokens of one packed microbatch, S = its sequences.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_fp8rl.algo.turns import turn_of_tokens
from megatron_fp8rl.config import AlgoConfig
from megatron_fp8rl.types import Microbatch, TrainBatch

# exp(20) = 5e8: a larger ratio carries no information, and float32 sums would overflow.
LOG_RATIO_LIMIT = 20.0
GEOMETRIC_CAP = 2.0  # cap of a token's weight with geometric_mask; the default cap of "truncate"
# A mean above its limit raises an alarm: at 0.5 nats, trainer and engine no longer compute the same policy.
_ALARM_LIMITS = {"mismatch/abs_logprob_diff/mean": 0.5, "mismatch/kl_k3/mean": 0.5}
# Rounding can raise a log-softmax at most 1e-6 above 0; a larger value is not a log-probability.
LOGPROB_TOLERANCE = 1e-3
_NUM_WORST = 5  # sequences that a report names

_REMEDY = (
    "Compare precision.trainer with precision.rollout, review precision.scales, check that the last publication was "
    "verified, or lower sampling.max_staleness"
)


class LogprobError(ValueError):
    """The log-probability of a loss token is NaN, infinite or above 0."""


class MismatchAlarm(RuntimeError):
    """The mismatch exceeds the configured thresholds. ``report`` has all measurements."""

    def __init__(self, report: MismatchReport):
        self.report = report
        super().__init__("; ".join(report.alarms))


class InexactError(RuntimeError):
    """A run with ``precision.exact`` has a token whose log-probability differs between trainer and engine."""


def require_exact(report: MismatchReport, explain: Callable[[str], str] | None = None) -> None:
    """Raise InexactError, naming the sequence that differs most, unless every log-probability is equal. Tokens that
    older weights sampled are not compared.

    ``explain`` returns the cause, which the error adds, for the sequence of a name.
    """
    worst = report.current
    if worst is None or worst.abs_logprob_diff_max == 0.0:
        return
    cause = f". {explain(worst.label)}" if explain is not None else ""
    raise InexactError(
        f"precision.exact: trainer and engine disagree by up to {worst.abs_logprob_diff_max:.3g} nats (mean "
        f"{worst.abs_logprob_diff_mean:.3g} over {worst.num_tokens} tokens), most in sequence {worst.label!r}. No "
        "weight was changed. Set "
        f"--precision.exact False to train with the correction of the mismatch instead{cause}"
    )


class Reducer(Protocol):
    """Gathers values over the data-parallel ranks; implemented by the trainer's ``Parallel``."""

    def gather(self, value: Any) -> list[Any]:
        """Collective: the values of all data-parallel ranks, in rank order, on every rank."""
        ...


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Importance weights of one microbatch, without gradient."""

    weights_T: Tensor  # float [T] factor of the token's loss; 0 drops the token; 1 outside the loss mask
    corrected_T: Tensor  # bool [T] capped or dropped, by a bound or by the veto
    vetoed_T: Tensor  # bool [T] the sequence has a token whose ratio is below the veto threshold


@dataclass(frozen=True, kw_only=True)
class MismatchSlice:
    """Mismatch over a subset of the tokens."""

    label: str  # an environment, a range of completion positions such as "4-7", or Rollout.name
    num_tokens: int
    abs_logprob_diff_mean: float
    abs_logprob_diff_max: float
    kl_k3_mean: float
    ratio_min: float
    ratio_max: float


@dataclass(frozen=True, kw_only=True)
class MismatchReport:
    """Mismatch over one global batch; identical on every rank."""

    metrics: dict[str, float]  # flat keys what/name/reduce; empty if there are no loss tokens
    by_position: tuple[MismatchSlice, ...]  # completion positions in ranges of doubling length, ascending
    by_environment: tuple[MismatchSlice, ...]  # by name
    by_turn: tuple[MismatchSlice, ...]  # by the turn's number in its trajectory, from 1
    worst: tuple[MismatchSlice, ...]  # sequences with the largest mean |old - rollout|, worst first
    alarms: tuple[str, ...]  # one message per exceeded threshold
    current: MismatchSlice | None = None  # tokens that the current weights sampled, named after their worst sequence
    fraction_stale: float = 0.0  # of the tokens: older weights sampled them


def log_ratio(numerator_T: Tensor, denominator_T: Tensor, mask_T: Tensor) -> Tensor:
    """Log of a probability ratio, [T]; 0 where the mask is False. Masks before the subtraction: padding may hold -inf,
    and ``0 * inf`` is NaN in values and gradients."""
    return torch.where(mask_T, numerator_T, 0.0) - torch.where(mask_T, denominator_T, 0.0)


def limited(log_ratio: Tensor) -> Tensor:
    """Clamp to +-20 before ``exp``. Clamp sequence sums after summing, because their terms may cancel."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_sum(values_T: Tensor, sequence_ids_T: Tensor, num_sequences: int) -> Tensor:
    """Sum per sequence, [S]; differentiable."""
    return values_T.new_zeros(num_sequences).index_add(0, sequence_ids_T, values_T)


@torch.no_grad()
def weights(
    log_ratio_T: Tensor, mask_T: Tensor, sequence_ids_T: Tensor, cfg: AlgoConfig, *, num_sequences: int | None = None
) -> Correction:
    """Importance weights that correct the loss for sampling from a different policy.

    ``log_ratio_T`` [T] is old - rollout, 0 outside ``mask_T``; ``sequence_ids_T`` [T] starts at 0. With r the token's
    ratio, R = prod r and G = R^(1/length) of its sequence, the values of ``cfg.correction`` are

    ==================  =====================================  ================================================
    off                 1                                      no correction and no veto
    truncate            min(r, high)                           TIS: Yao et al. 2025, Ionides 2008
    mask                r if low <= r <= high else 0           IcePop (arXiv 2510.18855), token-level MIS
    sequence_truncate   min(R, high)                           sequence-level TIS; unbiased as high grows
    sequence_mask       R if low <= R <= high else 0           MIS: Liu et al. 2025
    geometric_mask      min(r, 2) if low <= G <= high else 0   length-free trust region, e.g. 0.999 to 1.002
    ==================  =====================================  ================================================

    The bounds of geometric_mask are too narrow for token weights, whose cap is a constant. ``cfg.veto_below`` drops
    every sequence with an r below it: engine and trainer did not compute the same function.
    """
    if num_sequences is None:
        num_sequences = int(sequence_ids_T.max()) + 1
    if cfg.correction == "off":
        nothing_T = torch.zeros_like(mask_T)
        return Correction(weights_T=torch.ones_like(log_ratio_T), corrected_T=nothing_T, vetoed_T=nothing_T)

    log_ratio_T = torch.where(mask_T, log_ratio_T, 0.0)
    token_T = limited(log_ratio_T).exp()
    total_S = sequence_sum(log_ratio_T, sequence_ids_T, num_sequences)
    length_S = sequence_sum(mask_T.to(log_ratio_T.dtype), sequence_ids_T, num_sequences).clamp(min=1)
    sequence_T = limited(total_S).exp()[sequence_ids_T]
    geometric_T = limited(total_S / length_S).exp()[sequence_ids_T]

    factor_T = sequence_T if cfg.correction.startswith("sequence") else token_T
    bounded_T = geometric_T if cfg.correction == "geometric_mask" else factor_T
    outside_T = bounded_T > cfg.correction_high
    if cfg.correction.endswith("truncate"):
        corrected_weights_T = factor_T.clamp(max=cfg.correction_high)
    else:
        outside_T = (bounded_T < cfg.correction_low) | outside_T
        corrected_weights_T = torch.where(outside_T, 0.0, factor_T)
    if cfg.correction == "geometric_mask":
        outside_T = outside_T | (corrected_weights_T > GEOMETRIC_CAP)
        corrected_weights_T = corrected_weights_T.clamp(max=GEOMETRIC_CAP)

    vetoed_T = torch.zeros_like(mask_T)
    if cfg.veto_below is not None:
        extreme_T = (mask_T & (token_T < cfg.veto_below)).to(log_ratio_T.dtype)
        vetoed_T = (sequence_sum(extreme_T, sequence_ids_T, num_sequences) > 0)[sequence_ids_T]
    return Correction(
        weights_T=torch.where(mask_T, torch.where(vetoed_T, 0.0, corrected_weights_T), 1.0),
        corrected_T=(outside_T | vetoed_T) & mask_T,
        vetoed_T=vetoed_T & mask_T,
    )


def with_measured_bounds(batches: Sequence[TrainBatch], cfg: AlgoConfig, reducer: Reducer) -> AlgoConfig:
    """Collective: ``cfg`` with bounds that exclude the fraction ``cfg.correction_quantile`` of the batches' ratios,
    equal on all ranks and for any number of ranks. Without a quantile or loss tokens, ``cfg`` itself.

    A mask excludes half of the fraction at each side. The bounds enclose 1, the weight of a token on which trainer and
    engine agree. They are numpy's quantiles of what ``cfg.correction`` bounds: old - rollout of tokens, or its sum
    (sequence_*) or mean (geometric_mask) over a sequence. The batches need ``old_logprobs_T``.
    """
    if cfg.correction_quantile is None:
        return cfg
    own = [_bounded(mb, cfg.correction) for batch in batches for mb in batch.microbatches]
    everywhere = reducer.gather(torch.cat(own).cpu().numpy())
    values = np.concatenate(everywhere).astype(np.float64).clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if not values.size:
        return cfg
    is_mask = cfg.correction.endswith("mask")
    tail = cfg.correction_quantile / (2 if is_mask else 1)
    low, high = np.quantile(values, (tail, 1 - tail))
    return replace(
        cfg, correction_low=math.exp(min(low, 0.0)) if is_mask else 0.0, correction_high=math.exp(max(high, 0.0))
    )


def _bounded(mb: Microbatch, correction: str) -> Tensor:
    """Logs of the ratios that ``correction`` bounds: one per loss token, or one per sequence that has any."""
    assert mb.old_logprobs_T is not None
    mask_T = mb.loss_mask_T
    log_ratio_T = log_ratio(mb.old_logprobs_T, mb.rollout_logprobs_T, mask_T)
    if correction in ("truncate", "mask"):
        return log_ratio_T[mask_T]
    total_S, length_S = (sequence_sum(x.double(), mb.sequence_ids_T, len(mb.names)) for x in (log_ratio_T, mask_T))
    return (total_S / length_S if correction == "geometric_mask" else total_S)[length_S > 0]


def mismatch_metrics(batches: Sequence[TrainBatch], cfg: AlgoConfig, reducer: Reducer) -> MismatchReport:
    """Collective: compare old with rollout log-probabilities over the loss tokens of all ranks, before any update.

    With d = old - rollout and w = exp(d); the rollout policy sampled the tokens, so KL means KL(rollout || old):

        abs_logprob_diff        |d|                     kl_k1       -d
        multiplicative_error    exp|d|                  kl_k3       w - 1 - d
        effective_sample_size   (sum w)^2 / (n sum w^2), a fraction of the tokens
        chi_square              mean w^2 - 1            ratio       w

    Log ratios are clamped to +-20 in w, never in d. The batches need ``old_logprobs_T``.

    Raises (on every rank):
        LogprobError: names tensor, sequence and token.
        MismatchAlarm: a mean is above its limit and ``cfg.alarm_action`` is "stop"; with "warn" see ``report.alarms``.
    """
    statistics = _RankStatistics()
    for batch in batches:
        for mb in batch.microbatches:
            statistics.add(mb, cfg)
    ranks = reducer.gather(statistics)
    if broken := [message for rank in ranks for message in rank.broken]:
        raise LogprobError("; ".join(broken[:_NUM_WORST]))

    def worst_first(parts: Iterable[list[tuple[str, _Sums]]]) -> list[tuple[str, _Sums]]:
        return sorted(itertools.chain(*parts), key=lambda entry: (-entry[1].abs_diff / entry[1].num, entry[0]))

    sequences, current = worst_first(r.sequences for r in ranks), worst_first(r.current for r in ranks)
    worst = tuple(sums.slice(name) for name, sums in sequences[:_NUM_WORST])
    compared = _Sums.merged(sums for _, sums in current)

    def slices(name: str, label: Callable[[Any], str] = str) -> tuple[MismatchSlice, ...]:
        merged = _merge_by_key([getattr(rank, name) for rank in ranks])
        return tuple(sums.slice(label(key)) for key, sums in merged.items())

    total = _Sums.merged(rank.total for rank in ranks)
    metrics = total.metrics()
    report = MismatchReport(
        metrics=metrics,
        by_position=slices("positions", _position_label),
        by_turn=slices("turns"),
        by_environment=slices("environments"),
        worst=worst,
        current=compared.slice(current[0][0]) if current else None,
        fraction_stale=1 - compared.num / max(1, total.num),
        alarms=_alarms(metrics, worst),
    )
    if report.alarms and cfg.alarm_action == "stop":
        raise MismatchAlarm(report)
    return report


@dataclass
class _Sums:
    """Sums over tokens in float64, and extrema."""

    num: int = 0
    diff: float = 0.0
    abs_diff: float = 0.0
    abs_diff_max: float = 0.0
    k3: float = 0.0
    multiplicative: float = 0.0
    ratio: float = 0.0
    ratio_square: float = 0.0
    ratio_min: float = float("inf")
    ratio_max: float = 0.0
    corrected: int = 0
    vetoed: int = 0

    @classmethod
    def of(cls, diff: Tensor, corrected: Tensor, vetoed: Tensor) -> _Sums:
        """Sums over tokens with differences ``diff`` (float64, not empty)."""
        limited = diff.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        ratio = limited.exp()
        return cls(
            num=diff.numel(),
            diff=diff.sum().item(),
            abs_diff=diff.abs().sum().item(),
            abs_diff_max=diff.abs().max().item(),
            k3=(torch.expm1(limited) - limited).sum().item(),
            multiplicative=limited.abs().exp().sum().item(),
            ratio=ratio.sum().item(),
            ratio_square=ratio.square().sum().item(),
            ratio_min=ratio.min().item(),
            ratio_max=ratio.max().item(),
            corrected=int(corrected.sum()),
            vetoed=int(vetoed.sum()),
        )

    @classmethod
    def merged(cls, parts: Iterable[_Sums]) -> _Sums:
        result = cls()
        for part in parts:
            for name, value in vars(part).items():
                combine = {"abs_diff_max": max, "ratio_max": max, "ratio_min": min}.get(name, lambda a, b: a + b)
                setattr(result, name, combine(getattr(result, name), value))
        return result

    def slice(self, label: str) -> MismatchSlice:
        return MismatchSlice(
            label=label,
            num_tokens=self.num,
            abs_logprob_diff_mean=self.abs_diff / self.num,
            abs_logprob_diff_max=self.abs_diff_max,
            kl_k3_mean=self.k3 / self.num,
            ratio_min=self.ratio_min,
            ratio_max=self.ratio_max,
        )

    def metrics(self) -> dict[str, float]:
        if self.num == 0:
            return {}
        return {
            "mismatch/abs_logprob_diff/mean": self.abs_diff / self.num,
            "mismatch/abs_logprob_diff/max": self.abs_diff_max,
            "mismatch/kl_k1/mean": -self.diff / self.num,
            "mismatch/kl_k3/mean": self.k3 / self.num,
            "mismatch/multiplicative_error/mean": self.multiplicative / self.num,
            "mismatch/effective_sample_size/mean": self.ratio**2 / (self.num * self.ratio_square),
            "mismatch/chi_square/mean": self.ratio_square / self.num - 1,
            "mismatch/ratio/mean": self.ratio / self.num,
            "mismatch/ratio/max": self.ratio_max,
            "mismatch/ratio/min": self.ratio_min,
            "mismatch/fraction_corrected/mean": self.corrected / self.num,
            "mismatch/fraction_vetoed/mean": self.vetoed / self.num,
        }


@dataclass
class _RankStatistics:
    """Statistics of one rank; small and picklable."""

    total: _Sums = field(default_factory=_Sums)
    positions: dict[int, _Sums] = field(default_factory=dict)
    environments: dict[str, _Sums] = field(default_factory=dict)
    turns: dict[int, _Sums] = field(default_factory=dict)
    sequences: list[tuple[str, _Sums]] = field(default_factory=list)
    current: list[tuple[str, _Sums]] = field(default_factory=list)  # tokens that the current weights sampled
    broken: list[str] = field(default_factory=list)

    def add(self, mb: Microbatch, cfg: AlgoConfig) -> None:
        if mb.old_logprobs_T is None:
            raise ValueError("mismatch metrics need old_logprobs_T: call Policy.with_old_logprobs first")
        if broken := _no_logprobs(mb):
            self.broken += broken
            return
        mask_T = mb.loss_mask_T
        if not mask_T.any():
            return
        ratio_T = log_ratio(mb.old_logprobs_T, mb.rollout_logprobs_T, mask_T)
        correction = weights(ratio_T, mask_T, mb.sequence_ids_T, cfg, num_sequences=len(mb.names))
        # Compact and move to the host in float64, because many small reductions follow.
        diff = (mb.old_logprobs_T[mask_T].double() - mb.rollout_logprobs_T[mask_T].double()).cpu()
        corrected, vetoed = correction.corrected_T[mask_T].cpu(), correction.vetoed_T[mask_T].cpu()
        ids, positions = mb.sequence_ids_T[mask_T].cpu(), mb.completion_positions_T[mask_T].cpu()
        stale = torch.zeros_like(ids, dtype=torch.bool) if mb.stale_T is None else mb.stale_T[mask_T].cpu()
        buckets = torch.frexp(positions.double()).exponent  # 0 -> 0, 1 -> 1, 2..3 -> 2, 4..7 -> 3

        def sums_of(chosen: Tensor | slice) -> _Sums:
            return _Sums.of(diff[chosen], corrected[chosen], vetoed[chosen])

        self.total = _Sums.merged([self.total, sums_of(slice(None))])
        for bucket in buckets.unique().tolist():
            self.positions = _merge_by_key([self.positions, {bucket: sums_of(buckets == bucket)}])
        turns = turn_of_tokens(mb.loss_mask_T, mb.sequence_ids_T)[mask_T].cpu()
        for turn in turns.unique().tolist():
            self.turns = _merge_by_key([self.turns, {turn: sums_of(turns == turn)}])
        for index in ids.unique().tolist():
            part = sums_of(ids == index)
            self.sequences.append((mb.names[index], part))
            is_current = (ids == index) & ~stale
            if is_current.any():
                self.current.append((mb.names[index], sums_of(is_current)))
            self.environments = _merge_by_key([self.environments, {mb.environments[index]: part}])


def _no_logprobs(mb: Microbatch) -> list[str]:
    """One message per tensor with a NaN or infinity under the loss mask, or with an engine value above 0."""
    messages = []
    for name, values_T in (("rollout_logprobs", mb.rollout_logprobs_T), ("old_logprobs", mb.old_logprobs_T)):
        assert values_T is not None
        bad_T = ~torch.isfinite(values_T)
        if name == "rollout_logprobs":  # old_logprobs come from the trainer
            bad_T = bad_T | (values_T > LOGPROB_TOLERANCE)
        bad = (mb.loss_mask_T & bad_T).nonzero().flatten()
        if bad.numel():
            t = int(bad[0])
            messages.append(
                f"{name} of {mb.names[int(mb.sequence_ids_T[t])]} is {values_T[t].item()} at completion token "
                f"{int(mb.completion_positions_T[t])} (token id {int(mb.targets_T[t])}; {bad.numel()} such tokens in "
                "its microbatch)"
            )
    return messages


def _merge_by_key(parts: Sequence[dict]) -> dict:
    keys = sorted({key for part in parts for key in part})
    return {key: _Sums.merged(part[key] for part in parts if key in part) for key in keys}


def _position_label(bucket: int) -> str:
    first, last = (0, 0) if bucket == 0 else (2 ** (bucket - 1), 2**bucket - 1)
    return str(first) if first == last else f"{first}-{last}"


def _alarms(metrics: dict[str, float], worst: Sequence[MismatchSlice]) -> tuple[str, ...]:
    return tuple(
        f"{key} is {metrics[key]:.4g}, above {limit:g}; worst is {worst[0].label} with a mean "
        f"|old - rollout| of {worst[0].abs_logprob_diff_mean:.4g}. {_REMEDY}"
        for key, limit in _ALARM_LIMITS.items()
        if metrics.get(key, 0.0) > limit
    )
