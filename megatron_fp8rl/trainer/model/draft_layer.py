"""The multi-token prediction layer of a model, which drafts tokens for engines (``engine.speculation`` = mtp).

In: the last hidden states, and each position's next token. Out: hidden states that predict the token after the next.
The layer reads the policy's hidden states, embedding and head without gradients. So its loss trains nothing else, and
its gradients are clipped by a norm of their own. Runs on: trainer ranks without tensor, pipeline and context
parallelism.

    y = layer(eh_proj([enorm(embedding of token t + 1), hnorm(hidden state of t)]))

As in vLLM, the embedding counts as 0 at the first position of a sequence, and hidden states are those after the final
norm. vLLM applies the layer again to its own output for further drafts; it is trained for the first one.

Shapes: T = packed tokens of one microbatch, H = hidden size.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import apply_prefix_mapping
from megatron.core.optimizer.optimizer import GRAD_NORM_GROUP_ATTR, MTP_GRAD_NORM_GROUP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_fp8rl.trainer.model.layers import LayerFactory
from megatron_fp8rl.trainer.model.packed_sequences import PackedSequences
from megatron_fp8rl.upstream import patches


@patches(
    "megatron-core",
    why="marks parameters by grad_norm_group, and has the names of MultiTokenPredictionBlock, which adds its loss in "
    "GPTModel, with gradients for embedding and head",
    remove_when="MultiTokenPredictionBlock can read the policy without gradients",
)
class DraftLayer(MegatronModule):
    """One multi-token prediction layer, a decoder layer of index ``num_layers`` behind two norms and a projection."""

    def __init__(self, config: TransformerConfig, factory: LayerFactory):
        config = copy.copy(config)
        config.moe_router_load_balancing_type, config.moe_aux_loss_coeff = "none", 0.0  # that loss is the policy's
        super().__init__(config)
        size = config.hidden_size

        def norm() -> nn.Module:
            return factory.norm(config, size, config.layernorm_epsilon)

        self.enorm, self.hnorm, self.final_layernorm = norm(), norm(), norm()
        self.eh_proj = nn.Linear(2 * size, size, bias=False, dtype=config.params_dtype)
        layer = factory.layer(config.num_layers)
        layer.submodules.sharded_state_dict_keys_map = {}  # checkpoint_tools writes its norms by themselves
        self.mtp_model_layer = build_module(layer, config=config, layer_number=config.num_layers + 1)
        for parameter in self.parameters():
            setattr(parameter, GRAD_NORM_GROUP_ATTR, MTP_GRAD_NORM_GROUP)

    def forward(
        self,
        embed: Callable[[Tensor, Tensor], Tensor],
        hidden: Tensor,
        tokens: Tensor,
        positions: Tensor,
        packed: PackedSequences,
    ) -> Tensor:
        """hidden [T, 1, H], next tokens and positions int64 [1, T] -> [T, 1, H]."""
        with torch.no_grad():
            embedded = embed(tokens, positions).masked_fill(positions.t()[..., None] == 0, 0.0)
        both = torch.cat([self.enorm(embedded), self.hnorm(hidden.detach())], dim=-1)
        # Routes have no experts for this layer.
        out, _ = self.mtp_model_layer(
            self.eh_proj(both), attention_mask=None, packed_seq_params=replace(packed, routes=None)
        )
        return self.final_layernorm(out)

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As Megatron-Core's layer, whose decoder layer has another name in checkpoints."""
        state = super().sharded_state_dict(prefix, *args, **kwargs)
        apply_prefix_mapping(state, {f"{prefix}mtp_model_layer.": f"{prefix}transformer_layer."})
        return state


class DraftLayers(MegatronModule):
    """The module ``mtp`` of a model, with one layer. Megatron-Core iterates over ``layers``, and its checkpoints need
    its own kind of module all the way down."""

    def __init__(self, config: TransformerConfig, factory: LayerFactory):
        super().__init__(config)
        self.layers = _Layers(config)
        self.layers.add_module("0", DraftLayer(config, factory))


class _Layers(MegatronModule):
    def __iter__(self) -> Iterator[nn.Module]:
        return self.children()
