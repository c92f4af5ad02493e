"""The disagreement between the policy that sampled and the policy that trains: its correction and its measurement.

    mismatch_ratio = exp(old_logprobs - rollout_logprobs)

is the importance weight of a token: 1 when the engine (FP8 kernels, KV cache, perhaps older weights) and the trainer give
the sampled token the same probability. :func:`weights` turns it into the factor that corrects the loss;
:func:`mismatch_metrics` measures it, names the worst sequences and raises the alarm. Neither carries a gradient.

Runs in the trainer, on every rank; tensors of one microbatch in, sums over ranks through a :class:`Reducer`.

Shapes: T = tokens of one packed microbatch, S = its sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fp8rl.config import AlgoConfig

# exp(20) = 5e8: beyond it a ratio only says "unrelated", and float32 sums would overflow.
LOG_RATIO_LIMIT = 20.0


class NonFiniteLogprobError(ValueError):
    """A log-probability of a trained token that is NaN or infinite."""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Importance weights of one microbatch, without gradient."""

    weights_T: Tensor  # float [T] factor of the token's loss; 0 drops it; 1 outside the loss mask
    corrected_T: Tensor  # bool [T] capped or dropped, by a bound or by the veto
    vetoed_T: Tensor  # bool [T] the sequence has a token whose ratio is below the veto


def log_ratio(numerator_T: Tensor, denominator_T: Tensor, mask_T: Tensor) -> Tensor:
    """Log of a probability ratio, [T], within +-20, and 0 where the mask is False.

    The mask acts before the subtraction: padding may hold -inf, and ``0 * inf`` is NaN in values and in gradients.
    """
    difference = torch.where(mask_T, numerator_T, 0.0) - torch.where(mask_T, denominator_T, 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_sum(values_T: Tensor, sequence_ids_T: Tensor, num_sequences: int) -> Tensor:
    """Sum per sequence, [S], differentiable."""
    return values_T.new_zeros(num_sequences).index_add(0, sequence_ids_T, values_T)


@torch.no_grad()
def weights(
    log_ratio_T: Tensor, mask_T: Tensor, sequence_ids_T: Tensor, cfg: AlgoConfig, *, num_sequences: int | None = None
) -> Correction:
    """Importance weights that correct the loss for having sampled with another policy.

    ``log_ratio_T`` [T] is old - rollout, 0 outside ``mask_T``; ``sequence_ids_T`` [T] counts from 0. With r the token's
    ratio, R = prod r and G = R^(1/length) of its sequence, the choices of ``cfg.correction`` are

    ==================  =====================================  ================================================
    off                 1                                      nothing is corrected and nothing vetoed
    truncate            min(r, high)                           TIS: Yao et al. 2025, Ionides 2008
    mask                r if low <= r <= high else 0           IcePop (arXiv 2510.18855), token-level MIS
    sequence_truncate   min(R, high)                           sequence-level TIS; unbiased as high grows
    sequence_mask       R if low <= R <= high else 0           MIS: Liu et al. 2025
    geometric_mask      r if low <= G <= high else 0           length-free trust region, e.g. 0.999 to 1.002
    ==================  =====================================  ================================================

    ``cfg.veto_below`` drops a whole sequence in which any r is below it: one such token says that the engine computed
    something else than the trainer.
    """
    if num_sequences is None:
        num_sequences = int(sequence_ids_T.max()) + 1
    if cfg.correction == "off":
        nothing_T = torch.zeros_like(mask_T)
        return Correction(weights_T=torch.ones_like(log_ratio_T), corrected_T=nothing_T, vetoed_T=nothing_T)

    log_ratio_T = torch.where(mask_T, log_ratio_T, 0.0)
    token_T = log_ratio_T.exp()
    total_S = sequence_sum(log_ratio_T, sequence_ids_T, num_sequences)
    length_S = sequence_sum(mask_T.to(log_ratio_T.dtype), sequence_ids_T, num_sequences).clamp(min=1)
    sequence_T = total_S.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()[sequence_ids_T]
    geometric_T = (total_S / length_S).exp()[sequence_ids_T]

    factor_T = sequence_T if cfg.correction.startswith("sequence") else token_T
    judged_T = geometric_T if cfg.correction == "geometric_mask" else factor_T
    if cfg.correction.endswith("truncate"):
        outside_T = judged_T > cfg.correction_high
        corrected_weights_T = factor_T.clamp(max=cfg.correction_high)
    else:
        outside_T = (judged_T < cfg.correction_low) | (judged_T > cfg.correction_high)
        corrected_weights_T = torch.where(outside_T, 0.0, factor_T)

    vetoed_T = torch.zeros_like(mask_T)
    if cfg.veto_below is not None:
        extreme_T = (mask_T & (token_T < cfg.veto_below)).to(log_ratio_T.dtype)
        vetoed_T = (sequence_sum(extreme_T, sequence_ids_T, num_sequences) > 0)[sequence_ids_T]
    return Correction(
        weights_T=torch.where(mask_T, torch.where(vetoed_T, 0.0, corrected_weights_T), 1.0),
        corrected_T=(outside_T | vetoed_T) & mask_T,
        vetoed_T=vetoed_T & mask_T,
    )
