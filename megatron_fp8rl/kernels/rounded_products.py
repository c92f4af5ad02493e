"""BF16 matrix products on a CPU, each sum rounded once: the results of float64 at several times its speed.

``rounded_products.c`` is compiled at first use, in a fraction of a second. It needs a C compiler and a CPU that
multiplies BF16 (AVX-512 BF16: AMD since 2022, Intel's servers since 2020). Without them, or for other shapes,
:func:`multiply` returns None and the caller computes in float64.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

_SOURCE = Path(__file__).with_suffix(".c")
_OPTIONS = "-O3 -march=native -fno-math-errno -shared -fPIC".split()
_WORK_PER_THREAD = 1 << 20  # products; fewer are not worth another thread


def multiply(a_MK: Tensor, b_KN: Tensor) -> Tensor | None:
    """BF16 [M, N]: a b with sums as of float64, rounded once; None if it cannot be computed here."""
    (m, k), n = a_MK.shape, b_KN.shape[1]
    if not a_MK.dtype == b_KN.dtype == torch.bfloat16 or k % 32 or (library := _library()) is None:
        return None
    a, b = a_MK.contiguous(), b_KN.t().contiguous()
    out = a.new_empty(m, n)
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (a, b, out)]
    threads = max(1, min(torch.get_num_threads(), m * n * k // _WORK_PER_THREAD, n))
    sizes = [ctypes.c_ssize_t(n * i // threads) for i in range(threads + 1)]
    parts = [(*pointers, *map(ctypes.c_ssize_t, (m, n, k)), *ends) for ends in itertools.pairwise(sizes)]
    if threads == 1:
        library.multiply(*parts[0])
    else:
        list(_pool(os.getpid()).map(lambda part: library.multiply(*part), parts))  # ctypes releases the GIL
    return out


@functools.cache
def _library() -> ctypes.CDLL | None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rounded_products.so"
        command = [os.environ.get("CC", "cc"), *_OPTIONS, str(_SOURCE), "-o", str(file), "-lm"]
        try:
            subprocess.run(command, capture_output=True, check=True)
            return ctypes.CDLL(str(file))
        except (OSError, subprocess.CalledProcessError):  # no compiler, or another CPU
            return None


@functools.cache
def _pool(pid: int) -> ThreadPoolExecutor:
    """Threads of this process; a forked process has none of its parent's."""
    return ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix=f"products-{pid}")
