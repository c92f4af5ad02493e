"""Experts on grouped GEMMs, one kernel for all local experts, in blockwise FP8 or BF16.

In: tokens sorted by expert, or unsorted from ``GatherDispatcher``, and router weights p. Out: expert outputs times p,
and the gradients of both. Parameters are those of ``GroupedLinear``, so checkpoints and the exporter are unaffected.

    forward     x, rows padded to whole blocks and quantized -> fc1 -> h -> SwiGLU, quantized -> fc2 -> times p
    backward    dy, padded and quantized -> fc2 -> da -> SwiGLU backward with p: dh and (p a), quantized -> fc1 -> dx
                dW2 += dy^T (p a)        dW1 += dh^T x        dp = sum(a da)

``fused_moe.py`` permutes and quantizes, ``gemm.py`` multiplies, wgrad directly into Megatron-Core's FP32 gradient
buffer. Forward matches the engine. The same bytes enter the same DeepGEMM kernels, a row's bits do not depend on other
rows, and p is applied to an expert's output. Backward computes the gradient of p as fc2's input gradient times fc2's
input, so only h and columnwise FP8 x are saved. Unsorted tokens are read by index. Here a token's outputs and the
gradients of its copies are then summed, and ranks that share experts exchange sums and gradients.

Ranks that exchange tokens, and BF16 wgrad, need the tokens per expert on the host; other work is queued before that
wait. Nothing else here waits for the GPU, and no kernel is launched per expert. In blockwise FP8, NaN or infinity turns
its whole block into NaN, and every output that depends on the block.

Shapes: T = routed tokens (a token counts once per expert), P = rows with each expert's padded to multiples of 128, E =
experts of this rank, H = hidden size, F = features between the two linears on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Literal

import torch
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import Tensor

from megatron_fp8rl.kernels.expert_slots import Choice, sum_rows
from megatron_fp8rl.kernels.fused_moe import (
    expert_permutation,
    permute_quantize,
    swiglu_backward_quantize,
    swiglu_quantize,
    unpermute,
)
from megatron_fp8rl.kernels.gemm import (
    Fp8,
    add_weight_gradients,
    add_weight_gradients_fp8,
    multiply,
    multiply_fp8,
    multiply_fp8_to_tokens,
    quantized,
)
from megatron_fp8rl.kernels.types import ExpertPermutation, Packed, Quantized
from megatron_fp8rl.precision.formats import QuantFormat
from megatron_fp8rl.trainer.optimizer.grad_buffers import is_fused
from megatron_fp8rl.upstream import patches

_LEARNS, _GRADIENT = (
    attrgetter("requires_grad"),
    attrgetter("main_grad"),
)  # attrgetter avoids a Python loop over hundreds of weights
_dummies: dict[tuple, Tensor] = {}


@patches(
    "megatron-core",
    why="overrides forward: all experts of a rank run in one call of grouped GEMMs",
    remove_when="TEGroupedMLP supports DeepGEMM's grouped GEMMs",
)
class GroupedExperts(TEGroupedMLP):
    """The experts of this rank, with operands in ``fmt``, and in ``wgrad`` for the wgrad of FP8 linears.
    ``applies_router_weights``: here, not in combine; the gradients are equal (``kernels/combine.py``)."""

    def __init__(
        self,
        *args: Any,
        fmt: QuantFormat,
        wgrad: Literal["fp8", "bf16"] = "fp8",  # bf16: to compare with, in tests and benchmarks
        applies_router_weights: bool = True,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.fmt, self.wgrad, self.applies_router_weights = fmt, wgrad, applies_router_weights

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor | Choice, probs: Tensor) -> tuple[Tensor, None]:
        """Weighted expert outputs BF16 [T, H] for hidden BF16 [T, H], sorted by expert, and probs [T].

        ``tokens_per_expert``: integers [E], on the host to avoid a device sync. With a :class:`Choice` for the tokens
        of all ranks: hidden [tokens, H] in any order -> sums of each token's outputs [tokens, H]; collective over the
        ranks that share experts."""
        linears = self.linear_fc1, self.linear_fc2
        halves = tuple(linear.weights for linear in linears)
        edges = _edges(*halves)
        matrices = tuple(map(self._matrices, linears, halves))
        exchange = all_tokens = rows_TK = None
        if isinstance(tokens_per_expert, Choice):
            slots = tokens_per_expert.slots(self.config.moe_router_topk)
            layout, rows_TK, probs = slots.layout, slots.rows_TK, slots.probs_R
            exchange, all_tokens = tokens_per_expert.exchange, tokens_per_expert.all_tokens
        else:
            on_device = tokens_per_expert.to(hidden.device, non_blocking=True)
            layout = expert_permutation(on_device, hidden.shape[0], tokens_per_expert.tolist())
        call = _Call(
            layout=layout,
            rows_TK=rows_TK,
            exchange=exchange,
            fmt=self.fmt,
            wgrad_fp8=self.wgrad == "fp8",
            record=torch.is_grad_enabled(),
            applies_router_weights=self.applies_router_weights,
        )
        return _GroupedExperts.apply(
            hidden.contiguous(), probs.float(), call, matrices, halves, all_tokens, *edges
        ), None

    def _matrices(self, linear: Any, weights: Sequence[Tensor]) -> _Weights:
        return linear.cache.get(weights, partial(_Weights, weights, self.fmt))

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """Of all experts, of fc1 and then of fc2."""
        return *self.linear_fc1.weights, *self.linear_fc2.weights

    @property
    def reads_copies(self) -> bool:
        return self.fmt.is_quantized

    def keep_copies(self) -> None:
        for linear in (self.linear_fc1, self.linear_fc2):
            self._matrices(linear, linear.weights)
            linear.cache.pin()

    def drop_copies(self) -> None:
        for linear in (self.linear_fc1, self.linear_fc2):
            linear.cache.renew()


@dataclass(frozen=True)
class _Call:
    layout: ExpertPermutation
    fmt: QuantFormat
    wgrad_fp8: bool
    record: bool  # whether gradients are needed
    applies_router_weights: bool = True  # whether outputs are multiplied by p; backward is the same
    rows_TK: Tensor | None = None  # of each token, whose outputs are added here; None: combine adds them
    exchange: Any = None  # of the ranks that share experts and gather tokens

    def operands(self, *, wgrad: bool, columns: str = "columns", bf16: str = "bf16") -> dict[str, bool]:
        """The formats of a matrix that only wgrad needs, as arguments for fused_moe.py."""
        return {columns: wgrad and self.in_columns, bf16: wgrad and not self.in_columns}

    def forms(self, *, wgrad: bool) -> dict[str, bool]:
        """The formats of a matrix needed for fprop or dgrad, and with ``wgrad`` also for wgrad."""
        forms = self.operands(wgrad=wgrad)
        return forms | {"rows": True} if self.fmt.is_quantized else {"rows": False, "columns": False, "bf16": True}

    @property
    def in_columns(self) -> bool:
        """Whether wgrad operands are FP8 (columnwise)."""
        return self.wgrad_fp8 and self.fmt.is_quantized

    def gathered(self, x_TH: Tensor) -> Tensor | Packed:
        return x_TH.contiguous() if self.exchange is None else self.exchange.gathered(x_TH)

    def added(self, sums: Tensor) -> Tensor:
        """This rank's tokens' sums over the experts of all ranks."""
        return sums if self.exchange is None else self.exchange.added(sums)

    def empty_sum(self, like_TH: Tensor) -> Tensor:
        """:meth:`added` of a rank that has no row."""
        num_tokens = len(like_TH) if self.exchange is None else self.layout.num_sources
        return self.added(like_TH.new_zeros(num_tokens, like_TH.shape[1]))

    def multiply(self, x: Quantized, weights: _Weights, *, transposed: bool = False) -> Tensor:
        """BF16 [P, N]: x times each expert's matrix or its transpose."""
        if not self.fmt.is_quantized:
            return multiply(x.bf16, weights.bf16(transposed), self.layout)
        return multiply_fp8(Fp8(x.rows, x.row_scales), weights.fp8(transposed), self.layout, torch.bfloat16)

    def multiply_to_tokens(
        self, x: Quantized, weights: _Weights, probs: Tensor | None = None, *, transposed: bool = False
    ) -> Tensor:
        """BF16 [T, N] without padding rows, or with ``rows_TK`` the sums of each token's rows, [tokens, N]. Applies
        ``probs``, if not None, unless combine does."""
        of_rows, of_sums = (probs, None) if self.applies_router_weights else (None, probs)
        if not self.fmt.is_quantized:
            out = unpermute(self.multiply(x, weights, transposed=transposed), self.layout, of_rows)
        else:
            out = multiply_fp8_to_tokens(Fp8(x.rows, x.row_scales), weights.fp8(transposed), self.layout, of_rows)
        return out if self.rows_TK is None else sum_rows(out, self.rows_TK, of_sums)


