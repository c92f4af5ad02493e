"""The engine's linear and expert layers on a CPU: FP8 with the trainer's arithmetic, and readable BF16.

On a CPU, vLLM multiplies FP8 blocks only with AMX, never quantizes activations for experts, and packs BF16 weights into
a form that cannot be read back and verified. The methods here

- keep every weight in checkpoint format: FP8 bytes with scales, or BF16;
- quantize activations with :mod:`megatron_fp8rl.precision.quantizers`, as the trainer does, and dequantize the weight
  once per weight update;
- report the experts chosen by the router, for which vLLM's CPU path returns zeros.

Products, norms, rotary embedding and sums of experts come from ``kernels/float64.py``, bitwise equal to the trainer's.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.minimax_rms_norm import MiniMaxText01RMSNormTP
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    create_fp8_scale_parameter,
    create_fp8_weight_parameter,
    validate_fp8_block_shape,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.parameter import BlockQuantScaleParameter
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from megatron_fp8rl.config import RouterConfig
from megatron_fp8rl.kernels import float64
from megatron_fp8rl.kernels.blockwise import operand_dtype
from megatron_fp8rl.kernels.routing import choose_experts
from megatron_fp8rl.precision import quantizers
from megatron_fp8rl.precision.formats import QuantFormat
from megatron_fp8rl.rollout.vllm_plugin.cpu import cpu_attention
from megatron_fp8rl.rollout.vllm_plugin.patches import leave_routed_scale_to_the_router
from megatron_fp8rl.upstream import patches


@patches(
    "vllm",
    why="on a CPU vLLM multiplies FP8 blocks only with AMX, never quantizes activations for experts, and packs BF16 "
    "weights into a form that cannot be read back; matrices without a quantization config (routers, output heads) too",
    remove_when="vLLM can leave weights as loaded, and has W8A8 blocks on any CPU",
)
def register() -> None:
    """Make BF16 matrices, norms, rotary embedding and attention of this process use the methods of this folder."""
    # Some matrices are multiplied without consulting a quantization config: Mixtral's router, output heads. vLLM packs
    # those too, and does not repack a head tied to the embedding after an update.
    for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        method.process_weights_after_loading = ReadableLinearMethod.process_weights_after_loading
        method.apply = ReadableLinearMethod.apply
    nn.Linear.forward = lambda layer, x: ReadableLinearMethod().apply(layer, x, layer.bias)  # GLM-4.5's router
    leave_routed_scale_to_the_router()  # _route applies it
    RMSNorm.forward_cpu = _rms_norm
    GemmaRMSNorm.forward_cpu = GemmaRMSNorm.forward_native = _zero_centred_norm
    RotaryEmbedding.forward_cpu = _rotate
    MiniMaxText01RMSNormTP.forward_qkv = staticmethod(_norm_all_heads)
    cpu_attention.register()


def register_blocks(fmt: QuantFormat) -> None:
    """Make ``quant_method: fp8`` use the methods of this module in the calling process, for this blockwise format."""

    class CpuFp8Config(Fp8Config):
        def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
            if not isinstance(layer, LinearBase | RoutedExperts):
                return super().get_quant_method(layer, prefix)
            skipped = is_layer_skipped(
                prefix=prefix, ignored_layers=self.ignored_layers, fused_mapping=self.packed_modules_mapping
            )
            if not skipped and self.weight_block_size != list(fmt.weight_block):
                raise ValueError(
                    f"{prefix}: weight_block_size is {self.weight_block_size}; {fmt.name} has {list(fmt.weight_block)}"
                )
            if isinstance(layer, LinearBase):
                return ReadableLinearMethod() if skipped else EmulatedFp8LinearMethod(fmt)
            if skipped:
                return ReadableMoEMethod(layer)
            return EmulatedFp8MoEMethod(self, layer, fmt)

    register_quantization_config("fp8")(CpuFp8Config)


@patches(
    "vllm",
    why="CPUModelRunner.warming_up_model computes a batch of max_num_batched_tokens, so that torch.compile runs; an "
    "eager engine compiles nothing, and 8,192 tokens of a model of 135M weights take a minute",
    remove_when="vLLM leaves it out for eager engines",
    optional=True,
)
def leave_out_warm_up() -> None:
    """Start an engine without the batch that warms up the compiler."""
    CPUModelRunner.warming_up_model = lambda self: None


@patches(
    "vllm",
    why="overrides what UnquantizedLinearMethod does with a weight on a CPU: packs it",
    remove_when="vLLM can leave weights as loaded",
)
@register_weight_loader_v2_supported_method
class ReadableLinearMethod(UnquantizedLinearMethod):
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Do nothing: vLLM would pack the weight here and drop the original."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = float64.matmul(x.flatten(0, -2), layer.weight.t()).view(*x.shape[:-1], -1)
        return y if bias is None else y + bias


@patches(
    "vllm",
    why="a separate linear method with the parameters of Fp8LinearMethod",
    remove_when="vLLM has W8A8 blocks on any CPU",
)
@register_weight_loader_v2_supported_method
class EmulatedFp8LinearMethod(LinearMethodBase):
    """W8A8 FP8 linear: parameters of vLLM's ``Fp8LinearMethod``, arithmetic of ``precision/quantizers.py``."""

    def __init__(self, fmt: QuantFormat) -> None:
        self.fmt = fmt

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ) -> None:
        weight_loader = extra_weight_attrs["weight_loader"]
        rows, block = sum(output_partition_sizes), list(self.fmt.weight_block)
        layer.logical_widths = output_partition_sizes
        layer.orig_dtype = params_dtype
        layer.weight_block_size = block  # vLLM's loaders slice scales by it
        validate_fp8_block_shape(
            layer, input_size, output_size, input_size_per_partition, output_partition_sizes, block
        )
        layer.register_parameter("weight", create_fp8_weight_parameter(rows, input_size_per_partition, weight_loader))
        scale = create_fp8_scale_parameter(
            BlockQuantScaleParameter, output_partition_sizes, input_size_per_partition, block, weight_loader
        )
        layer.register_parameter(self.fmt.scale_name("weight"), scale)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        # A plain attribute: vLLM's reload and the weight digests only see parameters and buffers.
        scale = getattr(layer, self.fmt.scale_name("weight")).data
        layer.dequantized_weight = quantizers.dequantize(layer.weight.data, scale, self.fmt).to(_operands(self.fmt))

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = quantizers.round_activation(x, self.fmt, _operands(self.fmt)).flatten(0, -2)
        y = float64.matmul(rows, layer.dequantized_weight.t()).to(x.dtype).view(*x.shape[:-1], -1)
        return y if bias is None else y + bias


