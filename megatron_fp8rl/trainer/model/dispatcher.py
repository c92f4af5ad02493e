"""Token dispatch and combine: all-to-all without redundant sorts, all-gather, or DeepEP and HybridEP.

In: hidden states, the routing map and router weights. Out of dispatch: tokens for the experts of this rank. Out of
combine: each token's weighted sum of expert outputs in the original order. Runs on: every trainer rank.

**all-to-all** is Megatron-Core's. On a GPU, Transformer Engine's permutation kernels sum expert outputs and gradients
of copies in FP32, expert by expert, and round once. Megatron-Core's fallback scatters with BF16 atomic adds, which
round after each expert, in a different order in every run. If the engine applies router weights in combine,
``combine.py`` computes the sum. If a rank has all experts, the redundant sort by local expert is skipped, which saves
two copies of all routed tokens in each direction.

**gather** is for grouped experts. Every rank gets every token of its expert parallel group once, unsorted. Grouped
kernels read tokens by index and sum a token's outputs (``kernels/expert_slots.py``). An exchange returns each rank's
BF16 sum, and the token's rank adds these in FP32. This moves fewer bytes if the group has fewer ranks than a token has
experts. All ranks have the same number of tokens, because packing pads their microbatches equally.

    forward   tokens -> all-gather -> experts, sums over local experts -> exchange, added
    backward  gradients of sums -> all-gather -> experts, sums over local experts -> exchange, added

FP8 experts with power-of-two scales quantize along rows before the all-gather, which halves its bytes. The operands of
forward and dgrad keep their values. So do those of wgrad, quantized along tokens, except where a number is subnormal
under one of its scales. Rounding to four significant bits does not depend on a power-of-two scale.

**DeepEP and HybridEP** send a token once to each rank with some of its experts, and add expert outputs rank by rank. So
experts apply router weights, and ``precision.exact`` refuses these dispatchers, like gather.

Shapes of gather: T = tokens of this rank, G = ranks, N = T * G, E = experts of this rank, H = hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher, MoETokenDispatcher
from torch import Tensor

from megatron_fp8rl.kernels.combine import combine_experts
from megatron_fp8rl.kernels.expert_slots import Choice
from megatron_fp8rl.kernels.fused_moe import pack
from megatron_fp8rl.kernels.types import Packed
from megatron_fp8rl.upstream import patches

if TYPE_CHECKING:
    from megatron_fp8rl.trainer.model.packed_sequences import Routes


def has_fused_permutation(device: torch.device) -> bool:
    """Whether Megatron-Core found Transformer Engine's permutation kernels and they run on this device."""
    return device.type == "cuda" and moe_utils.fused_permute_with_probs is not None


@patches(
    "megatron-core",
    why="overrides combine_postprocess: router weights are applied in combine, as in the engine",
    remove_when="the dispatcher can apply router weights in combine",
)
class Dispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron-Core's dispatcher that can apply router weights in combine."""

    def __init__(self, *args: Any, weighted_parts: int, **kwargs: Any):
        """``weighted_parts``: number of expert parts whose weighted sums combine rounds and adds
        (``kernels/combine.py``); 0 if experts apply the weights."""
        super().__init__(*args, **kwargs)
        self.weighted_parts = weighted_parts

    def combine_postprocess(self, outputs: Tensor) -> Tensor:
        """outputs [tokens * top-k, hidden], sorted by expert -> sums per token, in the shape of the hidden states."""
        if not self.weighted_parts:
            return super().combine_postprocess(outputs)
        top_k = self.config.moe_router_topk
        summed = combine_experts(outputs, self.probs, self.routing_map, top_k, self.weighted_parts)
        return summed.view(self.hidden_shape)


@dataclass(frozen=True)
class Exchange:
    """Exchanges of token data between the ranks of a group. Collective, outside autograd."""

    group: dist.ProcessGroup
    in_fp8: bool

    def gathered(self, x_TH: Tensor) -> Tensor | Packed:
        """The rows of all ranks [N, H], in the order of ranks."""
        if not self.in_fp8:
            return self._gathered(x_TH.contiguous())
        packed = pack(x_TH.contiguous())
        return replace(packed, data=self._gathered(packed.data))

    def _gathered(self, x: Tensor) -> Tensor:
        out = x.new_empty(len(x) * self.group.size(), x.shape[1])
        dist.all_gather_into_tensor(out, x, group=self.group)
        return out

    def added(self, parts_NH: Tensor) -> Tensor:
        """[T, H]: all ranks' parts for this rank's tokens, added in FP32 in rank order and rounded once."""
        return _exchanged(parts_NH, self.group).view(self.group.size(), -1, parts_NH.shape[1]).sum(0)


def _exchanged(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Rank r's part r' of equal parts becomes part r on rank r'."""
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


class _LocalExpertScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(scores.view(len(scores), group.size(), -1).transpose(0, 1), group).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad_NE: Tensor) -> tuple[Tensor, None]:
        parts = _exchanged(grad_NE, ctx.group).view(ctx.group.size(), -1, grad_NE.shape[1])
        return parts.transpose(0, 1).flatten(1), None


