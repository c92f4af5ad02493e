"""The FP8 recipes of ``precision/recipes.py`` on Transformer Engine's kernels.

Wgrad GEMMs accumulate directly in Megatron-Core's FP32 gradient buffer. Only this module, ``norm.py`` and
``attention_te.py`` import Transformer Engine's kernels, and only if it is installed.

    fprop  y  = x W^T     TN     x rowwise, W rowwise            quantized once, W once per optimizer step
    dgrad  dx = g W       NN     g rowwise, W columnwise
    wgrad  dW = g^T x     NT     g columnwise, x columnwise      x from the forward pass: saved in FP8, not BF16

A tensor quantized columnwise is transposed in memory, because Hopper's FP8 GEMM needs both operands K-major; with
blockwise scaling it has separate scales. All GEMMs accumulate in FP32 (``use_split_accumulator``): Hopper's fast
accumulation keeps 14 bits between tensor core instructions, fewer than the engine's kernels keep.

MXFP8 has never run on hardware. Both copies of W come from BF16 at once, because the columnwise copy has its own blocks
of 32 rows. Blackwell's GEMM reads it untransposed. Checked against the source of Transformer Engine 2.16.

Infinity saturates to the FP8 maximum here, while the emulation turns its whole block into NaN. NaN stays NaN. Each
expert's tokens are padded with zero rows, which change no amax and no result, to the kernels' alignment.

Shapes: T = tokens, P = tokens including every expert's padding, E = experts (1 for a plain linear), N = output
features, K = input features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformer_engine.pytorch  # noqa: F401  (loads the libraries that the bindings need)
import transformer_engine_torch as tex
from torch import Tensor
from transformer_engine.pytorch.cpp_extensions import general_gemm, general_grouped_gemm
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

from megatron_fp8rl.kernels.blockwise import E4M3, E5M2, Format
from megatron_fp8rl.kernels.fp8_parameter import is_fp8
from megatron_fp8rl.precision.recipes import (
    GRAD,
    INPUT,
    WEIGHT,
    AmaxHistory,
    Blockwise,
    Delayed,
    Mxfp8,
    Recipe,
    Tensorwise,
)
from megatron_fp8rl.trainer.model.weight_cache import WeightCache
from megatron_fp8rl.trainer.optimizer.grad_buffers import is_fused, no_gradients
from megatron_fp8rl.upstream import patches

_TE_TYPE = {E4M3: tex.DType.kFloat8E4M3, E5M2: tex.DType.kFloat8E5M2}


@dataclass(frozen=True)
class _Call:
    recipe: Recipe | None
    splits: list[int]  # [E] tokens per expert
    is_grouped: bool
    history: AmaxHistory | None
    cache: WeightCache
    block_rows: Tensor | None
    record: bool  # whether gradients are needed

    @property
    def multiple(self) -> int:
        """Alignment of tokens per expert, and of the sides of a weight."""
        return 1 if self.recipe is None else 32 if isinstance(self.recipe, Mxfp8) else 16

    @property
    def padded(self) -> list[int]:
        return [-(-n // self.multiple) * self.multiple for n in self.splits]


def te_linear(
    x_TK: Tensor,
    weights: Sequence[Tensor],
    recipe: Recipe | None,
    *,
    splits: Sequence[int] | None = None,
    history: AmaxHistory | None = None,
    cache: WeightCache | None = None,
    block_rows: Tensor | None = None,
) -> Tensor:
    """y [T, N] = x W^T, differentiable in x and the weights; :func:`precision.recipes.quantized_linear` on a GPU.

    ``weights`` are E matrices [N, K], ``splits`` [E] the tokens of each, in order. ``cache`` keeps the quantized
    weights for the next call; ``block_rows`` int64 [N] is the row order of W in which blocks are formed. Without a
    recipe the operands are BF16. A gradient accumulated in ``main_grad`` sets ``grad_added_to_main_grad``, as in
    Megatron-Core's linears. Raises ValueError for shapes that FP8 tensor cores do not support.
    """
    num_rows, num_columns = weights[0].shape
    call = _Call(
        recipe=recipe,
        splits=list(splits) if splits is not None else [x_TK.shape[0]],
        is_grouped=splits is not None,
        history=history,
        cache=cache or WeightCache(),
        block_rows=block_rows if recipe is not None else None,
        record=torch.is_grad_enabled(),
    )
    if num_rows % call.multiple or num_columns % call.multiple:
        raise ValueError(
            f"a weight of {num_rows} x {num_columns} cannot be multiplied in FP8: both sizes must be multiples of "
            f"{call.multiple}. Change the model's sizes or the degree of tensor parallelism, or keep its layer in BF16"
        )
    return _TeLinear.apply(x_TK, call, *weights)


@patches(
    "transformer-engine",
    why="calls general_gemm, quantizers and tex.DType, which are internal to Transformer Engine and may change",
    remove_when="transformer_engine.pytorch has functional quantized GEMMs",
)
class _TeLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, call: _Call, *weights: Tensor) -> Tensor:
        needs_dw = call.record and any(ctx.needs_input_grad[2:])
        ctx.call, ctx.weights, ctx.x, ctx.shape = call, weights, None, x_TK.shape
        y = x_TK.new_empty(x_TK.shape[0], weights[0].shape[0])
        if not x_TK.shape[0]:
            if isinstance(call.recipe, Delayed):
                _quantized_weights(weights, call)  # to record their amax
            return y
        x_PK = _pad(x_TK, call.splits, call.padded)
        if call.recipe is None:
            x, w = list(x_PK.split(call.padded)), list(weights)
            ctx.save_for_backward(*([x_PK] if needs_dw else []))
        else:
            x = _quantize_tokens(x_PK, call, INPUT, E4M3, columns=needs_dw)
            w = _quantized_weights(weights, call)
            ctx.w = w
        y_PN = y if call.padded == call.splits else y.new_empty(sum(call.padded), y.shape[1])
        _multiply(w, x, y_PN, call, layout="TN")
        if call.recipe is not None and needs_dw:
            for part in x:
                part.update_usage(rowwise_usage=False, columnwise_usage=True)
            ctx.x = x
        _unpad(y_PN, y, call)
        return y if call.block_rows is None else y[:, call.block_rows.argsort()]

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple:
        call, weights = ctx.call, ctx.weights
        needs_dx, needs_dw = ctx.needs_input_grad[0], any(ctx.needs_input_grad[2:])
        dx = grad_TN.new_empty(ctx.shape) if needs_dx else None
        if not ctx.shape[0]:
            return dx, None, *(no_gradients(weights) if needs_dw else [None] * len(weights))
        if call.block_rows is not None:
            grad_TN = grad_TN[:, call.block_rows]
        grad_PN = _pad(grad_TN, call.splits, call.padded)
        if call.recipe is None:
            grad, w = list(grad_PN.split(call.padded)), list(weights)
            x = list(ctx.saved_tensors[0].split(call.padded)) if needs_dw else None
        else:
            grad = _quantize_tokens(grad_PN, call, GRAD, call.recipe.grad_format, columns=needs_dw)
            w, x = ctx.w, ctx.x
            ctx.w = ctx.x = None  # frees the memory when this function returns, not when the graph is freed
        if dx is not None:
            if call.recipe is not None:
                for matrix in w:
                    matrix.update_usage(columnwise_usage=True)
            dx_PK = dx if call.padded == call.splits else dx.new_empty(sum(call.padded), dx.shape[1])
            _multiply(w, grad, dx_PK, call, layout="NN")
            _unpad(dx_PK, dx, call)
        return dx, None, *(_weight_gradients(weights, x, grad, call) if needs_dw else [None] * len(weights))


def _pad(x_TK: Tensor, splits: list[int], padded: list[int]) -> Tensor:
    """[T, ...] -> [P, ...]: append zero rows to each expert's tokens."""
    x_TK = x_TK.contiguous()
    if padded == splits:
        return x_TK
    x_PK = x_TK.new_empty(sum(padded), x_TK.shape[1])
    tex.fused_multi_row_padding(x_TK, x_PK, splits, padded)
    return x_PK


