"""FP8 parameters: E4M3 data and one float32 scale per 128x128 block, without a BF16 copy.

They are Transformer Engine ``Float8BlockwiseQTensor`` of nominal dtype BF16, with rowwise data and a transposed copy
for dgrad. This module reads rowwise data without importing Transformer Engine, to publish it without requantization.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fp8rl.kernels.compat import rowwise
from megatron_fp8rl.kernels.types import BLOCK


class Fp8Weight(NamedTuple):
    """Views of a parameter's storage, in the format of ``kernels.blockwise.quantize_weight``."""

    data: Tensor  # float8_e4m3fn [N, K]
    scale: Tensor  # float32 [ceil(N / 128), ceil(K / 128)], dequantization scale of each block


def is_fp8(parameter: Tensor) -> bool:
    return rowwise(parameter) is not None


def fp8_weight(parameter: Tensor) -> Fp8Weight:
    """Bytes and scales of an FP8 parameter, without Transformer Engine's padding of scale rows to multiples of four."""
    data, scales = rowwise(parameter)
    data = data.view(torch.float8_e4m3fn)
    num_rows, num_columns = (-(-size // BLOCK) for size in data.shape)
    return Fp8Weight(data, scales[:num_rows, :num_columns])


def has_nan(data: Tensor) -> Tensor:
    """Whether E4M3 data contains a NaN, bool []. Scales are finite even then, and E4M3 has no infinity."""
    return ((data.view(torch.uint8) & 0x7F) == 0x7F).any()


def plain(parameter: Tensor) -> Tensor:
    """The detached parameter, or a dequantized BF16 copy of an FP8 one; float32 scales round once more."""
    return parameter.dequantize() if is_fp8(parameter) else parameter.detach()