class _GroupedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        probs_T: Tensor,
        call: _Call,
        linears: tuple[_Weights, ...],
        halves: tuple[Sequence[Tensor], ...],
        all_tokens: Tensor | Packed | None,
        *edges: Tensor,
    ) -> Tensor:
        """``linears`` and ``halves``: the matrices and the weights of fc1 and of fc2. ``all_tokens``: x of all ranks,
        if several share experts. ``edges``: the weights autograd tracks, equally many of each."""
        layout, fmt = call.layout, call.fmt
        needs_dw = call.record and any(ctx.needs_input_grad[6:])
        ctx.call, ctx.halves = call, halves
        if not layout.num_rows:
            return call.empty_sum(x_TH)
        fc1, fc2 = linears
        x = permute_quantize(x_TH if all_tokens is None else all_tokens, layout, fmt, **call.forms(wgrad=needs_dw))
        h_P2F = call.multiply(x, fc1)
        x = _kept(x, call) if needs_dw else None
        if call.record:
            # save_for_backward keeps tensors until backward returns; these attributes are freed once read.
            ctx.linears, ctx.x, ctx.h = linears, x, h_P2F
            ctx.save_for_backward(probs_T)
        a = swiglu_quantize(h_P2F, layout, fmt, **call.forms(wgrad=False))
        del x, h_P2F
        return call.added(call.multiply_to_tokens(a, fc2, probs_T))

    @staticmethod
    def backward(ctx: Any, dy_TH: Tensor) -> tuple:
        call, layout, fmt = ctx.call, ctx.call.layout, ctx.call.fmt
        needs_dx, needs_dw = ctx.needs_input_grad[0], any(ctx.needs_input_grad[6:])
        num_edges = len(ctx.needs_input_grad[6:]) // 2
        dw1 = dw2 = [None] * num_edges
        all_tokens = call.gathered(dy_TH)
        if not layout.num_rows:
            if needs_dw:
                dw1, dw2 = (_add_to_gradients(half, num_edges) for half in ctx.halves)
            dprobs = dy_TH.new_zeros(layout.num_tokens, dtype=torch.float32)
            return call.empty_sum(dy_TH) if needs_dx else None, dprobs, None, None, None, None, *dw1, *dw2
        (probs_T,) = ctx.saved_tensors
        (fc1, fc2), x, h_P2F = ctx.linears, ctx.x, ctx.h
        ctx.linears = ctx.x = ctx.h = None
        dy = permute_quantize(all_tokens, layout, fmt, **call.forms(wgrad=needs_dw))
        del all_tokens
        da_PF = call.multiply(dy, fc2, transposed=True)
        dy = _kept(dy, call) if needs_dw else None
        activation = call.operands(wgrad=needs_dw, columns="activation_columns", bf16="activation_bf16")
        back = swiglu_backward_quantize(
            da_PF, h_P2F, layout, fmt, probs=probs_T, **call.forms(wgrad=needs_dw), **activation
        )
        del da_PF, h_P2F
        dh, a, dprobs = back.dh, back.activation, back.dprobs
        del back
        if needs_dw:
            dw2 = _add_to_gradients(ctx.halves[1], num_edges, lambda out: _add_products(dy, a, call, out))
            del dy, a
            dw1 = _add_to_gradients(ctx.halves[0], num_edges, lambda out: _add_products(dh, x, call, out))
            del x
        dx_TH = call.added(call.multiply_to_tokens(dh, fc1, transposed=True)) if needs_dx else None
        return dx_TH, dprobs, None, None, None, None, *dw1, *dw2


