"""C sources of this folder, compiled at first use in a fraction of a second, and threads that call them."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

_OPTIONS = "-O3 -march=native -fno-math-errno -ffp-contract=off -shared -fPIC".split()


@functools.cache
def library(name: str) -> ctypes.CDLL | None:
    """The functions of ``NAME.c``; None without a C compiler, or if the source refuses this CPU."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}.so"
        source = Path(__file__).with_name(f"{name}.c")
        command = [os.environ.get("CC", "cc"), *_OPTIONS, str(source), "-o", str(file), "-lm"]
        try:
            subprocess.run(command, capture_output=True, check=True)
            return ctypes.CDLL(str(file))
        except (OSError, subprocess.CalledProcessError):
            return None


def pointer(x: Tensor) -> ctypes.c_void_p:
    """The address of the first element."""
    return ctypes.c_void_p(x.data_ptr())


def threads() -> ThreadPoolExecutor:
    """Threads of this process, as many as torch uses. ctypes releases the GIL."""
    return _pool(os.getpid())


@functools.cache
def _pool(pid: int) -> ThreadPoolExecutor:
    """A forked process has none of its parent's threads."""
    return ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix=f"c-code-{pid}")
