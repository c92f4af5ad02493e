"""Megatron-Core layer specs: the modules of each layer, with their precision (layer table) and kernels."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
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

from megatron_fp8rl.config import ModelConfig, RunConfig
from megatron_fp8rl.kernels import float64
from megatron_fp8rl.kernels.combine import weighted_in_combine
from megatron_fp8rl.names import registry
from megatron_fp8rl.names.table import draft_layer_name
from megatron_fp8rl.precision.formats import BF16, QuantFormat
from megatron_fp8rl.precision.kernel_choice import KernelChoice
from megatron_fp8rl.precision.kernel_support import row_parts
from megatron_fp8rl.precision.layer_table import LayerTable
from megatron_fp8rl.precision.recipes import AMAX_HISTORY_LEN, Blockwise, Recipe, make_recipe
from megatron_fp8rl.trainer.compat.megatron import has_forward_hooks
from megatron_fp8rl.trainer.model import attention_te, linear_deep_gemm
from megatron_fp8rl.trainer.model.attention import PackedAttention, PackedSelfAttention
from megatron_fp8rl.trainer.model.delta_net import DeltaNet
from megatron_fp8rl.trainer.model.dispatcher import ExpertLayer
from megatron_fp8rl.trainer.model.experts import GroupedExperts
from megatron_fp8rl.trainer.model.linear import (
    ColumnLinear,
    GroupedLinear,
    LinearSpec,
    Norm,
    RMSNorm,
    RowLinear,
    in_fixed_order,
    in_torch,
    matrix_of,
    on_deep_gemm,
    on_transformer_engine,
)
from megatron_fp8rl.trainer.model.mla import LatentAttention, LatentSubmodules, attend_over_latents
from megatron_fp8rl.trainer.model.rotary import Rotary, softmax_scale
from megatron_fp8rl.trainer.model.router import RoutedLayer, Router
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.upstream import patches


@patches(
    "megatron-core",
    why="overrides forward: router weights are applied to an expert's output, as in the engine",
    remove_when="TEGroupedMLP can apply router weights to outputs instead of the input of the second linear",
)
class Experts(TEGroupedMLP):
    """The experts of this rank. Applies router weights to an expert's output, like the engine. Megatron-Core applies
    them to the input of the second linear, which is equivalent until that input is rounded to FP8."""

    def __init__(self, *args: Any, applies_router_weights: bool = True, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.applies_router_weights = applies_router_weights
        # Only families with biases clamp.
        self.activation = float64.clamped_swiglu if self.config.add_bias_linear else _swiglu

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """hidden [T, hidden], sorted by expert; probs [T] -> [T, hidden]."""
        splits = tokens_per_expert.tolist()
        out, _ = self.linear_fc2(self.activation(self.linear_fc1(hidden, splits)[0]), splits)
        return _weighted(out, probs) if self.applies_router_weights else weighted_in_combine(out, probs), None


def _swiglu(h: Tensor) -> Tensor:
    """silu(gate) * up of [T, 2 features], each rounded to the dtype of ``h``."""
    if h.is_cuda and h.dtype == torch.bfloat16:
        from megatron_fp8rl.kernels.triton import swiglu  # bitwise identical, in one pass

        return swiglu.swiglu(h)
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


def _weighted(out: Tensor, probs: Tensor) -> Tensor:
    """[T, hidden] times probs [T], rounded once to the dtype of ``out``."""
    if out.is_cuda and out.dtype == torch.bfloat16:
        from megatron_fp8rl.kernels.triton import swiglu

        return swiglu.weighted(out, probs)
    return (out * probs[:, None]).to(out.dtype)


@patches(
    "megatron-core",
    why="overrides forward of MLP: both linears and SwiGLU are one piece, by DeepGEMM",
    remove_when="the feed-forward part of a layer spec can be any module",
)
class DeepGemmMlp(MLP):
    """A fused dense MLP if both linears run on DeepGEMM, with the parameters and checkpoints of Megatron-Core's MLP."""

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any) -> tuple:
        """Collective over tensor-parallel ranks: [s, b, H] -> ([s, b, H], None); sequence parallelism divides s."""
        fc1, fc2 = self.linear_fc1, self.linear_fc2
        watched = any(has_forward_hooks(linear) or linear.adapter is not None for linear in (fc1, fc2))
        if watched or fc2.post_layernorm is not None:  # it calls none of them
            return super().forward(hidden_states, per_token_scale, **kwargs)
        assert per_token_scale is None and self.config.gated_linear_unit and not self.config.add_bias_linear
        x = fc1.gathered(hidden_states)
        y_TH = linear_deep_gemm.mlp(x.reshape(-1, x.shape[-1]), matrix_of(fc1, fc1.weight), matrix_of(fc2, fc2.weight))
        return fc2.reduced(y_TH.view(*x.shape[:-1], y_TH.shape[-1])), None


