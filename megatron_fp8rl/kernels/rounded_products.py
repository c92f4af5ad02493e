"""BF16 matrix products on a CPU, each sum rounded once: the results of float64 at several times its speed.

``rounded_products.c`` needs a C compiler and a CPU that multiplies BF16 (AVX-512 BF16: AMD since 2022, Intel's servers
since 2020). Without them, or for other shapes, :func:`multiply` returns None and the caller computes in float64.
"""

import ctypes
import itertools

import torch
from torch import Tensor

from megatron_fp8rl.kernels import c_code

_WORK_PER_THREAD = 1 << 20  # products; fewer are not worth another thread


def multiply(a_MK: Tensor, b_KN: Tensor) -> Tensor | None:
    """BF16 [M, N]: a b with sums as of float64, rounded once; None if it cannot be computed here."""
    (m, k), n = a_MK.shape, b_KN.shape[1]
    if (
        not a_MK.dtype == b_KN.dtype == torch.bfloat16
        or k % 32
        or (library := c_code.library("rounded_products")) is None
    ):
        return None
    a, b = a_MK.contiguous(), b_KN.t().contiguous()
    out = a.new_empty(m, n)
    pointers = list(map(c_code.pointer, (a, b, out)))
    threads = max(1, min(torch.get_num_threads(), m * n * k // _WORK_PER_THREAD, n))
    sizes = [ctypes.c_ssize_t(n * i // threads) for i in range(threads + 1)]
    parts = [(*pointers, *map(ctypes.c_ssize_t, (m, n, k)), *ends) for ends in itertools.pairwise(sizes)]
    if threads == 1:
        library.multiply(*parts[0])
    else:
        list(c_code.threads().map(lambda part: library.multiply(*part), parts))
    return out