def _kept(x: Quantized, call: _Call) -> Quantized:
    """Keep only the format of a matrix that wgrad needs."""
    return Quantized(columns=x.columns, column_scales=x.column_scales) if call.in_columns else Quantized(bf16=x.bf16)


def _add_products(grad: Quantized, x: Quantized, call: _Call, out_ENK: Tensor) -> None:
    """Add g^T x of each expert to ``out_ENK``."""
    if call.in_columns:
        operands = (Fp8(part.columns, part.column_scales) for part in (grad, x))
        add_weight_gradients_fp8(*operands, call.layout, out_ENK)
    else:
        add_weight_gradients(grad.bf16, x.bf16, call.layout, out_ENK)


class _Weights:
    """The matrices of one linear's experts as one tensor, in the GEMM's dtype."""

    def __init__(self, weights: Sequence[Tensor], fmt: QuantFormat):
        matrices_ENK = stacked(weights)
        if matrices_ENK is None:
            matrices_ENK = torch.stack([weight.detach() for weight in weights])
        self._bf16_ENK = None if fmt.is_quantized else matrices_ENK
        self._fp8 = quantized(matrices_ENK, fmt) if fmt.is_quantized else None
        self._transposed: Fp8 | None = None

    def bf16(self, transposed: bool) -> Tensor:
        return self._bf16_ENK.transpose(1, 2) if transposed else self._bf16_ENK

    def fp8(self, transposed: bool) -> Fp8:
        """``transposed``, for dgrad, is made by the first backward pass, when activations start to be freed."""
        if transposed and self._transposed is None:
            self._transposed = self._fp8.transposed()
        return self._transposed if transposed else self._fp8


