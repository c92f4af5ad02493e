"""Weight gradients of all experts of a rank in one kernel of ours: FP8 operands, float32 sums, on Hopper.

DeepGEMM's kernel for the same product finishes a tile, waits until its sums are in memory, and begins the next: where an
expert has a thousand tokens, half the time goes there. Ours adds sums to memory while it multiplies on, and reads each
operand's tile from memory's cache once for two neighbouring tiles. What it adds up, and in what order, is the same.

``weight_gradients.cu`` tells how; NVRTC, which PyTorch brings, compiles it in less than a second when it is first called.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fp8rl.fp8.blockwise import BLOCK

_SOURCE = Path(__file__).with_suffix(".cu")
_THREADS, _STAGES, _LINE = 384, 4, 4 * BLOCK + 32


class _Kernel(NamedTuple):
    launch: torch.cuda._utils._CudaKernel
    num_blocks: int
    shared_bytes: int


def add(
    g_PN: Tensor, g_scale_PN: Tensor, x_PK: Tensor, x_scale_PK: Tensor, offsets: Tensor, out_ENK: Tensor
) -> None:
    """Add g^T x of each expert to ``out_ENK`` float32 [E, N, K], contiguous, on the current stream.

    g float8_e4m3fn [P/128, N, 128] and x [P/128, K, 128] are in columns (expert_kernels.py), with float32 scales
    [P/128, N] and [P/128, K]; ``offsets`` int32 [E + 1] are the rows at which experts begin, and the end of the last.
    N and K are multiples of 128. Raises RuntimeError on a GPU that is not Hopper's.
    """
    num_experts, num_rows, num_columns = out_ENK.shape
    device = out_ENK.device.index
    with torch.cuda.device(device):
        kernel = _kernel(device, 2 if num_columns % (2 * BLOCK) == 0 else 1)
        kernel.launch(
            (kernel.num_blocks, 1, 1), (_THREADS, 1, 1),
            [g_PN, g_scale_PN, x_PK, x_scale_PK, offsets, out_ENK, num_experts, num_rows, num_columns],
            kernel.shared_bytes,
        )  # fmt: skip


@functools.cache
def _kernel(device: int, across: int) -> _Kernel:
    """The kernel for clusters of ``across`` blocks, each of which takes a processor of the GPU."""
    properties = torch.cuda.get_device_properties(device)
    if (properties.major, properties.minor) != (9, 0):
        raise RuntimeError(
            f"FP8 weight gradients are multiplied on Hopper; {properties.name} is sm_{properties.major}"
            f"{properties.minor}. Choose --precision.experts te and --precision.linears te"
        )
    options = [f"-DACROSS={across}", f"-DSTAGES={_STAGES}"]
    launch = torch.cuda._compile_kernel(
        _SOURCE.read_text(), "add_weight_gradients", compute_capability="90a", nvcc_options=options
    )
    stages = _STAGES * (2 * BLOCK * BLOCK + 1024)  # two tiles, and the scales of their lines
    shared_bytes = 1024 + stages + BLOCK * _LINE + 1024  # barriers and sums; and to begin at a multiple of 1024
    launch.set_shared_memory_config(shared_bytes)
    return _Kernel(launch, properties.multi_processor_count // across * across, shared_bytes)
