"""A loss that learns fully from good completions and bounds what it unlearns from bad ones."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fp8rl.algo.objective import masked_sum, policy_loss, token_shares, update_log_ratio
from megatron_fp8rl.types import LossInputs


def tapered(inputs: LossInputs, *, limit: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """Weighted log-likelihood: weight 1 for positive advantages, the ratio new/old up to ``limit`` for negative ones.

    A token-wise form of tapered off-policy REINFORCE (arXiv 2503.14286). A token that the policy already avoids has a
    small ratio, so its gradient fades out.
    """
    mask_T, advantages_T = inputs.mb.loss_mask_T, inputs.mb.advantages_T
    ratio_T = update_log_ratio(inputs).detach().exp()  # 1 outside the mask
    is_negative_T = advantages_T < 0
    weight_T = torch.where(is_negative_T, ratio_T.clamp(max=limit), 1.0)
    objective_T = weight_T * advantages_T * torch.where(mask_T, inputs.trainer_logprobs_T, 0.0)
    limited_T = (is_negative_T & (ratio_T > limit)).float()
    metrics = {"loss/own_limited_fraction/mean": masked_sum(limited_T, mask_T)}
    return policy_loss(inputs, (objective_T, metrics), token_shares(inputs, "token"))
