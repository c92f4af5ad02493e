"""Building blocks of losses (algo/losses.py and user-defined losses).

Three policies; a name always says whose log-probabilities it holds:

    rollout   the engine that sampled the tokens (FP8 kernels, possibly older weights)
    old       the trainer's weights at the start of the step, with the trainer's kernels
    trainer   the weights being updated, the only policy with a gradient

    mismatch_ratio = exp(old - rollout)    no gradient; corrects engine, precision and staleness (algo/mismatch.py)
    update_ratio   = exp(trainer - old)    with gradient; clipped by PPO

A surrogate is the per-token objective, to be maximized, with the metrics of its ratio. Log ratios are clamped to +-20
only where they are exponentiated. Shapes: T = packed tokens of one microbatch, S = its sequences.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from megatron_fp8rl.algo.mismatch import limited, log_ratio, sequence_sum, weights
from megatron_fp8rl.types import LossInputs, Microbatch

Aggregate = Literal["token", "sequence", "constant"]
Surrogate = tuple[Tensor, dict[str, Tensor]]  # objective [T], 0 outside the loss mask; metrics of its ratio


def old_logprobs(inputs: LossInputs) -> Tensor:
    """Log-probabilities of the old policy, [T], without gradient. Without ``mb.old_logprobs_T`` this is the batch's
    only update: old equals trainer."""
    old_T = inputs.mb.old_logprobs_T
    return (inputs.trainer_logprobs_T if old_T is None else old_T).detach()


def update_log_ratio(inputs: LossInputs) -> Tensor:
    """trainer - old, [T], with gradient; 0 outside the loss mask."""
    return log_ratio(inputs.trainer_logprobs_T, old_logprobs(inputs), inputs.mb.loss_mask_T)


def sequence_log_ratio(inputs: LossInputs, log_ratio_T: Tensor) -> Tensor:
    """Value: the sequence's mean log ratio; gradient: the token's own (GSPO-token, arXiv 2507.18071 eq. 14)."""
    mb, num_sequences = inputs.mb, len(inputs.mb.names)
    length_S = sequence_sum(mb.loss_mask_T.to(log_ratio_T.dtype), mb.sequence_ids_T, num_sequences).clamp(min=1)
    mean_S = sequence_sum(log_ratio_T.detach(), mb.sequence_ids_T, num_sequences) / length_S
    return torch.where(mb.loss_mask_T, mean_S[mb.sequence_ids_T] + log_ratio_T - log_ratio_T.detach(), 0.0)


def clipped_surrogate(inputs: LossInputs, log_ratio_T: Tensor, dual_clip: float | None = None) -> Surrogate:
    """PPO's pessimistic minimum of ratio and clipped ratio, times the advantage (arXiv 1707.06347 eq. 7).

    A large ratio times a negative advantage is unbounded below; ``dual_clip`` bounds it by dual_clip * advantage (Ye et
    al. 2020, arXiv 1912.09729).
    """
    mask_T, advantages_T, cfg = inputs.mb.loss_mask_T, inputs.mb.advantages_T, inputs.cfg
    ratio_T = limited(log_ratio_T).exp()
    clipped_T = ratio_T.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    objective_T = torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    low_T = (ratio_T < 1 - cfg.clip_low) & (advantages_T < 0)
    high_T = (ratio_T > 1 + cfg.clip_high) & (advantages_T > 0)
    dual_T = torch.zeros_like(mask_T)
    if dual_clip is not None:
        bound_T = dual_clip * advantages_T
        dual_T = (advantages_T < 0) & (objective_T < bound_T)
        objective_T = torch.where(advantages_T < 0, torch.maximum(objective_T, bound_T), objective_T)
    return torch.where(mask_T, objective_T, 0.0), _ratio_metrics(ratio_T, low_T, high_T, dual_T, mask_T)


def bounded_surrogate(inputs: LossInputs, log_ratio_T: Tensor) -> Surrogate:
    """Bounded ratio as a constant weight of advantage * log-probability; both bounds apply to either sign."""
    mask_T, cfg = inputs.mb.loss_mask_T, inputs.cfg
    ratio_T = limited(log_ratio_T).exp()
    bounded_T = ratio_T.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    low_T, high_T = ratio_T < 1 - cfg.clip_low, ratio_T > 1 + cfg.clip_high
    objective_T = bounded_T.detach() * inputs.mb.advantages_T * torch.where(mask_T, inputs.trainer_logprobs_T, 0.0)
    nowhere_T = torch.zeros_like(mask_T)
    return torch.where(mask_T, objective_T, 0.0), _ratio_metrics(ratio_T, low_T, high_T, nowhere_T, mask_T)


def token_shares(inputs: LossInputs, aggregate: Aggregate) -> Tensor:
    """Weight of each token in the global loss, [T]; 0 outside the mask. Raises ValueError for an unknown ``aggregate``.

    token: 1 / all loss tokens. sequence: 1 / (all sequences * the sequence's own loss tokens). constant: 1 / (all
    sequences * the longest completion allowed), which removes the length bias from the gradient.
    """
    mb, batch = inputs.mb, inputs.batch
    mask_T = mb.loss_mask_T.to(mb.advantages_T.dtype)
    if aggregate == "token":
        return mask_T / max(batch.num_loss_tokens, 1)
    num_sequences = max(batch.num_sequences, 1)
    if aggregate == "constant":
        return mask_T / (num_sequences * inputs.max_completion_tokens)
    if aggregate != "sequence":
        raise ValueError(
            f"--algo.loss_options.aggregate = {aggregate!r}: unknown. Set one of {', '.join(get_args(Aggregate))}"
        )
    length_S = sequence_sum(mask_T, mb.sequence_ids_T, len(mb.names)).clamp(min=1)
    return mask_T / (num_sequences * length_S[mb.sequence_ids_T])


def policy_loss(inputs: LossInputs, surrogate: Surrogate, shares_T: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and metrics of a surrogate: with mismatch correction and the KL and entropy terms configured in ``cfg``.
    Raises ValueError for ``cfg.kl_coef`` without reference log-probabilities."""
    mb, entropy_T, cfg = inputs.mb, inputs.entropy_T, inputs.cfg
    mask_T = mb.loss_mask_T
    log_mismatch_T = log_ratio(old_logprobs(inputs), mb.rollout_logprobs_T, mask_T)
    correction = weights(log_mismatch_T, mask_T, mb.sequence_ids_T, cfg, num_sequences=len(mb.names))
    log_update_T = limited(update_log_ratio(inputs).detach())

    objective_T, metrics = surrogate
    objective_T = correction.weights_T * objective_T
    if cfg.kl_coef and inputs.divergence_T is not None:  # of the whole distribution: the sampled token has no weight
        objective_T = objective_T - cfg.kl_coef * inputs.divergence_T
        metrics = metrics | {"loss/kl_ref/mean": masked_sum(inputs.divergence_T, mask_T)}
    elif cfg.kl_coef:
        kl_T, value_T = _kl_to_reference(mb, inputs.trainer_logprobs_T)
        reweight_T = correction.weights_T * log_update_T.exp().clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
        objective_T = objective_T - cfg.kl_coef * reweight_T * kl_T
        metrics = metrics | {"loss/kl_ref/mean": masked_sum(value_T, mask_T)}
    if cfg.entropy_coef:
        objective_T = objective_T + cfg.entropy_coef * torch.where(mask_T, entropy_T, 0.0)
    loss = -(objective_T * shares_T).sum()

    with torch.no_grad():
        metrics = metrics | {
            "loss/kl_update/mean": masked_sum(_k3(-log_update_T), mask_T),
            "loss/entropy/mean": masked_sum(entropy_T, mask_T),
            "correction/weight/mean": masked_sum(correction.weights_T, mask_T),
            "correction/weight/max": torch.where(mask_T, correction.weights_T, 0.0).max(),
            "correction/fraction_corrected/mean": masked_sum(correction.corrected_T, mask_T),
            "correction/fraction_vetoed/mean": masked_sum(correction.vetoed_T, mask_T),
        }
    return loss, {key: value.detach() for key, value in metrics.items()}


