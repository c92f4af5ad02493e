"""Triton kernels compiled for a Hopper GPU, on a machine without one."""

import re
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def _is_pointer(argument: str, kind: str) -> bool:
    return kind.startswith("*")


def compile_kernel(
    kernel: Any,
    types: dict[str, str],
    constants: dict,
    *,
    default: str | None = None,
    is_aligned: Callable[[str, str], bool] = _is_pointer,
    **options: Any,
) -> dict[str, str]:
    """Texts of a compiled kernel by stage; ``ptx`` is one.

    Args:
        types: types of arguments in Triton's names, such as ``*bf16``; ``default`` is the type of all others.
        is_aligned: for a name and a type, whether the argument is a multiple of 16, as Triton finds at a launch.
        options: of the compiler, such as ``num_warps``.
    """
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {name: "constexpr" if name in constants else types.get(name, default) for name in kernel.arg_names}
    aligned = [i for i, (name, kind) in enumerate(signature.items()) if kind != "constexpr" and is_aligned(name, kind)]
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm


def instructions(ptx: str) -> Counter[str]:
    """How often each instruction of memory, conversion, division and products stands in the PTX."""
    kinds = r"ld\.global|st\.global|ld\.shared|st\.shared|cp\.async|cvt|mma|div|ex2|mul|atom"
    return Counter(re.findall(rf"\b(?:{kinds})\.[\w.:]+", ptx))


def register_report(ptx: str, folder: Path, *flags: str) -> str:
    """What ptxas prints about the registers of a kernel."""
    import triton

    path = folder / "kernel.ptx"
    path.write_text(ptx)
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    command = [str(ptxas), "-v", "-arch=sm_90a", *flags, str(path), "-o", str(folder / "kernel.cubin")]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stderr
