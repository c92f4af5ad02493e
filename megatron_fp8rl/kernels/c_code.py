"""C sources of this folder, compiled at first use and kept in the folder of kernels, and threads that call them."""

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from megatron_fp8rl.kernels import compile_cache

_NAMES = ("rows", "rounded_products", "paged_attention")
_OPTIONS = "-O3 -march=native -fno-math-errno -ffp-contract=off -shared -fPIC".split()


@functools.cache
def library(name: str) -> ctypes.CDLL | None:
    """The functions of ``NAME.c``; None without a C compiler, or if the source refuses this CPU."""
    source, compiler = Path(__file__).with_name(f"{name}.c"), os.environ.get("CC", "cc")
    kept = compile_cache.use() / "c" / f"{name}-{_identity(source, compiler)}.so"
    with contextlib.suppress(OSError):  # missing or damaged
        return ctypes.CDLL(str(kept))
    for folder_of in (lambda: kept.parent, compile_cache.in_memory):  # the first may be full
        with contextlib.suppress(OSError, subprocess.CalledProcessError), compile_cache.noted("c", name):
            (folder := folder_of()).mkdir(parents=True, exist_ok=True)
            partial, file = folder / f".{kept.name}.{os.getpid()}", folder / kept.name
            command = [compiler, *_OPTIONS, str(source), "-o", str(partial), "-lm"]
            subprocess.run(command, capture_output=True, check=True)
            partial.replace(file)  # whole, for processes that start together
            return ctypes.CDLL(str(file))
    return None


def compile_all() -> None:
    """Compile the missing libraries at the same time."""
    with ThreadPoolExecutor(len(_NAMES)) as pool:
        list(pool.map(library, _NAMES))


def _identity(source: Path, compiler: str) -> str:
    """A digest of the source, the compiler and this CPU, for which it compiles."""
    found, digest = shutil.which(compiler), hashlib.sha256(source.read_bytes())
    with contextlib.suppress(OSError):
        status = os.stat(found or "")
        digest.update(f"{os.path.realpath(found or '')} {status.st_size} {status.st_mtime_ns} {_OPTIONS}".encode())
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        digest.update("".join(sorted({line for line in lines if line.startswith(("model name", "flags"))})).encode())
    return digest.hexdigest()[:16]


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