def masked_sum(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """Sum over the mask, scalar, in FP32 or higher precision: the value of a metric that ends in ``/mean``."""
    return values_T.masked_fill(~mask_T, 0).sum(dtype=torch.promote_types(values_T.dtype, torch.float32))


@torch.no_grad()
def _ratio_metrics(ratio_T: Tensor, low_T: Tensor, high_T: Tensor, dual_T: Tensor, mask_T: Tensor) -> dict[str, Tensor]:
    return {
        "loss/update_ratio/mean": masked_sum(ratio_T, mask_T),
        "loss/update_ratio/max": torch.where(mask_T, ratio_T, 0.0).max(),
        "loss/clip_fraction_low/mean": masked_sum(low_T, mask_T),
        "loss/clip_fraction_high/mean": masked_sum(high_T, mask_T),
        "loss/clip_fraction_dual/mean": masked_sum(dual_T, mask_T),
    }


def _kl_to_reference(mb: Microbatch, trainer_logprobs_T: Tensor) -> tuple[Tensor, Tensor]:
    """KL(trainer || reference) per token: (value of k3 with the gradient of k2, k3 without gradient).

    The gradient of k3, (1 - exp(ref - trainer)) times the score, would minimize KL(reference || trainer). The
    score-function gradient of KL(trainer || reference) is (trainer - ref) times the score. That is the gradient of k2 =
    (trainer - ref)^2 / 2 (Schulman 2020, "Approximating KL divergence").
    """
    if mb.ref_logprobs_T is None:
        raise ValueError("algo.kl_coef needs reference log-probabilities, but this microbatch has none")
    log_ratio_T = limited(log_ratio(trainer_logprobs_T, mb.ref_logprobs_T, mb.loss_mask_T))
    k2_T = log_ratio_T.square() / 2
    k3_T = _k3(-log_ratio_T.detach())
    return k3_T + k2_T - k2_T.detach(), k3_T


def _k3(log_ratio_T: Tensor) -> Tensor:
    """exp(d) - 1 - d >= 0: for d = log(q/p) of tokens sampled from p, an unbiased estimate of KL(p || q)."""
    return torch.expm1(log_ratio_T) - log_ratio_T
