"""Finds DeepGEMM, whose kernels run in the trainer and in vLLM's engines.

DeepGEMM compiles a kernel on first use, which takes seconds, and caches it in a folder that trainer and engines share.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from types import ModuleType

from megatron_fp8rl.kernels.blockwise import BLOCK
from megatron_fp8rl.upstream import patches

_PACKAGES = ("deep_gemm", "vllm.third_party.deep_gemm")  # in the order in which vLLM looks for it


def has_deep_gemm() -> bool:
    """Whether DeepGEMM is installed: alone, or within vLLM for CUDA. Imports nothing but the packages around it."""
    return package() is not None


@patches(
    "vllm",
    ">=0.25.1,<0.27",
    why="the trainer multiplies by DeepGEMM, of which CUDA builds of vLLM carry a copy (vllm.third_party.deep_gemm)",
    remove_when="DeepGEMM is a package of its own on the usual index",
)
def package() -> str | None:
    """The copy that vLLM would take."""
    return next(filter(_is_there, _PACKAGES), None)


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # a package around it is missing
        return False


def compiled_folder() -> str:
    """Where DeepGEMM keeps what it has compiled, in ``cache/*/kernel.cubin``: in every process where vLLM has it."""
    root = os.environ.get("VLLM_CACHE_ROOT") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "vllm"
    )
    return os.environ.get("DG_JIT_CACHE_DIR") or os.path.join(os.path.expanduser(root), "deep_gemm")


@functools.cache
def deep_gemm() -> ModuleType:
    """The module of :func:`package`. Raises RuntimeError with a remedy when there is none."""
    if (name := package()) is None:
        raise RuntimeError(
            "DeepGEMM is not installed: vLLM for CUDA brings it. Install vLLM, or choose --precision.experts te"
        )
    os.environ.setdefault("DG_JIT_CACHE_DIR", compiled_folder())
    module = importlib.import_module(name)
    # Layouts here are aligned to this; DeepGEMM reads the expert of a block of rows off the first of them.
    if (alignment := module.get_mk_alignment_for_contiguous_layout()) != BLOCK:
        raise RuntimeError(f"{name} multiplies blocks of {alignment} rows on this GPU; {BLOCK} are expected")
    return module
