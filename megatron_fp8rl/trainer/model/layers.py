"""The layers of a GPTModel, for Megatron-Core's layer specs: which modules a layer is made of in each model family."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor

from megatron_fp8rl.config import ModelConfig, PrecisionConfig
from megatron_fp8rl.kernels.combine import weighted_later
from megatron_fp8rl.trainer.fused_kernels import ExpertKernels
from megatron_fp8rl.trainer.model.attention import PackedAttention
from megatron_fp8rl.trainer.model.dense_mlp import DenseMlp
from megatron_fp8rl.trainer.model.dispatcher import ExpertLayer
from megatron_fp8rl.trainer.model.experts import GroupedExperts
from megatron_fp8rl.trainer.model.linear import ColumnLinear, GroupedLinear, RMSNorm, RowLinear
from megatron_fp8rl.trainer.model.mla import LatentAttention, LatentSubmodules
from megatron_fp8rl.trainer.model.rotary import Rotary, softmax_scale
from megatron_fp8rl.trainer.model.router import Router
from megatron_fp8rl.upstream import patches

_FP32_ROUTERS = ("glm4_moe",)  # families whose engine multiplies the router's weight in FP32


@patches(
    "megatron-core",
    ">=0.19.2,<0.20",
    why="overrides forward: the router's weight multiplies an expert's output, as in the engine",
    remove_when="TEGroupedMLP can weigh outputs, not the input of the second linear",
)
class Experts(TEGroupedMLP):
    """The experts of this rank.

    The router's weight multiplies an expert's output, where the engine applies it too. Megatron-Core multiplies the
    input of the second linear, which is the same function until that input is rounded to FP8.
    """

    weighs: bool = True  # here, not where a token's experts are added up

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """hidden [T, hidden], sorted by expert; probs [T] -> [T, hidden]."""
        splits = tokens_per_expert.tolist()
        out, _ = self.linear_fc2(_swiglu(self.linear_fc1(hidden, splits)[0]), splits)
        return _weighted(out, probs) if self.weighs else weighted_later(out, probs), None


def _swiglu(h: Tensor) -> Tensor:
    """silu(gate) * up of [T, 2 features], each rounded to the type of ``h``."""
    if h.is_cuda and h.dtype == torch.bfloat16:
        from megatron_fp8rl.kernels.triton import swiglu  # the same bits, in one pass

        return swiglu.swiglu(h)
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


def _weighted(out: Tensor, probs: Tensor) -> Tensor:
    """[T, hidden] times probs [T], rounded once to the type of ``out``."""
    if out.is_cuda and out.dtype == torch.bfloat16:
        from megatron_fp8rl.kernels.triton import swiglu

        return swiglu.weighted(out, probs)
    return (out * probs[:, None]).to(out.dtype)


def _attention(model: ModelConfig) -> ModuleSpec:
    settings = dict(rotary=Rotary.of(model), scale=softmax_scale(model), window=model.sliding_window)
    if model.mla is not None:
        core = ModuleSpec(PackedAttention, params=settings)
        return ModuleSpec(LatentAttention, submodules=LatentSubmodules(core_attention=core, linear_proj=RowLinear))
    norm = RMSNorm if model.qk_norm else None
    return ModuleSpec(
        SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnLinear,
            core_attention=partial(PackedAttention, **settings),
            linear_proj=RowLinear,
            q_layernorm=norm,
            k_layernorm=norm,
        ),
    )


def _feed_forward(model: ModelConfig, is_moe_layer: bool, experts: Any) -> Any:
    dense = MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear)
    if not is_moe_layer:
        return partial(DenseMlp.as_mlp_submodule, submodules=dense)
    grouped = GroupedMLPSubmodules(
        linear_fc1=partial(GroupedLinear, parallel_mode="column"),
        linear_fc2=partial(GroupedLinear, parallel_mode="row"),
    )
    return partial(
        ExpertLayer,
        submodules=MoESubmodules(
            experts=partial(experts, submodules=grouped),
            shared_experts=partial(SharedExpertMLP, submodules=dense),
            router=partial(Router, router=model.router, rounds=model.family not in _FP32_ROUTERS),
        ),
    )


def _layer_spec(model: ModelConfig, is_moe_layer: bool, experts: Any) -> ModuleSpec:
    # Checkpoint names of Transformer Engine, which keeps these norms inside the linear behind them.
    names = {}
    if model.mla is None:
        names["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
    if not is_moe_layer:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=_attention(model),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=_feed_forward(model, is_moe_layer, experts),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=names,
        ),
    )


def block_spec(
    config: TransformerConfig,
    model: ModelConfig,
    vp_stage: int | None,
    precision: PrecisionConfig,
    expert_kernels: ExpertKernels,
) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage."""
    experts = partial(GroupedExperts, wgrad=precision.expert_wgrad) if expert_kernels == "deep_gemm" else Experts
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    layers = [_layer_spec(model, model.is_moe_layer(layer), experts) for layer in range(first, first + num_layers)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)