@patches(
    "vllm",
    why="overrides what UnquantizedFusedMoEMethod does with weights on a CPU",
    remove_when="vLLM can leave weights as loaded",
)
class ReadableMoEMethod(UnquantizedFusedMoEMethod):
    is_monolithic = True  # apply_monolithic chooses the experts; vLLM 0.32 would choose them before

    def __init__(self, layer: RoutedExperts) -> None:
        super().__init__(layer.moe_config)
        _check_supported(layer)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Do nothing: vLLM would pack the weights here and drop the originals."""

    def apply_monolithic(
        self, layer: RoutedExperts, x: Tensor, router_logits: Tensor, input_ids: Tensor | None = None
    ) -> Tensor:
        return _mix_experts(layer, x, router_logits, layer.w13_weight, layer.w2_weight, round_operand=None)


@patches(
    "vllm",
    why="overrides what Fp8MoEMethod does on a CPU, where it never quantizes activations",
    remove_when="vLLM has W8A8 experts on any CPU",
)
class EmulatedExperts:
    """W8A8 FP8 experts with the arithmetic of ``precision/quantizers.py``."""

    is_monolithic = True
    fmt: QuantFormat

    def emulate(self, layer: RoutedExperts, fmt: QuantFormat) -> None:
        _check_supported(layer)
        self.fp8_backend = Fp8MoeBackend.CPU  # vLLM 0.32 chooses none for these blocks
        self.fmt = fmt

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        """None: there is no fused kernel that needs the scales."""

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        for name in ("w13", "w2"):
            data = getattr(layer, f"{name}_weight").data
            scale = getattr(layer, self.fmt.scale_name(f"{name}_weight")).data
            experts = [quantizers.dequantize(*parts, self.fmt) for parts in zip(data, scale, strict=True)]
            setattr(layer, f"{name}_dequantized", torch.stack(experts).to(_operands(self.fmt)))

    def apply_monolithic(
        self, layer: RoutedExperts, x: Tensor, router_logits: Tensor, input_ids: Tensor | None = None
    ) -> Tensor:
        def round_operand(rows: Tensor) -> Tensor:
            return quantizers.round_activation(rows, self.fmt, _operands(self.fmt))

        return _mix_experts(layer, x, router_logits, layer.w13_dequantized, layer.w2_dequantized, round_operand)


class EmulatedFp8MoEMethod(EmulatedExperts, Fp8MoEMethod):
    """Blockwise FP8 experts with the parameters of vLLM's ``Fp8MoEMethod``."""

    def __init__(self, quant_config: Fp8Config, layer: RoutedExperts, fmt: QuantFormat) -> None:
        super().__init__(quant_config, layer)
        self.emulate(layer, fmt)


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


