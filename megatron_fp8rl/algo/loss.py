"""Losses of one packed microbatch: importance-sampled GRPO with its relatives, and supervised cross-entropy.

Three policies, never written as bare "logprobs":

    rollout   the engine that sampled the tokens (FP8 kernels, perhaps older weights)
    old       the trainer's weights at the start of the step, with the trainer's kernels
    trainer   the weights being updated, the only policy with a gradient

    mismatch_ratio = exp(old - rollout)    no gradient; corrects engine, precision and staleness (algo/mismatch.py)
    update_ratio   = exp(trainer - old)    with gradient; what PPO clips

The published methods are choices of one function:

    GRPO  ratio=token     aggregate=sequence   advantage_std=True     arXiv 2402.03300
    DAPO  ratio=token     aggregate=token      clip_high > clip_low   arXiv 2503.14476
    Dr.GRPO  ratio=token  aggregate=constant   advantage_std=False    arXiv 2503.20783
    GSPO  ratio=sequence  aggregate=sequence   clips around 3e-4      arXiv 2507.18071
    CISPO ratio=detached  aggregate=token      clip_low=1, clip_high  arXiv 2506.13585

A loss is a sum over the tokens of this microbatch divided by the denominators of the whole global batch, so losses and
gradients add up to the same total however the batch is cut into microbatches and ranks. Functions are pure and see the
log-probabilities of the whole microbatch, in whatever layout the model runs.

Shapes: T = packed tokens of one microbatch, S = its sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fp8rl.algo.mismatch import log_ratio, sequence_sum, weights
from megatron_fp8rl.config import AlgoConfig
from megatron_fp8rl.types import Microbatch, TrainBatch


def grpo_loss(
    mb: Microbatch,
    trainer_logprobs_T: Tensor,
    entropy_T: Tensor,
    batch: TrainBatch,
    *,
    cfg: AlgoConfig,
    max_completion_tokens: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """This microbatch's part of the policy-gradient loss of the global batch.

    ``trainer_logprobs_T`` [T] carries the gradient; ``entropy_T`` [T] needs one only with ``cfg.entropy_coef``. Without
    ``mb.old_logprobs_T`` the step is taken to be its batch's only update and old is trainer without its gradient.

    Returns:
        The loss (scalar) and detached metrics: sums over loss tokens for keys that end in ``/mean``, to be divided by
        ``batch.num_loss_tokens`` after summing over microbatches and ranks; maxima for ``/max``.

    Raises:
        ValueError: ``cfg.kl_coef`` without reference log-probabilities.
    """
    mask_T = mb.loss_mask_T
    old_T = trainer_logprobs_T.detach() if mb.old_logprobs_T is None else mb.old_logprobs_T.detach()
    log_mismatch_T = log_ratio(old_T, mb.rollout_logprobs_T, mask_T)
    correction = weights(log_mismatch_T, mask_T, mb.sequence_ids_T, cfg, num_sequences=len(mb.names))
    log_update_T = log_ratio(trainer_logprobs_T, old_T, mask_T)

    objective_T, metrics = _surrogate(mb, trainer_logprobs_T, log_update_T, cfg)
    objective_T = correction.weights_T * objective_T
    if cfg.kl_coef:
        kl_T, value_T = _kl_to_reference(mb, trainer_logprobs_T)
        reweight_T = correction.weights_T * log_update_T.detach().exp().clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
        objective_T = objective_T - cfg.kl_coef * reweight_T * kl_T
        metrics["loss/kl_ref/mean"] = _masked_sum(value_T, mask_T)
    if cfg.entropy_coef:
        objective_T = objective_T + cfg.entropy_coef * torch.where(mask_T, entropy_T, 0.0)
    loss = -(objective_T * _token_shares(mb, batch, cfg, max_completion_tokens, objective_T.dtype)).sum()

    with torch.no_grad():
        metrics |= {
            "loss/kl_update/mean": _masked_sum(_k3(-log_update_T), mask_T),
            "loss/entropy/mean": _masked_sum(entropy_T, mask_T),
            "correction/weight/mean": _masked_sum(correction.weights_T, mask_T),
            "correction/weight/max": torch.where(mask_T, correction.weights_T, 0.0).max(),
            "correction/fraction_corrected/mean": _masked_sum(correction.corrected_T, mask_T),
            "correction/fraction_vetoed/mean": _masked_sum(correction.vetoed_T, mask_T),
        }
    return loss, {key: value.detach() for key, value in metrics.items()}


def sft_loss(
    mb: Microbatch,
    trainer_logprobs_T: Tensor,
    entropy_T: Tensor,
    batch: TrainBatch,
    *,
    cfg: AlgoConfig | None = None,
    max_completion_tokens: int = 0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """This microbatch's part of the mean cross-entropy over all loss tokens. Same signature as :func:`grpo_loss`."""
    mask_T = mb.loss_mask_T
    nll = -torch.where(mask_T, trainer_logprobs_T, 0.0).sum()
    with torch.no_grad():
        metrics = {"loss/nll/mean": nll.detach(), "loss/entropy/mean": _masked_sum(entropy_T, mask_T)}
    return nll / max(batch.num_loss_tokens, 1), metrics


