"""Bytes that the operations of kernels/fused_moe.py have to move: each input read once, each output written once."""

from __future__ import annotations

from megatron_fp8rl.kernels.blockwise import BLOCK


def output_bytes(
    num_rows: int, num_columns: int, *, rows: bool = False, columns: bool = False, bf16: bool = False
) -> int:
    """Bytes of a ``fused_moe.Quantized`` of [num_rows, num_columns]: with its scales."""
    numbers = num_rows * num_columns
    return (rows + columns) * (numbers + 4 * numbers // BLOCK) + bf16 * 2 * numbers


def permute_quantize_bytes(num_tokens: int, num_rows: int, num_columns: int, **outputs: bool) -> int:
    """Bytes that ``fused_moe.permute_quantize`` has to move: tokens in, outputs out, and two index words to a row."""
    return 2 * num_tokens * num_columns + output_bytes(num_rows, num_columns, **outputs) + 4 * num_rows


def swiglu_quantize_bytes(num_tokens: int, num_rows: int, width: int, **outputs: bool) -> int:
    """Bytes that ``fused_moe.swiglu_quantize`` has to move; ``width`` is F."""
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
    """Bytes that ``fused_moe.swiglu_backward_quantize`` has to move; ``width`` is F."""
    activation = output_bytes(num_rows, width, columns=activation_columns, bf16=activation_bf16)
    return 6 * num_tokens * width + output_bytes(num_rows, 2 * width, **outputs) + activation + 4 * num_rows


def unpermute_bytes(num_tokens: int, num_columns: int, *, probs: bool = False) -> int:
    """Bytes that ``fused_moe.unpermute`` has to move."""
    return 4 * num_tokens * num_columns + (4 + 4 * probs) * num_tokens