def _unpad(y_PN: Tensor, y_TN: Tensor, call: _Call) -> None:
    """Copy [P, N] without the padding of :func:`_pad` to [T, N]; a no-op without padding."""
    if y_PN is not y_TN:
        tex.fused_multi_row_unpadding(y_PN, y_TN, call.padded, call.splits)


def _multiply(w: list, x: list, out: Tensor, call: _Call, *, layout: str) -> None:
    """``out`` [P, N] = x W^T (TN), or ``out`` [P, K] = g W (NN), one GEMM per expert."""
    options = dict(layout=layout, grad=layout == "NN", use_split_accumulator=True)
    if call.is_grouped:
        none = [None] * len(w)
        general_grouped_gemm(w, x, [out], none, out.dtype, m_splits=call.padded, single_output=True, **options)
    else:
        general_gemm(w[0], x[0], out_dtype=out.dtype, out=out, **options)


def _weight_gradients(weights: Sequence[Tensor], x: list, grad: list, call: _Call) -> list[Tensor | None]:
    """dW [N, K] of each weight; if it has a ``main_grad``, accumulates there and returns a placeholder."""
    fused = is_fused(weights[0])
    reorder = call.block_rows is not None
    if fused and not reorder:
        out = [weight.main_grad for weight in weights]
    else:
        dtype = torch.float32 if fused else weights[0].dtype
        out = list(torch.empty(len(weights), *weights[0].shape, dtype=dtype, device=weights[0].device))
    options = dict(layout="NT", grad=True, use_split_accumulator=True, accumulate=fused and not reorder)
    if call.is_grouped:
        none = [None] * len(weights)
        general_grouped_gemm(x, grad, out, none, out[0].dtype, m_splits=call.padded, **options)
    else:
        general_gemm(x[0], grad[0], out_dtype=out[0].dtype, out=out[0], **options)
    if not fused:
        return out if not reorder else [part[call.block_rows.argsort()] for part in out]
    if reorder:
        weights[0].main_grad.index_add_(0, call.block_rows, out[0].to(weights[0].main_grad.dtype))
    return no_gradients(weights)


