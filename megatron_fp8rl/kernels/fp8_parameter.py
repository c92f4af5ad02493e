"""FP8 parameters: E4M3 data and one float32 scale per 128x128 block, without a BF16 copy.

Such a parameter is Transformer Engine's ``Float8BlockwiseQTensor``. Its nominal dtype is BF16, to which it can be
dequantized; it stores rowwise data with scales, and a transposed copy of both for dgrad. This module reads the rowwise
part and does not import Transformer Engine, so that weights can be published as they are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fp8rl.kernels.blockwise import BLOCK
from megatron_fp8rl.kernels.compat import rowwise


class Fp8Weight(NamedTuple):
    """Views of a parameter's own memory, as ``fp8.blockwise.quantize_weight`` would make them."""

    data: Tensor  # float8_e4m3fn [N, K]
    scale: Tensor  # float32 [ceil(N / 128), ceil(K / 128)], what restores a block from its bytes


def is_fp8(parameter: Tensor) -> bool:
    """Whether a parameter is FP8 itself."""
    return rowwise(parameter) is not None


def fp8_weight(parameter: Tensor) -> Fp8Weight:
    """The bytes and scales of a parameter that :func:`is_fp8`. Transformer Engine fills rows of scales up to four."""
    data, scales = rowwise(parameter)
    data = data.view(torch.float8_e4m3fn)
    num_rows, num_columns = (-(-size // BLOCK) for size in data.shape)
    return Fp8Weight(data, scales[:num_rows, :num_columns])


def has_nan(data: Tensor) -> Tensor:
    """Whether E4M3 bytes hold a NaN, bool []. Their scales are finite all the same, and there is no infinity."""
    return ((data.view(torch.uint8) & 0x7F) == 0x7F).any()


def plain(parameter: Tensor) -> Tensor:
    """A parameter, detached: itself, or BF16 values of one that is FP8, in new memory.

    BF16 holds what power-of-two scales restore exactly; with float32 scales values are rounded once more.
    """
    return parameter.dequantize() if is_fp8(parameter) else parameter.detach()