_ACTIVATIONS = {MoEActivation.SILU: _swiglu, MoEActivation.SWIGLUOAI_UNINTERLEAVE: float64.clamped_swiglu}


def _operands(fmt: QuantFormat) -> torch.dtype:
    """The dtype of dequantized operands: BF16 if it is exact, otherwise float64, to which they are converted once."""
    dtype = operand_dtype(torch.bfloat16, fmt.scale_kind)
    return dtype if dtype == torch.bfloat16 else torch.float64


def _check_supported(layer: RoutedExperts) -> None:
    if layer.activation not in _ACTIVATIONS or layer.apply_router_weight_on_input:
        raise ValueError(f"{layer.layer_name}: only SwiGLU experts are supported on a CPU")


@patches(
    "vllm",
    why="experts chosen by a router are captured in BaseRouter.select_experts, which the CPU path does not run",
    remove_when="the CPU path captures them",
)
def _route(layer: RoutedExperts, x: Tensor, router_logits: Tensor) -> tuple[Tensor, Tensor]:
    """(weights float32 [tokens, top_k], expert ids int32 [tokens, top_k]); reports the ids to vLLM's capturer.

    Weights include the factor by which vLLM would multiply the rounded sum of a token's experts."""
    runner = get_forward_context().no_compile_layers[layer.layer_name]
    router = RouterConfig(
        score=layer.scoring_func,
        num_groups=(layer.num_expert_group or 1) if layer.use_grouped_topk else 1,
        groups_per_token=(layer.topk_group or 1) if layer.use_grouped_topk else 1,
        scaling_factor=layer.routed_scaling_factor * runner.routed_scaling_factor,
        normalize=layer.renormalize,
    )
    weights, expert_ids = choose_experts(router_logits, layer.top_k, router, layer.e_score_correction_bias)
    expert_ids = expert_ids.int()
    capture = runner.router.capture_fn
    if capture is not None:
        capture(expert_ids)
    return weights, expert_ids