@patches(
    "megatron-core",
    why="overrides forward of MLP: compiled, its SwiGLU does not round between its two operations, as engines do",
    remove_when="an MLP of the layer spec takes its activation",
)
class RoundedMlp(MLP):
    """A dense MLP in BF16 with the engine's bits."""

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any) -> tuple:
        """Collective over tensor-parallel ranks: [s, b, H] -> ([s, b, H], None); sequence parallelism divides s."""
        assert per_token_scale is None and self.config.gated_linear_unit and not self.config.add_bias_linear
        h, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(_swiglu(h.flatten(0, -2)).view(*h.shape[:-1], -1))


@patches(
    "megatron-core",
    why="overrides forward of SharedExpertMLP: the sums of its gate depend on the batch on a CPU",
    remove_when="its gate can be a linear of the layer spec",
)
class GatedSharedExperts(SharedExpertMLP):
    """Shared experts whose output a token's gate multiplies, rounded as in the engine. Not measured on GPUs yet."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Collective over tensor-parallel ranks: [s, b, H] -> [s, b, H]."""
        logits = float64.matmul(hidden_states.flatten(0, 1), self.gate_weight.t()).view(*hidden_states.shape[:2], 1)
        return torch.sigmoid(logits) * MLP.forward(self, hidden_states)[0]


_GEMMS = {"te": on_transformer_engine, "emulated": in_torch, "deep_gemm": on_deep_gemm}


