"""A gated delta net over packed sequences, sharded by key heads over tensor-parallel ranks.

Megatron-Core's ``GatedDeltaNet`` has one matrix for all projections, of which FP8 checkpoints keep two in BF16, and its
plain torch path takes no packed sequences. This module has the checkpoint's matrices. On a CPU it runs the recurrence
of ``kernels/gated_delta.py``, as the engine does there; on a GPU, the chunks of the same file, which the backward pass
computes again. Weights of convolution, decays and norm are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_fp8rl.config import GdnConfig
from megatron_fp8rl.kernels import gated_delta
from megatron_fp8rl.trainer.model.linear import ColumnLinear, LinearSpec, ReplicatedLinear, RowLinear, current_device
from megatron_fp8rl.trainer.model.packed_sequences import lengths_of
from megatron_fp8rl.upstream import patches


class _Whole(nn.Module):
    """A weight that every tensor-parallel rank has; a rank's gradient is that of its heads."""

    def __init__(self, config: TransformerConfig, *shape: int):
        super().__init__()
        self.weight = _whole(config, *shape)


def _whole(config: TransformerConfig, *shape: int) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=current_device()))
    parameter.sequence_parallel = config.sequence_parallel  # Megatron-Core then sums the gradient
    return parameter


@patches(
    "megatron-core",
    why="replaces GatedDeltaNet, which fuses matrices that checkpoints keep apart and takes no packs on a CPU",
    remove_when="GatedDeltaNet has the checkpoint's matrices, and packs on a CPU",
)
class DeltaNet(MegatronModule):
    """The mixer of a layer with a gated delta net."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        gdn: GdnConfig,
        is_apart: bool,
        linear: Callable[[str], LinearSpec],
        row_linear: Callable[..., RowLinear],
        pg_collection: ProcessGroupCollection,
        **unused: Any,
    ):
        """``is_apart``: there are four projections instead of two. ``linear`` returns the spec of a linear by name;
        ``row_linear`` builds a row-parallel linear."""
        super().__init__(config=config)
        self.gdn, self.tp_group = gdn, pg_collection.tp
        keys, values = gdn.num_key_heads * gdn.key_head_dim, gdn.num_value_heads * gdn.value_head_dim
        settings = dict(config=config, init_method=config.init_method, bias=False, tp_group=self.tp_group)
        column = partial(ColumnLinear, config.hidden_size, gather_output=False, **settings)
        self.is_apart = is_apart
        if is_apart:
            self.in_proj_qkv = ReplicatedLinear(
                config.hidden_size,
                2 * keys + values,
                config=config,
                tp_group=self.tp_group,
                spec=linear("in_proj_qkv"),
            )
            self.in_proj_z = column(values, spec=linear("in_proj_z"))
            self.in_proj_b, self.in_proj_a = (
                column(gdn.num_value_heads, spec=linear(name)) for name in ("in_proj_b", "in_proj_a")
            )
        else:
            self.in_proj_qkvz = column(2 * (keys + values), spec=linear("in_proj_qkvz"))
            self.in_proj_ba = column(2 * gdn.num_value_heads, spec=linear("in_proj_ba"))
        self.out_proj = row_linear(
            values,
            config.hidden_size,
            spec=linear("out_proj"),
            input_is_parallel=True,
            skip_bias_add=True,
            **settings,
        )
        self.conv1d = _Whole(config, 2 * keys + values, 1, gdn.conv_width)
        self.A_log, self.dt_bias = (_whole(config, gdn.num_value_heads) for _ in range(2))
        self.out_norm = _Whole(config, gdn.value_head_dim)
        self.in_chunks = current_device().type == "cuda"

    def forward(
        self, hidden_states: Tensor, *args: Any, packed_seq_params: PackedSeqParams | None = None, **unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Collective over tensor-parallel ranks: [T, 1, hidden] -> ([T, 1, hidden], None)."""
        if packed_seq_params is None:
            raise ValueError("gated delta nets take packed sequences; pass PackedSeqParams(qkv_format='thd')")
        weights = self._channels(self.conv1d.weight.squeeze(1)), self._mine(self.A_log), self._mine(self.dt_bias)
        inputs = *self._projected(hidden_states), lengths_of(packed_seq_params), *weights
        if self.in_chunks:
            normed = checkpoint(self._normed, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            normed = self._normed(*inputs)
        return self.out_proj(normed.unsqueeze(1))

    def _normed(self, mixed: Tensor, gate: Tensor, *inputs: Any) -> Tensor:
        if self.in_chunks:
            out = gated_delta.chunked(mixed, *inputs, self.gdn)
        else:
            out, _ = gated_delta.gated_delta_net(mixed, *inputs, self.gdn)
        return gated_delta.gated_norm(out, gate, self.out_norm.weight, self.config.layernorm_epsilon)

    def _projected(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Collective: inputs of the convolution, output gates, write strengths and decays of this rank's heads, for all
        tokens."""
        if not self.is_apart:
            qkvz, ba = self.in_proj_qkvz(hidden_states)[0], self.in_proj_ba(hidden_states)[0]
            return gated_delta.split_heads(qkvz.squeeze(1), ba.squeeze(1), self.gdn)
        mixed = self.in_proj_qkv(hidden_states)
        if self.config.sequence_parallel:
            # Backward: each rank has the gradient of its heads only, so the slices are summed.
            mixed = gather_from_sequence_parallel_region(mixed, group=self.tp_group)
        gate, b, a = (
            linear(hidden_states)[0].squeeze(1) for linear in (self.in_proj_z, self.in_proj_b, self.in_proj_a)
        )
        mixed_TC = self._channels(mixed.squeeze(1).t()).t()
        return mixed_TC, gate.unflatten(-1, (-1, self.gdn.value_head_dim)), b, a

    def _mine(self, whole: Tensor) -> Tensor:
        """The rows of this rank's heads."""
        return whole.chunk(self.tp_group.size())[self.tp_group.rank()]

    def _channels(self, whole: Tensor) -> Tensor:
        """The rows of this rank's queries, keys and values among those of all."""
        gdn = self.gdn
        keys, values = gdn.num_key_heads * gdn.key_head_dim, gdn.num_value_heads * gdn.value_head_dim
        return torch.cat([self._mine(part) for part in whole.split([keys, keys, values])])
