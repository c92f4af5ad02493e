"""Finds DeepGEMM, whose kernels run in the trainer and in vLLM's engines.

DeepGEMM compiles each kernel on first use, in seconds, to a folder shared by trainer and engines.
"""

import functools
import importlib
import importlib.util
import os
from importlib.machinery import PathFinder
from types import ModuleType

from megatron_fp8rl.kernels import compile_cache
from megatron_fp8rl.kernels.types import BLOCK
from megatron_fp8rl.upstream import patches

_PACKAGES = ("deep_gemm", "vllm.third_party.deep_gemm")  # in vLLM's search order


def has_deep_gemm() -> bool:
    """Whether DeepGEMM is installed, standalone or bundled with vLLM for CUDA. Imports neither."""
    return package() is not None


@patches(
    "vllm",
    why="the trainer runs DeepGEMM GEMMs; CUDA builds of vLLM bundle a copy (vllm.third_party.deep_gemm)",
    remove_when="DeepGEMM is published as a package on PyPI",
)
def package() -> str | None:
    """Name of the DeepGEMM module that vLLM would import, or None."""
    return next(filter(_is_there, _PACKAGES), None)


def _is_there(name: str) -> bool:
    """Whether a module can be found, without importing its parents: vLLM's package imports torch's compiler."""
    first, *rest = name.split(".")
    spec = importlib.util.find_spec(first)
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return False
        spec = PathFinder.find_spec(f"{spec.name}.{part}", list(spec.submodule_search_locations))
    return spec is not None


def import_parents() -> None:
    """Import vLLM's package if DeepGEMM is part of it, which takes seconds; DeepGEMM itself would initialize CUDA."""
    if parents := (package() or "").rpartition(".")[0]:
        importlib.import_module(parents)


def compiled_folder() -> str:
    """DeepGEMM's cache of compiled kernels (``cache/*/kernel.cubin``), in every process."""
    compile_cache.use()
    return os.environ["DG_JIT_CACHE_DIR"]


@functools.cache
def deep_gemm() -> ModuleType:
    """Import the module named by :func:`package`. Raises RuntimeError with a remedy if there is none."""
    if (name := package()) is None:
        raise RuntimeError(
            "DeepGEMM is not installed. It ships with vLLM for CUDA: install vLLM, or choose "
            "--precision.kernels.experts te"
        )
    compile_cache.use()
    module = importlib.import_module(name)
    # Our layouts use this alignment; DeepGEMM takes the expert of a block of rows from its first row.
    if (alignment := module.get_mk_alignment_for_contiguous_layout()) != BLOCK:
        raise RuntimeError(f"{name} aligns experts to {alignment} rows on this GPU; {BLOCK} rows are expected")
    return module
