"""Token dispatch and combine by Megatron-Core's all-to-all, without redundant sorts; ``gather.py``, DeepEP and HybridEP.

In: hidden states and the routing map. Out: tokens sorted by expert, and each token's weighted sum of expert outputs in
the original order. Runs on: every trainer rank.

On a GPU with Transformer Engine, its permutation kernels move the tokens. They sum the outputs of a token's experts,
and the gradients of its copies, in FP32, expert by expert, and round once. Megatron-Core's fallback scatters with BF16
atomic adds, which round after each expert, in a different order in every run. If the engine applies router weights in
combine, ``combine.py`` computes the sum.

DeepEP and HybridEP send a token once to each rank that has some of its experts and add its experts' outputs rank by rank,
so experts apply router weights and ``precision.exact`` refuses them.

If a rank has all experts, tokens are already sorted when Megatron-Core would sort them by local expert: two copies of
all routed tokens in each direction that change nothing.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from megatron_fp8rl.kernels.combine import combine_experts
from megatron_fp8rl.trainer.compat.megatron import counts_on_host
from megatron_fp8rl.trainer.model.gather import GatherDispatcher
from megatron_fp8rl.upstream import patches

if TYPE_CHECKING:
    from megatron_fp8rl.trainer.router_replay import Routes


def has_fused_permutation(device: torch.device) -> bool:
    """Whether Megatron-Core found Transformer Engine's permutation kernels and they run on this device."""
    return device.type == "cuda" and moe_utils.fused_permute_with_probs is not None


@patches(
    "megatron-core",
    ">=0.19.2,<0.20",
    why="overrides combine_postprocess: router weights are applied in combine, as in the engine",
    remove_when="the dispatcher can apply router weights in combine",
)
class Dispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron-Core's dispatcher that can apply router weights in combine."""

    def __init__(self, *args: Any, weighted_parts: int, **kwargs: Any):
        """``weighted_parts``: of the experts, whose weighted sums combine rounds and adds (``kernels/combine.py``); 0 if
        outputs arrive weighted."""
        super().__init__(*args, **kwargs)
        self.weighted_parts = weighted_parts

    def combine_postprocess(self, outputs: Tensor) -> Tensor:
        """outputs [tokens * top-k, hidden], sorted by expert -> sums per token, in the shape of the hidden states."""
        if not self.weighted_parts:
            return super().combine_postprocess(outputs)
        top_k = self.config.moe_router_topk
        summed = combine_experts(outputs, self.probs, self.routing_map, top_k, self.weighted_parts)
        return summed.view(self.hidden_shape)


@patches(
    "megatron-core",
    ">=0.19.2,<0.20",
    why="overrides dispatch_postprocess and combine_preprocess, which sort tokens that are already sorted",
    remove_when="the dispatcher skips the sort on a rank that has all experts",
)
class OneRankDispatcher(Dispatcher):
    """Dispatcher for a rank that has all experts, unsharded."""

    def dispatch_postprocess(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """tokens [T, hidden] and probs [T], sorted by expert and returned unchanged; tokens per expert, on the host."""
        return tokens, counts_on_host(self), probs

    def combine_preprocess(self, outputs: Tensor) -> Tensor:
        """outputs [T, hidden], unchanged."""
        return outputs


@patches(
    "megatron-core",
    ">=0.19.2,<0.20",
    why="replaces the dispatcher that MoELayer has built; overrides forward, whose recomputation would not see the "
    "routes of its microbatch",
    remove_when="MoELayer takes the class of its dispatcher and packed_seq_params as arguments",
)
class ExpertLayer(MoELayer):
    """Megatron-Core's MoE layer with the dispatchers above, with ``gather.py``'s, or with Megatron-Core's for DeepEP and
    HybridEP.

    ``weighted_parts``: as in :class:`Dispatcher`; 0 if the experts apply router weights. ``gathers``: tokens instead of
    routed copies. ``routes``: of the microbatch that runs next.
    """

    routes: Routes | None = None

    def __init__(
        self, config: Any, *args: Any, pg_collection: Any, weighted_parts: int = 0, gathers: bool = False, **kwargs: Any
    ):
        super().__init__(config, *args, pg_collection=pg_collection, **kwargs)
        if gathers:
            self.token_dispatcher = GatherDispatcher(config, pg_collection)
        elif config.moe_token_dispatcher_type == "alltoall":
            is_alone = self.token_dispatcher.tp_size * self.token_dispatcher.ep_size == 1
            self.token_dispatcher = (OneRankDispatcher if is_alone else Dispatcher)(
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