def local_expert_scores(scores: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Scores [T, E * G] of this rank's tokens -> [N, E] of this rank's experts. Differentiable."""
    return _LocalExpertScores.apply(scores, group)


@patches(
    "megatron-core",
    why="Megatron-Core's all-gather dispatcher copies every routed token and waits for the host; here experts read "
    "tokens by index, in Megatron-Core's six steps",
    remove_when="an all-gather dispatcher passes indices to the experts",
    optional=True,
)
class GatherDispatcher(MoETokenDispatcher):
    """A dispatcher in Megatron-Core's steps. Experts get a :class:`Choice` and return the sums of each token.

    Experts exchange tokens and gradients, except for the first all-gather, which overlaps counting the choice.
    ``in_fp8``: gather quantized tokens. ``reads_counts``: experts need token counts on the host, even on one rank.
    """

    def __init__(self, config: Any, pg_collection: Any, *, in_fp8: bool, reads_counts: bool):
        super().__init__(config, pg_collection=pg_collection)
        self._exchange = Exchange(self.ep_group, in_fp8) if self.ep_size > 1 else None
        self._reads_counts = reads_counts or self._exchange is not None
        self._choice: Choice | None = None  # of the microbatch between two steps
        self._all_tokens: Tensor | Packed | None = None  # its tokens of all ranks
        self._shape: torch.Size | None = None

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor | None, probs: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [s, b, H], map and weights [T, experts] -> tokens [T, H], scores: weights, -1 where the map is false.
        Without a map the weights are the scores."""
        self._shape = tokens.shape
        scores = probs if routing_map is None else torch.where(routing_map, probs.float(), -1.0)
        return tokens.view(-1, tokens.shape[-1]), scores

    def token_dispatch(self, tokens: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """-> the same tokens [T, H]; scores of all ranks' tokens for local experts [N, E]."""
        scores = scores if self._exchange is None else local_expert_scores(scores, self.ep_group)
        num_rows = None if self._reads_counts else len(tokens) * self.config.moe_router_topk
        self._choice = Choice.of(scores, num_rows)  # counts are copied to the host while ranks exchange tokens
        self._all_tokens = None if self._exchange is None else self._exchange.gathered(tokens.detach())
        return tokens, scores

    def dispatch_postprocess(self, tokens: Tensor, scores: Tensor) -> tuple[Tensor, Choice, Tensor]:
        assert self._choice is not None
        choice = replace(self._choice, all_tokens=self._all_tokens, exchange=self._exchange)
        self._choice = self._all_tokens = None
        return tokens, choice, scores

    def combine_preprocess(self, sums: Tensor) -> Tensor:
        return sums

    def token_combine(self, sums: Tensor) -> Tensor:
        return sums

    def combine_postprocess(self, sums: Tensor) -> Tensor:
        return sums.view(self._shape)


@patches(
    "megatron-core",
    why="replaces the dispatcher that MoELayer has built; overrides forward, whose recomputation would not get the "
    "routes of its microbatch",
    remove_when="MoELayer takes the class of its dispatcher and packed_seq_params as arguments",
)
class ExpertLayer(MoELayer):
    """Megatron-Core's MoE layer with the dispatchers above, or with Megatron-Core's for DeepEP and HybridEP.

    ``weighted_parts``: as in :class:`Dispatcher`; 0 if the experts apply router weights. ``gathers``: tokens instead of
    routed copies. ``routes``: of the microbatch that runs next.
    """

    routes: Routes | None = None

    def __init__(
        self, config: Any, *args: Any, pg_collection: Any, weighted_parts: int = 0, gathers: bool = False, **kwargs: Any
    ):
        super().__init__(config, *args, pg_collection=pg_collection, **kwargs)
        if gathers:
            self.token_dispatcher = GatherDispatcher(
                config,
                pg_collection,
                in_fp8=self.experts.fmt.scale_kind == "pow2",
                reads_counts=not self.experts.fmt.is_quantized or self.experts.wgrad == "bf16",
            )
        elif config.moe_token_dispatcher_type == "alltoall":
            self.token_dispatcher = Dispatcher(
                self.num_local_experts,
                self.local_expert_indices,
                config=config,
                pg_collection=pg_collection,
                weighted_parts=weighted_parts,
            )
        self._recomputes, self.moe_layer_recompute = self.moe_layer_recompute, False

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Collective over expert parallel ranks: [s, b, H] -> ([s, b, H], None)."""
        run = partial(self._run, self.routes)
        if self._recomputes and self.training:
            return tensor_parallel.checkpoint(run, False, hidden_states, intermediate_tensors, padding_mask)
        return run(hidden_states, intermediate_tensors, padding_mask)

    def _run(self, routes: Routes | None, *args: Any) -> tuple[Tensor, Tensor | None]:
        """Megatron-Core's forward, with these routes; the backward pass runs it again if the layer is recomputed."""
        self.router.routes = routes
        try:
            return super().forward(*args)
        finally:
            self.router.routes = None