def stacked(tensors: Sequence[Tensor]) -> Tensor | None:
    """View the tensors as one [E, N, K] tensor; None if they are not adjacent in memory, in order."""
    first = tensors[0]
    size, step = first.numel(), first.numel() * first.element_size()
    addresses = list(map(Tensor.data_ptr, tensors))
    begin = first.storage_offset() * first.element_size()
    in_one_storage = begin + len(tensors) * step <= first.untyped_storage().nbytes()
    is_in_order = addresses == list(range(addresses[0], addresses[0] + len(tensors) * step, step))
    if not in_one_storage or not is_in_order or not all(map(Tensor.is_contiguous, tensors)):
        return None
    return first.detach().as_strided((len(tensors), *first.shape), (size, *first.stride()))


def _edges(fc1: Sequence[Tensor], fc2: Sequence[Tensor]) -> Sequence[Tensor]:
    """The weights passed to autograd: one per linear if the gradient buffers can be notified about the others. For
    hundreds of small experts, a function and a hook per weight take the host longer than their GEMMs take the GPU."""
    is_told = all(is_fused(half[0]) and hasattr(half[0], "gradients_ready") for half in (fc1, fc2))
    if is_told and all(map(_LEARNS, (*fc1, *fc2))):
        return fc1[0], fc2[0]
    return *fc1, *fc2


def _add_to_gradients(
    weights: Sequence[Tensor], num_edges: int, add: Callable[[Tensor], None] | None = None
) -> list[Tensor]:
    """Let ``add`` accumulate weight gradients [E, N, K] in the parameters' ``main_grad``; None adds nothing. Returns
    placeholder gradients for the first ``num_edges`` weights; without Megatron-Core's gradient buffer, the gradients in
    the parameters' dtype."""
    first = weights[0]
    fused = is_fused(first)
    buffers = list(map(_GRADIENT, weights)) if fused else []
    out = stacked(buffers) if fused and buffers[0].dtype == torch.float32 else None
    is_apart = out is None
    if is_apart:
        out = torch.zeros(len(weights), *first.shape, dtype=torch.float32, device=first.device)
    if add is not None:
        add(out)
    if not fused:
        return list(out.to(first.dtype).unbind())
    if is_apart:
        for buffer, gradient in zip(buffers, out, strict=True):
            buffer.add_(gradient.to(buffer.dtype))
    for weight in weights:
        weight.grad_added_to_main_grad = True
    if num_edges < len(weights):
        first.gradients_ready(weights[num_edges:])
    dummy = _dummy(first)
    return [dummy.detach() for _ in range(num_edges)]


def _dummy(weight: Tensor) -> Tensor:
    """Placeholder gradient that is never read: Megatron-Core's hooks require it when reductions overlap with backward.
    All experts share its memory, which would otherwise be as large as their weights."""
    key = weight.shape, weight.dtype, weight.device
    if key not in _dummies:
        _dummies[key] = torch.empty_like(weight).detach()
    return _dummies[key]
