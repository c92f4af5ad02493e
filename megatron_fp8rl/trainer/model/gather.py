"""Experts on several ranks without routed copies: every rank gets every token of its expert parallel group once.

In: hidden states, the routing map and router weights of this rank's tokens. Out: each token's weighted sum of expert
outputs. Runs on: every trainer rank with ``parallel.dispatch = gather`` and grouped experts (``experts.py``).

The all-to-all sends a token once for each of its experts, after sorting the copies, and sorts again what arrives. Here an
all-gather sends it once to each other rank, grouped kernels read tokens by index and add a token's outputs
(``kernels/expert_slots.py``), and an exchange returns one BF16 sum of each rank, which the token's rank adds in FP32. This
moves fewer bytes if the group has fewer ranks than a token has experts, and launches a third of the kernels.

    forward   tokens -> all-gather -> experts, sums of own experts -> exchange, added
    backward  gradient of the sum -> all-gather -> experts, sums of own experts -> exchange, added

Router weights go to the ranks of their experts, and their gradients come back. Ranks have equally many tokens: packing
pads their microbatches alike.

Shapes: T = tokens of this rank, G = ranks, N = T * G, E = experts of this rank, H = hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

from megatron_fp8rl.kernels.expert_slots import Choice, Slots


def _gathered(x_TH: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x_TH.new_empty(len(x_TH) * group.size(), x_TH.shape[1])
    dist.all_gather_into_tensor(out, x_TH.contiguous(), group=group)
    return out


def _exchanged(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Rank r's part r' of equal parts becomes part r on rank r'."""
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def _added(parts_NH: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[T, H]: what all ranks have for this rank's tokens, added in FP32 in the order of ranks and rounded once."""
    return _exchanged(parts_NH, group).view(group.size(), -1, parts_NH.shape[1]).sum(0)


class _AllTokens(torch.autograd.Function):
    """[T, H] of each rank -> [N, H]."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(x_TH, group)

    @staticmethod
    def backward(ctx: Any, grad_NH: Tensor) -> tuple[Tensor, None]:
        return _added(grad_NH, ctx.group), None


class _OwnTokens(torch.autograd.Function):
    """Parts of sums [N, H] on each rank -> sums [T, H]."""

    @staticmethod
    def forward(ctx: Any, parts_NH: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _added(parts_NH, group)

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, None]:
        return _gathered(grad_TH, ctx.group), None


class _OwnExperts(torch.autograd.Function):
    """Scores [T, E * G] of this rank's tokens -> [N, E] of this rank's experts."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = scores.view(len(scores), group.size(), -1).transpose(0, 1)
        return _exchanged(parts, group).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad_NE: Tensor) -> tuple[Tensor, None]:
        parts = _exchanged(grad_NE, ctx.group).view(ctx.group.size(), -1, grad_NE.shape[1])
        return parts.transpose(0, 1).flatten(1), None


class GatherDispatcher(MoETokenDispatcher):
    """Megatron-Core's steps of a dispatcher. Experts get :class:`Slots` and return sums of tokens."""

    def __init__(self, config: Any, pg_collection: Any):
        super().__init__(config, pg_collection=pg_collection)
        self._choice: Choice | None = None  # of the microbatch between two steps
        self._shape: torch.Size | None = None

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [s, b, H], map and weights [T, experts] -> tokens [T, H], scores: weights, -1 where the map is false."""
        self._shape = tokens.shape
        return tokens.view(-1, tokens.shape[-1]), torch.where(routing_map, probs.float(), -1.0)

    def token_dispatch(self, tokens: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """-> tokens of all ranks [N, H], their scores for own experts [N, E]."""
        if self.ep_size == 1:
            self._choice = Choice.of(scores)
            return tokens, scores
        scores = _OwnExperts.apply(scores, self.ep_group)
        self._choice = Choice.of(scores)  # counts travel to the host while tokens travel between ranks
        return _AllTokens.apply(tokens, self.ep_group), scores

    def dispatch_postprocess(self, tokens: Tensor, scores: Tensor) -> tuple[Tensor, Slots, Tensor]:
        """-> tokens, where they go, and router weights of the routed tokens."""
        assert self._choice is not None
        slots, self._choice = self._choice.slots(self.config.moe_router_topk), None
        return tokens, slots, slots.probs_R

    def combine_preprocess(self, sums: Tensor) -> Tensor:
        """sums [N, H] over own experts, as they are."""
        return sums

    def token_combine(self, sums: Tensor) -> Tensor:
        """-> sums [T, H] over all experts."""
        return sums if self.ep_size == 1 else _OwnTokens.apply(sums, self.ep_group)

    def combine_postprocess(self, sums: Tensor) -> Tensor:
        """-> [s, b, H]."""
        return sums.view(self._shape)