def _surrogate(
    mb: Microbatch, trainer_logprobs_T: Tensor, log_update_T: Tensor, cfg: AlgoConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped objective per token (to be maximised, 0 outside the mask) and the metrics of its ratio."""
    mask_T, advantages_T = mb.loss_mask_T, mb.advantages_T
    if cfg.ratio == "sequence":
        log_update_T = _sequence_log_ratio(mb, log_update_T)
    ratio_T = log_update_T.exp()
    clipped_T = ratio_T.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    low_T, high_T = ratio_T < 1 - cfg.clip_low, ratio_T > 1 + cfg.clip_high
    dual_T = torch.zeros_like(mask_T)

    if cfg.ratio == "detached":
        # The bounded ratio is a constant weight, so no token loses its gradient; both bounds act for either sign.
        objective_T = clipped_T.detach() * advantages_T * torch.where(mask_T, trainer_logprobs_T, 0.0)
    else:
        objective_T = torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
        low_T, high_T = low_T & (advantages_T < 0), high_T & (advantages_T > 0)
        if cfg.dual_clip is not None:
            # A large ratio times a negative advantage is unbounded below; Ye et al. 2020 (arXiv 1912.09729) floor it.
            floor_T = cfg.dual_clip * advantages_T
            dual_T = (advantages_T < 0) & (objective_T < floor_T)
            objective_T = torch.where(advantages_T < 0, torch.maximum(objective_T, floor_T), objective_T)
    with torch.no_grad():
        metrics = {
            "loss/update_ratio/mean": _masked_sum(ratio_T, mask_T),
            "loss/update_ratio/max": torch.where(mask_T, ratio_T, 0.0).max(),
            "loss/clip_fraction_low/mean": _masked_sum(low_T, mask_T),
            "loss/clip_fraction_high/mean": _masked_sum(high_T, mask_T),
            "loss/clip_fraction_dual/mean": _masked_sum(dual_T, mask_T),
        }
    return torch.where(mask_T, objective_T, 0.0), metrics


def _sequence_log_ratio(mb: Microbatch, log_update_T: Tensor) -> Tensor:
    """Mean log ratio of the sequence in value, the token's own in gradient (GSPO-token, arXiv 2507.18071 eq. 14)."""
    num_sequences = len(mb.names)
    length_S = sequence_sum(mb.loss_mask_T.to(log_update_T.dtype), mb.sequence_ids_T, num_sequences).clamp(min=1)
    mean_S = sequence_sum(log_update_T.detach(), mb.sequence_ids_T, num_sequences) / length_S
    return torch.where(mb.loss_mask_T, mean_S[mb.sequence_ids_T] + log_update_T - log_update_T.detach(), 0.0)


def _kl_to_reference(mb: Microbatch, trainer_logprobs_T: Tensor) -> tuple[Tensor, Tensor]:
    """KL(trainer || reference) per token: (k3 in value with the gradient of k2, k3 without gradient).

    Differentiating k3 itself follows KL(reference || trainer) instead: its gradient is (1 - exp(ref - trainer)) times
    the score. The score-function gradient of KL(trainer || reference) is (trainer - ref) times the score, which is the
    gradient of k2 = (trainer - ref)^2 / 2 (Schulman 2020, "Approximating KL divergence").
    """
    if mb.ref_logprobs_T is None:
        raise ValueError("algo.kl_coef needs reference log-probabilities, and this microbatch has none")
    log_ratio_T = log_ratio(trainer_logprobs_T, mb.ref_logprobs_T, mb.loss_mask_T)
    k2_T = log_ratio_T.square() / 2
    k3_T = _k3(-log_ratio_T.detach())
    return k3_T + k2_T - k2_T.detach(), k3_T


def _k3(log_ratio_T: Tensor) -> Tensor:
    """exp(d) - 1 - d >= 0: for d = log(q/p) of tokens sampled from p, an unbiased estimate of KL(p || q)."""
    return torch.expm1(log_ratio_T) - log_ratio_T


def _token_shares(
    mb: Microbatch, batch: TrainBatch, cfg: AlgoConfig, max_completion_tokens: int, dtype: torch.dtype
) -> Tensor:
    """Share of each token in the global loss, [T]; 0 outside the mask.

    token: 1 / all loss tokens. sequence: 1 / (all sequences * loss tokens of its own). constant: 1 / (all sequences *
    the longest completion allowed), which leaves the gradient free of a length bias.
    """
    mask_T = mb.loss_mask_T.to(dtype)
    if cfg.aggregate == "token":
        return mask_T / max(batch.num_loss_tokens, 1)
    num_sequences = max(batch.num_sequences, 1)
    if cfg.aggregate == "constant":
        return mask_T / (num_sequences * max_completion_tokens)
    length_S = sequence_sum(mask_T, mb.sequence_ids_T, len(mb.names)).clamp(min=1)
    return mask_T / (num_sequences * length_S[mb.sequence_ids_T])


def _masked_sum(values_T: Tensor, mask_T: Tensor) -> Tensor:
    return values_T.masked_fill(~mask_T, 0).sum(dtype=torch.promote_types(values_T.dtype, torch.float32))