class LayerFactory:
    def __init__(self, cfg: RunConfig, parallel: Parallel, choice: KernelChoice):
        self._model, self._precision, self._engine = model, precision, engine = cfg.model, cfg.precision, cfg.engine
        self._longest = cfg.max_sequence_tokens
        self._parallel, self._kernels = parallel, choice.trainer
        self._rounds_queries = choice.engine.rounds_queries
        is_ours = choice.engine.attention == "FP8_CACHE"
        self._engine_attention = attention_te.by_cache_attention if is_ours else attention_te.by_flash_attention
        self._table = LayerTable.build(model, precision)
        self._is_exact = choice.exact == "on"
        num_parts = row_parts(engine, parallel.config) // parallel.tp_size
        self._recipe = make_recipe(precision)
        self._is_zero_centred = registry.FAMILIES[model.family].zero_centred_norms
        norm = _norm(self._kernels.norms, self._is_zero_centred)
        self.norm = partial(RMSNorm, compute=norm)
        output_norm = self.norm if registry.norms_outputs(model) else None
        self._row_linear = partial(RowLinear, num_parts=num_parts if self._is_exact else 0, norm=output_norm)
        has_stream = self._kernels.norms != "emulated"
        of_stream = partial(norm, with_input=True) if has_stream else norm
        self._first_norm = partial(RMSNorm, compute=of_stream)  # of a branch

    def linear(self, layer: int, name: str) -> LinearSpec:
        """The spec of a linear, by its name within the layer, such as ``mlp.linear_fc1``."""
        recipe, weight = self._of(layer, name)
        if recipe is None:
            on_gpu = in_fixed_order if self._is_exact else None
            return LinearSpec(gemm=on_gpu if torch.cuda.is_available() else in_torch, history_len=self._history_len)
        shape = registry.slicing.shard_shape(weight, self._model, self._parallel.tp_size)
        block_rows = (
            _block_rows(weight, self._model, self._parallel, recipe.fmt) if isinstance(recipe, Blockwise) else None
        )
        gemm = _GEMMS[self._kernels.linear_kernel(*shape)]
        return LinearSpec(recipe, gemm, block_rows, self._history_len)

    def _experts_linear(self, layer: int, name: str) -> LinearSpec:
        recipe, _ = self._of(layer, f"mlp.experts.0.{name}")
        kernel = self._kernels.experts
        if kernel == "te" and recipe is None and self._kernels.params == "fp32":
            kernel = "emulated"  # TE would use TF32; FP32 parameters are for exact comparisons
        return LinearSpec(recipe, None if kernel == "deep_gemm" else _GEMMS[kernel], history_len=self._history_len)

    def _of(self, layer: int, name: str) -> tuple[Recipe | None, registry.Weight]:
        """(recipe, weight) of a linear; q, k and v are one linear, so all or none of them are FP8."""
        num_layers = self._model.num_layers
        prefix = f"decoder.layers.{layer}" if layer < num_layers else draft_layer_name(layer - num_layers)
        weight = registry.weight(f"{prefix}.{name}.weight", self._model)
        (in_fp8,) = {self._table.trainer_format(part).is_quantized for part, _ in weight.parts}
        return self._recipe if in_fp8 else None, weight

    @property
    def _history_len(self) -> int | None:
        return AMAX_HISTORY_LEN if self._precision.trainer == "delayed" else None

    def _attention(self, layer: int) -> ModuleSpec:
        def linear(name: str) -> LinearSpec:
            return self.linear(layer, f"self_attention.{name}")

        model, kind = self._model, self._model.layers[layer]
        if kind.mixer == "gdn":
            linears = {"linear": linear, "row_linear": self._row_linear, "is_apart": registry.projects_apart(model)}
            return ModuleSpec(DeltaNet, params={"gdn": model.gdn, **linears})
        kernels = {
            "torch": None,
            "cudnn": attention_te.attend,
            "engine": partial(attention_te.attend, forward=self._engine_attention),
        }
        settings = dict(
            rotary=Rotary.of(model, kind.window, self._longest),
            scale=softmax_scale(model),
            window=kind.window,
            has_sinks=registry.has_sinks(model),
            attend=kernels[self._kernels.attention],
            rounds_queries=self._rounds_queries,
            has_fallback=self._kernels.attention != "engine",
        )
        out = partial(self._row_linear, spec=linear("linear_proj"))
        if kind.mixer == "mla":
            core = ModuleSpec(PackedAttention, params=settings)
            absorbed = None
            if self._is_exact:
                rotary = replace(settings["rotary"], first_feature=model.mla.kv_lora_rank)
                own = {"rotary": rotary, "caches_keys_only": True, "attend": attend_over_latents}
                absorbed = partial(PackedAttention, **settings | own)
            submodules = LatentSubmodules(core_attention=core, linear_proj=out, absorbed=absorbed)
            return ModuleSpec(LatentAttention, params={"linear": linear, "norm": self.norm}, submodules=submodules)
        all_heads = registry.norms_all_heads(model)
        norm = self.norm if model.qk_norm and not all_heads else None
        splits_heads = self._kernels.norms != "emulated" and not self._is_zero_centred
        options = {"splits_heads": splits_heads, "norms_all_heads": all_heads}
        if self._kernels.norms == "batch_invariant":
            options["norm"] = _norm(self._kernels.norms, self._is_zero_centred)
        return ModuleSpec(
            PackedSelfAttention,
            params={"attn_mask_type": AttnMaskType.causal, **options},
            submodules=SelfAttentionSubmodules(
                linear_qkv=partial(ColumnLinear, spec=linear("linear_qkv")),
                core_attention=partial(PackedAttention, **settings),
                linear_proj=out,
                q_layernorm=norm,
                k_layernorm=norm,
            ),
        )

    def _dense(self, layer: int, name: str) -> MLPSubmodules:
        return MLPSubmodules(
            linear_fc1=partial(ColumnLinear, spec=self.linear(layer, f"{name}.linear_fc1")),
            linear_fc2=partial(self._row_linear, spec=self.linear(layer, f"{name}.linear_fc2")),
        )

    def _feed_forward(self, layer: int) -> Any:
        model = self._model
        if not model.layers[layer].is_moe:
            linears = [self.linear(layer, f"mlp.linear_{part}") for part in ("fc1", "fc2")]
            gemms = {linear.gemm for linear in linears}
            fused = {on_deep_gemm: DeepGemmMlp, in_fixed_order: RoundedMlp}
            is_swiglu = registry.FAMILIES[model.family].activation == "silu"
            kind = fused.get(*gemms, MLP) if is_swiglu and len(gemms) == 1 else MLP
            return partial(kind.as_mlp_submodule, submodules=self._dense(layer, "mlp"))
        router = partial(
            Router,
            router=model.router,
            rounds=not registry.FAMILIES[model.family].fp32_router,
            match_engine=self._kernels.router == "batch_invariant",
            gathers=self._kernels.dispatch == "gather",
        )
        shared = None
        if model.num_shared_experts:
            kind = GatedSharedExperts if model.is_gated else SharedExpertMLP
            shared = partial(kind, submodules=self._dense(layer, "mlp.shared_experts"))
        # The order in which more than two ranks of an engine add is known only if both ends follow it.
        parts = self._engine.expert if self._engine.expert == 2 or self._is_exact else 1
        return partial(
            ExpertLayer,
            submodules=MoESubmodules(experts=self._experts(layer), shared_experts=shared, router=router),
            weighted_parts=parts if self._kernels.combine == "sum" else 0,
            gathers=self._kernels.dispatch == "gather",
        )

    def _experts(self, layer: int) -> Any:
        fc1, fc2 = (self._experts_linear(layer, name) for name in ("linear_fc1", "linear_fc2"))
        grouped = GroupedMLPSubmodules(
            linear_fc1=partial(GroupedLinear, parallel_mode="column", spec=fc1),
            linear_fc2=partial(GroupedLinear, parallel_mode="row", spec=fc2),
        )
        applies_router_weights = self._kernels.combine == "experts"
        if self._kernels.experts != "deep_gemm":
            return partial(Experts, submodules=grouped, applies_router_weights=applies_router_weights)
        fmt = BF16 if fc1.recipe is None else fc1.recipe.fmt
        return partial(GroupedExperts, submodules=grouped, applies_router_weights=applies_router_weights, fmt=fmt)

    def layer(self, layer: int) -> ModuleSpec:
        """The spec of one layer, by its index in the whole model; multi-token prediction layers follow the others."""
        # Use Transformer Engine's checkpoint names, where these norms are part of the linear that follows.
        names, kind = {}, self._model.layers[layer]
        norm = self._first_norm if registry.norms_inputs(self._model) else IdentityOp
        if kind.mixer == "attention":
            names["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
        if not kind.is_moe:
            names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
        return ModuleSpec(
            RoutedLayer if kind.is_moe else TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=norm,
                self_attention=self._attention(layer),
                self_attn_bda=get_bias_dropout_add,
                pre_mlp_layernorm=norm,
                mlp=self._feed_forward(layer),
                mlp_bda=get_bias_dropout_add,
                sharded_state_dict_keys_map=names,
            ),
        )

    def stage(self, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
        layers = [self.layer(layer) for layer in range(first, first + num_layers)]
        return TransformerBlockSubmodules(layer_specs=layers, layer_norm=self.norm)


def _norm(kernel: str, zero_centred: bool) -> Norm:
    if kernel == "emulated":
        return float64.zero_centred_norm if zero_centred else float64.rms_norm
    from megatron_fp8rl.trainer.model import norm  # imports Transformer Engine

    on_gpu = norm.batch_invariant_rms_norm if kernel == "batch_invariant" else norm.te_rms_norm
    return partial(on_gpu, zero_centred=zero_centred)


def _block_rows(weight: registry.Weight, model: ModelConfig, parallel: Parallel, fmt: QuantFormat) -> Tensor | None:
    """Row order of the Hugging Face tensors, if Megatron-Core's order would mix tensors in one FP8 block; else None.
    Megatron-Core interleaves q, k and v group by group. In the engine a block never spans two of them, so the trainer
    must form blocks in the engine's order unless heads fill whole blocks."""
    if weight.axis != 0 or weight.join != "qkv":
        return None
    num_rows, *_ = registry.slicing.shard_shape(weight, model, parallel.tp_size)
    rows = torch.arange(num_rows).unsqueeze(1)
    rows = torch.cat(registry.slicing.split(weight, model, rows, parallel.tp_size, parallel.tp_rank)).flatten()
    size = fmt.block_size(0)
    if num_rows % size == 0:
        blocks = rows.view(-1, size)
        if (blocks[:, :1] % size == 0).all() and (blocks.diff(dim=1) == 1).all():
            return None
    return rows.to(parallel.device)
