"""Loss functions of one packed microbatch; each one is a value of ``algo.loss``.

    grpo     clipped token ratio, mean over the sequences' means           arXiv 2402.03300
    dapo     the same, mean over all tokens; clip_high > clip_low          arXiv 2503.14476
    dr_grpo  the same, sum over tokens / longest completion allowed        arXiv 2503.20783, with its advantages
    gspo     clipped sequence ratio; clip range around 3e-4                arXiv 2507.18071
    cispo    bounded ratio as a constant weight; clip_low=1, clip_high     arXiv 2506.13585
    sft      cross-entropy
    dpo      log-sigmoid of the difference between two answers      arXiv 2305.18290; the command dpo alone uses it

The signature is ``(inputs: LossInputs, **options) -> (loss, metrics)``, also for a user's ``module:function``
(docs/extending.md). ``algo.loss_options`` sets ``options``: ``aggregate`` selects how tokens are averaged,
``dual_clip`` bounds the loss of a token with a negative advantage (usually 3.0). ``loss`` and the detached ``metrics``
are scalars: for keys in ``/mean``, sums over loss tokens, which the trainer divides by ``batch.num_loss_tokens``; for
``/max``, maxima. A function with the attribute ``may_lack_lower_clip`` accepts ``algo.clip_low`` = 1.

A loss is a sum over this microbatch's tokens divided by the denominators of the global batch, so that losses and
gradients do not depend on the split into microbatches and ranks. algo/objective.py has the building blocks.

Shapes: T = packed tokens of one microbatch, S = its sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_fp8rl.algo.mismatch import sequence_sum
from megatron_fp8rl.algo.objective import (
    Aggregate,
    bounded_surrogate,
    clipped_surrogate,
    masked_sum,
    policy_loss,
    sequence_log_ratio,
    token_shares,
    update_log_ratio,
)
from megatron_fp8rl.types import LossInputs

Loss = tuple[Tensor, dict[str, Tensor]]


def grpo(inputs: LossInputs, *, aggregate: Aggregate = "sequence", dual_clip: float | None = None) -> Loss:
    """Clip each token's ratio; all sequences have equal weight."""
    surrogate = clipped_surrogate(inputs, update_log_ratio(inputs), dual_clip)
    return policy_loss(inputs, surrogate, token_shares(inputs, aggregate))


def dapo(inputs: LossInputs, *, dual_clip: float | None = None) -> Loss:
    """:func:`grpo` with equal weight for all tokens."""
    return grpo(inputs, aggregate="token", dual_clip=dual_clip)


def dr_grpo(inputs: LossInputs, *, dual_clip: float | None = None) -> Loss:
    """:func:`grpo` without length bias; the paper combines it with ``algo.advantage`` dr_grpo."""
    return grpo(inputs, aggregate="constant", dual_clip=dual_clip)


def gspo(inputs: LossInputs, *, aggregate: Aggregate = "sequence", dual_clip: float | None = None) -> Loss:
    """Clip the geometric mean of a sequence's ratios, so that a sequence is clipped as a whole."""
    surrogate = clipped_surrogate(inputs, sequence_log_ratio(inputs, update_log_ratio(inputs)), dual_clip)
    return policy_loss(inputs, surrogate, token_shares(inputs, aggregate))


def cispo(inputs: LossInputs, *, aggregate: Aggregate = "token") -> Loss:
    """Weight the log-probability by the detached bounded ratio, so that every token keeps its gradient."""
    surrogate = bounded_surrogate(inputs, update_log_ratio(inputs))
    return policy_loss(inputs, surrogate, token_shares(inputs, aggregate))


# CISPO clips the importance weight itself, usually only from above.
cispo.may_lack_lower_clip = True  # pyright: ignore[reportFunctionMemberAccess]


def sft(inputs: LossInputs) -> Loss:
    """Mean cross-entropy over all loss tokens, ignoring rewards; the loss of the warm start."""
    mask_T = inputs.mb.loss_mask_T
    nll = -torch.where(mask_T, inputs.trainer_logprobs_T, 0.0).sum()
    with torch.no_grad():
        metrics = {"loss/nll/mean": nll.detach(), "loss/entropy/mean": masked_sum(inputs.entropy_T, mask_T)}
    return nll / max(inputs.batch.num_loss_tokens, 1), metrics


def dpo(inputs: LossInputs, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Loss:
    """Direct preference optimization, mean over pairs: ``-log sigmoid(beta * (ratio of chosen - ratio of rejected))``.

    The ratio of an answer is the sum over its tokens of trainer - reference log-probabilities. ``label_smoothing`` is
    the assumed share of pairs with exchanged sides (cDPO). Sequences of a microbatch are pairs: chosen, then rejected.
    """
    mb, num_pairs = inputs.mb, max(inputs.batch.num_sequences // 2, 1)
    if mb.ref_logprobs_T is None:
        raise ValueError("algo.loss = 'dpo' needs pairs with reference log-probabilities: use the command dpo")
    log_ratio_T = torch.where(mb.loss_mask_T, inputs.trainer_logprobs_T - mb.ref_logprobs_T, 0.0)
    log_ratio_S = sequence_sum(log_ratio_T, mb.sequence_ids_T, len(mb.names))
    reward_P2 = beta * log_ratio_S[: sum(map(bool, mb.names))].view(-1, 2)
    margin_P = reward_P2[:, 0] - reward_P2[:, 1]
    loss_P = -(1 - label_smoothing) * logsigmoid(margin_P) - label_smoothing * logsigmoid(-margin_P)
    with torch.no_grad():
        means = {
            "reward_chosen": reward_P2[:, 0].sum(),
            "reward_rejected": reward_P2[:, 1].sum(),
            "reward_margin": margin_P.sum(),
            "reward_accuracy": (margin_P > 0).sum(),
        }
        # The trainer divides metrics by loss tokens, and these are means over pairs.
        scale = max(inputs.batch.num_loss_tokens, 1) / num_pairs
        metrics = {f"loss/{name}/mean": value.float() * scale for name, value in means.items()}
    return loss_P.sum() / num_pairs, metrics