def _mix_experts(
    layer: RoutedExperts,
    x: Tensor,
    router_logits: Tensor,
    w13: Tensor,
    w2: Tensor,
    round_operand: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Weighted sum of each token's experts, [tokens, hidden] in x.dtype. w13 [experts, 2 * ffn, hidden] and w2
    [experts, hidden, ffn] multiply activations prepared by ``round_operand`` and round to x.dtype."""
    weights, expert_ids = _route(layer, x, router_logits)
    num_tokens, top_k = expert_ids.shape
    expert_map = getattr(layer, "expert_map", None)
    if expert_map is not None:  # experts of other ranks, which add theirs, multiply by zero here
        expert_ids = expert_map.to(expert_ids.device)[expert_ids.long()]
        weights = weights.masked_fill(expert_ids < 0, 0.0)
        expert_ids = expert_ids.clamp_min(0)
    order = expert_ids.flatten().argsort(stable=True)
    counts = expert_ids.flatten().bincount(minlength=w13.shape[0]).tolist()

    def multiply(operand: Tensor, matrices: Tensor, biases: Tensor | None) -> Tensor:
        parts = zip(operand.split(counts), matrices, strict=True)
        y = torch.cat([float64.matmul(rows, matrix.t()) for rows, matrix in parts]).to(x.dtype)
        return y if biases is None else y + biases.repeat_interleave(torch.tensor(counts), dim=0)

    operand = x if round_operand is None else round_operand(x)
    gate_up = multiply(operand[order // top_k], w13, getattr(layer, "w13_bias", None))
    hidden = _ACTIVATIONS[layer.activation](gate_up)
    result = multiply(hidden if round_operand is None else round_operand(hidden), w2, getattr(layer, "w2_bias", None))
    by_token = torch.empty_like(result)
    by_token[order] = result
    return float64.combine(by_token.view(num_tokens, top_k, -1), weights)


@patches(
    "vllm",
    why="replaces RMSNorm.forward_cpu: vLLM normalizes the residual sum before it rounds it, the trainer after",
    remove_when="vLLM normalizes the rounded sum on a CPU, as its GPU kernels do",
)
def _rms_norm(norm: RMSNorm, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    weight = norm.weight.data if norm.has_weight else torch.ones((), dtype=x.dtype)
    if residual is None:
        return float64.rms_norm(x, weight, norm.variance_epsilon)
    stream = x + residual
    return float64.rms_norm(stream, weight, norm.variance_epsilon), stream


@patches(
    "vllm",
    why="replaces GemmaRMSNorm.forward_cpu and forward_native, for the same reason",
    remove_when="vLLM normalizes the rounded sum on a CPU, as its GPU kernels do",
)
def _zero_centred_norm(norm: GemmaRMSNorm, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    stream = x if residual is None else x + residual
    y = float64.zero_centred_norm(stream, norm.weight.data, norm.variance_epsilon)
    return y if residual is None else (y, stream)


@patches(
    "vllm",
    why="replaces the norms of all query and key heads, whose FP32 sums depend on the batch on a CPU",
    remove_when="vLLM's norm on a CPU gives a token the same bits in every batch",
)
def _norm_all_heads(
    q_norm: MiniMaxText01RMSNormTP, k_norm: MiniMaxText01RMSNormTP, qkv: Tensor, q_size: int, kv_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = qkv.split([q_size, kv_size, kv_size], dim=-1)

    def over_ranks(mean: Tensor) -> Tensor:
        return tensor_model_parallel_all_reduce(mean) / q_norm.tp_world

    def normed(norm: MiniMaxText01RMSNormTP, x: Tensor) -> Tensor:
        return float64.rms_norm(x, norm.weight.data, norm.variance_epsilon, over_ranks if norm.tp_world > 1 else None)

    return normed(q_norm, query), normed(k_norm, key), value


@patches(
    "vllm",
    why="replaces RotaryEmbedding.forward_cpu, whose kernel may fuse a multiplication with an addition",
    remove_when="vLLM's CPU kernel rounds every product",
)
def _rotate(
    rope: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    if not rope.is_neox_style:
        return rope.forward_native(positions, query, key)
    cos, sin = rope.cos_sin_cache[positions.flatten()].float()[:, None].chunk(2, dim=-1)

    def rotated(x: Tensor) -> Tensor:
        heads = x.view(x.shape[0], -1, rope.head_size)
        turned = float64.rotate_halves(heads[..., : rope.rotary_dim], cos, sin)
        return torch.cat([turned, heads[..., rope.rotary_dim :]], dim=-1).view(x.shape)

    return rotated(query), None if key is None else rotated(key)
