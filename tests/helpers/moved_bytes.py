"""Bytes that the operations of kernels/fused_moe.py have to move: each input read once, each output written once."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from megatron_fp8rl.kernels import fused_moe as kernels
from megatron_fp8rl.kernels.types import BLOCK, ExpertPermutation, Scales
from megatron_fp8rl.precision.formats import blockwise_format


def output_bytes(
    num_rows: int, num_columns: int, *, rows: bool = False, columns: bool = False, bf16: bool = False
) -> int:
    """Bytes of a ``fused_moe.Quantized`` of [num_rows, num_columns]: with its scales."""
    numbers = num_rows * num_columns
    return (rows + columns) * (numbers + 4 * numbers // BLOCK) + bf16 * 2 * numbers


def permute_quantize_bytes(num_tokens: int, num_rows: int, num_columns: int, **outputs: bool) -> int:
    """Bytes of ``fused_moe.permute_quantize``: tokens in, outputs out, and two index words per row."""
    return 2 * num_tokens * num_columns + output_bytes(num_rows, num_columns, **outputs) + 4 * num_rows


def swiglu_quantize_bytes(num_tokens: int, num_rows: int, width: int, **outputs: bool) -> int:
    """Bytes of ``fused_moe.swiglu_quantize``; ``width`` is F."""
    return 4 * num_tokens * width + output_bytes(num_rows, width, **outputs) + 4 * num_rows


def swiglu_backward_bytes(
    num_tokens: int,
    num_rows: int,
    width: int,
    *,
    activation_columns: bool = False,
    activation_bf16: bool = False,
    **outputs: bool,
) -> int:
    """Bytes of ``fused_moe.swiglu_backward_quantize``; ``width`` is F."""
    activation = output_bytes(num_rows, width, columns=activation_columns, bf16=activation_bf16)
    return 6 * num_tokens * width + output_bytes(num_rows, 2 * width, **outputs) + activation + 4 * num_rows


def unpermute_bytes(num_tokens: int, num_columns: int, *, probs: bool = False) -> int:
    """Bytes of ``fused_moe.unpermute``."""
    return 4 * num_tokens * num_columns + (4 + 4 * probs) * num_tokens


def movement_calls(
    layout: ExpertPermutation, hidden: int, width: int, scales: Scales
) -> Iterator[tuple[str, Callable[[], Any], int]]:
    """(name, call, bytes) of each kernel around the products, forward and backward."""
    from megatron_fp8rl.kernels.gemm import quantized

    num_tokens, num_rows = layout.num_tokens, layout.num_rows

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device="cuda").bfloat16()

    x, y = random(num_tokens, hidden), random(num_rows, hidden)
    h, da, probs = random(num_rows, 2 * width), random(num_rows, width), torch.rand(num_tokens, device="cuda")
    fmt, both = blockwise_format(scales), dict(rows=True, columns=True)
    num_bytes = permute_quantize_bytes(num_tokens, num_rows, hidden, **both)
    yield "permute and quantize", lambda: kernels.permute_quantize(x, layout, fmt, **both), num_bytes
    num_bytes = swiglu_quantize_bytes(num_tokens, num_rows, width, rows=True)
    yield "SwiGLU and quantize", lambda: kernels.swiglu_quantize(h, layout, fmt), num_bytes
    num_bytes = unpermute_bytes(num_tokens, hidden, probs=True)
    yield "unpermute, weighted", lambda: kernels.unpermute(y, layout, probs), num_bytes
    num_bytes = swiglu_backward_bytes(num_tokens, num_rows, width, activation_columns=True, **both)
    call = partial(kernels.swiglu_backward_quantize, da, h, layout, fmt, activation_columns=True, probs=probs)
    yield "SwiGLU backward and quantize", call, num_bytes
    yield "unpermute", lambda: kernels.unpermute(y, layout), unpermute_bytes(num_tokens, hidden)
    shapes = ((len(layout.padded_counts), *shape) for shape in ((2 * width, hidden), (hidden, width)))
    weights = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    num_weights = sum(weight.numel() for weight in weights)
    yield "weights", lambda: [quantized(weight, fmt) for weight in weights], 3 * num_weights + num_weights // 4096
    made = [quantized(weight, fmt) for weight in weights]
    yield "weights, transposed", lambda: [weight.transposed() for weight in made], 2 * num_weights
