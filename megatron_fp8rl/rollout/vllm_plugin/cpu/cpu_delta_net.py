"""The engine's gated delta nets on a CPU: the trainer's recurrence over vLLM's state cache.

A request has one slot of the cache: the last inputs of the convolution in BF16, and the state in float32. Prompts,
their chunks and decoded tokens read the slot and write it back. A preempted request begins again with a new slot.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from megatron_fp8rl.config import GdnConfig
from megatron_fp8rl.kernels import gated_delta
from megatron_fp8rl.upstream import patches


@patches(
    "vllm",
    why="replaces QwenGatedDeltaNetAttention.forward_cpu: vLLM's kernels sum prompts in another order than decoded "
    "tokens, and depend on the processor",
    remove_when="vLLM gives a token the same bits in a prompt, its chunks and decoding",
    optional=True,
)
def compute_as_the_trainer() -> None:
    """Make gated delta nets of this process use the trainer's arithmetic."""
    QwenGatedDeltaNetAttention.forward_cpu = _forward


def _forward(layer: Any, hidden_states: Tensor) -> Tensor:
    gdn = GdnConfig(
        num_key_heads=layer.num_k_heads,
        num_value_heads=layer.num_v_heads,
        key_head_dim=layer.head_k_dim,
        value_head_dim=layer.head_v_dim,
        conv_width=layer.conv_kernel_size,
    )
    qkvz, ba = layer.in_proj_qkvz(hidden_states)[0], layer.in_proj_ba(hidden_states)[0]
    if layer.gqa_interleaved_layout:
        mixed, gate, b, a = gated_delta.split_heads(qkvz, ba, gdn)
    else:  # all queries, all keys, all values, all gates
        mixed, gate = qkvz.split([layer.conv_dim, layer.value_dim], dim=-1)
        (b, a), gate = ba.chunk(2, dim=-1), gate.unflatten(-1, (-1, gdn.value_head_dim))
    out = torch.zeros(gate.shape, dtype=gate.dtype)
    metadata = get_forward_context().attn_metadata
    if metadata is not None:  # None while vLLM measures memory
        _recur(layer, gdn, metadata[layer.prefix], mixed, b, a, out)
    return layer.out_proj(gated_delta.gated_norm(out, gate, layer.norm.weight.data, layer.norm.eps))[0]


def _recur(layer: Any, gdn: GdnConfig, metadata: Any, mixed: Tensor, b: Tensor, a: Tensor, out: Tensor) -> None:
    """Fill ``out`` [tokens, H, V], and write the state of each request back."""
    num = metadata.num_decodes + metadata.num_prefills
    starts = metadata.non_spec_query_start_loc[: num + 1]
    slots = metadata.non_spec_state_indices_tensor[:num].long()
    inputs, states = layer.kv_cache
    inputs = inputs.transpose(1, 2) if is_conv_state_dim_first() else inputs
    states = states.view(len(states), -1, gdn.key_head_dim, gdn.value_head_dim)
    if states.dtype != torch.float32:
        raise ValueError(f"the cache of recurrent states is {states.dtype}; pass --mamba-ssm-cache-dtype float32")
    carried = [inputs[slots], states[slots]]
    if metadata.has_initial_state is not None:  # None: all requests decode
        for tensor in carried:
            tensor[~metadata.has_initial_state[:num]] = 0
    total = int(starts[-1])
    out[:total], after = gated_delta.gated_delta_net(
        mixed[:total],
        b[:total],
        a[:total],
        starts.diff().tolist(),
        layer.conv1d.weight.data.squeeze(1),
        layer.A_log.data,
        layer.dt_bias.data,
        gdn,
        gated_delta.DeltaState(*carried),
    )
    inputs[slots], states[slots] = after.inputs_NWC, after.state_NHKV
