"""Loss functions of one packed microbatch; each one is a value of ``algo.loss``.

    grpo     clipped token ratio, mean over the sequences' means           arXiv 2402.03300
    dapo     the same, mean over all tokens; clip_high > clip_low          arXiv 2503.14476
    dr_grpo  the same, sum over tokens / longest completion allowed        arXiv 2503.20783, with its advantages
    gspo     clipped sequence ratio; clip range around 3e-4                arXiv 2507.18071
    cispo    bounded ratio as a constant weight; clip_low=1, clip_high     arXiv 2506.13585
    sft      cross-entropy

All have the same signature, which also applies to a user-defined ``module:function`` (docs/your_own_loss.md):

    (mb, trainer_logprobs_T, entropy_T, batch, *, cfg, max_completion_tokens, **options) -> (loss, metrics)

``trainer_logprobs_T`` [T] has a gradient; ``entropy_T`` [T] needs one only with ``cfg.entropy_coef``. ``cfg`` is the
run's AlgoConfig. ``algo.loss_options`` sets ``options`` (keyword arguments): ``aggregate`` selects how tokens are
averaged, ``dual_clip`` bounds the loss of a token with a negative advantage (usually 3.0). The result is the loss
(scalar) and detached metrics (scalars): for keys that end in ``/mean``, sums over loss tokens, to be divided by
``batch.num_loss_tokens`` after summing over microbatches and ranks; for ``/max``, maxima.

A loss is a sum over this microbatch's tokens divided by the denominators of the global batch, so losses and gradients
add up to the same total however the batch is split into microbatches and ranks. Functions are pure and get the
log-probabilities of the whole microbatch, whatever the model's parallel layout. They are built from
algo/objective.py, which defines the names of policies and ratios.

Shapes: T = packed tokens of one microbatch, S = its sequences.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megatron_fp8rl.algo.objective import (
    bounded_surrogate,
    clipped_surrogate,
    masked_sum,
    policy_loss,
    sequence_log_ratio,
    token_shares,
    update_log_ratio,
)
from megatron_fp8rl.config import AlgoConfig
from megatron_fp8rl.types import Microbatch, TrainBatch


def grpo(
    mb: Microbatch,
    trainer_logprobs_T: Tensor,
    entropy_T: Tensor,
    batch: TrainBatch,
    *,
    cfg: AlgoConfig,
    max_completion_tokens: int,
    aggregate: Literal["token", "sequence", "constant"] = "sequence",
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clip each token's ratio; all sequences have equal weight."""
    surrogate = clipped_surrogate(mb, update_log_ratio(mb, trainer_logprobs_T), cfg, dual_clip)
    shares_T = token_shares(mb, batch, aggregate, max_completion_tokens)
    return policy_loss(mb, trainer_logprobs_T, entropy_T, surrogate, shares_T, cfg)


def dapo(
    mb: Microbatch,
    trainer_logprobs_T: Tensor,
    entropy_T: Tensor,
    batch: TrainBatch,
    *,
    cfg: AlgoConfig,
    max_completion_tokens: int,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """:func:`grpo` with equal weight for all tokens."""
    return grpo(
        mb,
        trainer_logprobs_T,
        entropy_T,
        batch,
        cfg=cfg,
        max_completion_tokens=max_completion_tokens,
        dual_clip=dual_clip,
        aggregate="token",
    )


def dr_grpo(
    mb: Microbatch,
    trainer_logprobs_T: Tensor,
    entropy_T: Tensor,
    batch: TrainBatch,
    *,
    cfg: AlgoConfig,
    max_completion_tokens: int,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """:func:`grpo` without length bias; the paper combines it with ``algo.advantage`` dr_grpo."""
    return grpo(
        mb,
        trainer_logprobs_T,
        entropy_T,
        batch,
        cfg=cfg,
        max_completion_tokens=max_completion_tokens,
        dual_clip=dual_clip,
        aggregate="constant",
    )


def gspo(
    mb: Microbatch,
    trainer_logprobs_T: Tensor,
    entropy_T: Tensor,
    batch: TrainBatch,
    *,
    cfg: AlgoConfig,
    max_completion_tokens: int,
    aggregate: Literal["token", "sequence", "constant"] = "sequence",
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clip the geometric mean of a sequence's ratios, so that a sequence is clipped as a whole."""
    log_ratio_T = sequence_log_ratio(mb, update_log_ratio(mb, trainer_logprobs_T))
    surrogate = clipped_surrogate(mb, log_ratio_T, cfg, dual_clip)
    shares_T = token_shares(mb, batch, aggregate, max_completion_tokens)
    return policy_loss(mb, trainer_logprobs_T, entropy_T, surrogate, shares_T, cfg)


def cispo(
    mb: Microbatch,
    trainer_logprobs_T: Tensor,
    entropy_T: Tensor,
    batch: TrainBatch,
    *,
    cfg: AlgoConfig,
    max_completion_tokens: int,
    aggregate: Literal["token", "sequence", "constant"] = "token",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weight the log-probability by the detached bounded ratio, so that every token keeps its gradient."""
    surrogate = bounded_surrogate(mb, trainer_logprobs_T, update_log_ratio(mb, trainer_logprobs_T), cfg)
    shares_T = token_shares(mb, batch, aggregate, max_completion_tokens)
    return policy_loss(mb, trainer_logprobs_T, entropy_T, surrogate, shares_T, cfg)


def sft(
    mb: Microbatch,
    trainer_logprobs_T: Tensor,
    entropy_T: Tensor,
    batch: TrainBatch,
    *,
    cfg: AlgoConfig | None = None,
    max_completion_tokens: int = 0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean cross-entropy over all loss tokens, ignoring rewards; the loss of the warm start."""
    mask_T = mb.loss_mask_T
    nll = -torch.where(mask_T, trainer_logprobs_T, 0.0).sum()
    with torch.no_grad():
        metrics = {"loss/nll/mean": nll.detach(), "loss/entropy/mean": masked_sum(entropy_T, mask_T)}
    return nll / max(batch.num_loss_tokens, 1), metrics