def _quantizers(
    recipe: Recipe, fmt: Format, num: int, *, columns: bool, is_weight: bool, scales_E: Tensor | None = None
) -> tuple[list, Tensor | None]:
    """(one quantizer per tensor, FP32 [num] that receives their amax under delayed scaling) for ``num`` tensors."""
    options = dict(rowwise=True, columnwise=columns)
    te_type = _TE_TYPE[fmt]
    amax_E = None
    match recipe:
        case Mxfp8():
            quantizers = [MXFP8Quantizer(te_type, **options)] * num
        case Blockwise():
            # Block scales as in kernels/blockwise.py: no lower bound on amax, and 1 for a block of zeros.
            quantizer = Float8BlockQuantizer(
                te_type,
                amax_epsilon=0.0,
                force_pow_2_scales=recipe.fmt.scale_kind == "pow2",
                block_scaling_dim=2 if is_weight else 1,
                **options,
            )
            quantizers = [quantizer] * num
        case Delayed():
            assert scales_E is not None
            amax_E = torch.zeros_like(scales_E)
            quantizers = [
                Float8Quantizer(scales_E[i : i + 1], amax_E[i : i + 1], te_type, **options) for i in range(num)
            ]
        case Tensorwise():
            device = torch.device("cuda", torch.cuda.current_device())
            quantizers = [Float8CurrentScalingQuantizer(te_type, device, **options)] * num
        case _:
            raise TypeError(f"{type(recipe).__name__} is not a recipe of Transformer Engine")
    for quantizer in quantizers:
        quantizer.internal = True  # plain containers of bytes and scales, without the cost of a tensor subclass
    return quantizers, amax_E


def _delayed_scales(call: _Call, tensor: int, fmt: Format, parts: Sequence[Tensor]) -> Tensor | None:
    """FP32 [E] multipliers from the amax history, or from the current amax if it is empty; None under other recipes."""
    recipe, history = call.recipe, call.history
    if not isinstance(recipe, Delayed):
        return None
    assert history is not None, "delayed scaling needs the history of its linear"
    amax_E = recipe.past_amax(history, tensor)
    if not history.is_filled[tensor]:
        zero = amax_E.new_zeros(())
        own_E = torch.stack([part.detach().abs().amax().float() if part.numel() else zero for part in parts])
        amax_E = torch.where(amax_E > 0, amax_E, own_E)
    return recipe.scale(amax_E, fmt)


def _quantize_tokens(x_PK: Tensor, call: _Call, tensor: int, fmt: Format, *, columns: bool) -> list:
    scales_E = _delayed_scales(call, tensor, fmt, x_PK.split(call.padded))
    quantizers, amax_E = _quantizers(
        call.recipe, fmt, len(call.padded), columns=columns, is_weight=False, scales_E=scales_E
    )
    parts = tex.split_quantize(x_PK, call.padded, quantizers)
    if amax_E is not None and call.record:
        call.history.record(tensor, amax_E)
    return parts


@dataclass
class _QuantizedWeights:
    matrices: list
    amax_E: Tensor | None  # under delayed scaling
    is_recorded: bool = False  # whether ``amax_E`` is in this step's history


def _quantized_weights(weights: Sequence[Tensor], call: _Call) -> list:
    """FP8 parameters themselves, or the cache, to which the first backward pass adds columnwise data."""
    if is_fp8(weights[0]):
        return list(weights)

    def quantize() -> _QuantizedWeights:
        matrices = [weight.detach() for weight in weights]
        if call.block_rows is not None:
            matrices = [matrix[call.block_rows] for matrix in matrices]
        scales_E = _delayed_scales(call, WEIGHT, E4M3, matrices)
        quantizers, amax_E = _quantizers(
            call.recipe,
            E4M3,
            len(matrices),
            columns=isinstance(call.recipe, Mxfp8),  # cannot be made from rows later
            is_weight=True,
            scales_E=scales_E,
        )
        return _QuantizedWeights(tex.multi_tensor_quantize(matrices, quantizers), amax_E)

    made = call.cache.get(weights, quantize)
    if made.amax_E is not None and call.record and not made.is_recorded:
        call.history.record(WEIGHT, made.amax_E)
        made.is_recorded = True
    return made.matrices


@torch.no_grad()
def fp8_tensor(weight: Tensor, recipe: Blockwise) -> Tensor:
    """Quantize a BF16 matrix [N, K] to an FP8 tensor for a parameter (``kernels/fp8_parameter.py``), rowwise only.
    Megatron-Core makes columnwise data after it gathers new rows; an earlier backward pass makes it on demand."""
    (quantizer,), _ = _quantizers(recipe, E4M3, 1, columns=False, is_weight=True)
    quantizer.internal = False  # a tensor subclass, because a parameter must be a tensor
    return quantizer(weight.detach().contiguous())
