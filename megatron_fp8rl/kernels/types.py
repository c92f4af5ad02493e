"""Constants and dataclasses shared by torch, Triton and CUDA kernels. Imports torch only for type checkers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_fp8rl.precision.formats import QuantFormat

BLOCK = 128  # values that share a scale: 1 x 128 of an activation, 128 x 128 of a weight
E4M3_MAX = 448.0  # the largest E4M3 number
DELTA_CHUNK = 64  # tokens of a chunk of a gated delta net
UNIT = 2.0**44  # of integer sums of exponentials: sums of up to 2^19 terms, each at most 1, are below 2^63

Scales = Literal["pow2", "fp32"]
"""How a block's scale is chosen: rounded up to a power of two, or the FP32 quotient."""

ScaleKind = Literal["pow2", "fp32", "e8m0"]
"""e8m0: as pow2, stored in one byte. A block of zeros has the smallest scale, 2^-127."""


def block_scales(fmt: QuantFormat) -> Scales:
    """The kind of scales of a format. Raises ValueError for a format that the blockwise kernels do not support."""
    is_blockwise = fmt.weight_block == (BLOCK, BLOCK) and fmt.element == "float8_e4m3fn"
    if fmt.scale_kind is None or fmt.scale_kind == "e8m0" or not is_blockwise:
        raise ValueError(f"format {fmt.name}: no kernel supports it; choose a blockwise format, or add a kernel")
    return fmt.scale_kind


@dataclass(frozen=True, slots=True)
class ExpertPermutation:
    """Maps T rows sorted by expert to P padded rows, in which each expert starts at a multiple of 128."""

    num_tokens: int  # T
    num_rows: int  # P, a multiple of 128: exact if the host has the counts, else an upper bound
    offsets: Tensor  # int32 [E + 1], first row of each expert, then the end of the last
    padded_counts: Tensor  # int32 [E], padded rows per expert: DeepGEMM's ``ks_tensor``
    experts: Tensor  # int32 [P], the expert of each row, -1 for padding: DeepGEMM's ``m_indices``
    rows: Tensor  # int32 [P], the token of each row, -1 for padding
    positions: Tensor  # int32 [T], the row of each token, -1 for tokens after those of the last expert
    host_counts: tuple[int, ...] | None  # padded_counts if known on the host: DeepGEMM's ``ks``
    in_matrix: bool = False  # store the columns of the only expert as one matrix
    has_all_tokens: bool = False  # True if every token has a row and the host can rely on it
    sources: Tensor | None = None  # int32 [P], the row of the permuted tensor, -1 for padding; None: ``rows``
    num_sources: int = 0  # rows of the permuted tensor, with ``sources``


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows quantized for the GEMMs, to be sent between ranks; the values are BF16 exactly."""

    data: Tensor  # uint8 [T, width]: a row's E4M3 bytes, the exponents of its scales (powers of two), and padding
    num_features: int

    @staticmethod
    def width(num_features: int) -> int:
        """Bytes of a row: those behind the features are a multiple of 16, so that rows are aligned."""
        return num_features + -(-num_features // BLOCK // 16) * 16


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix [P, K] in the requested orientations; fused_moe.py describes their layouts."""

    rows: Tensor | None = None
    row_scales: Tensor | None = None
    columns: Tensor | None = None
    column_scales: Tensor | None = None
    bf16: Tensor | None = None  # [P, K], the values before quantization


@dataclass(frozen=True, slots=True)
class SwigluGradients:
    dh: Quantized  # [P, 2F], gate | up
    activation: Quantized  # [P, F], silu(gate) * up, times probs if any: input of the fc2 wgrad
    dprobs: Tensor | None  # float32 [T]
