"""Hardware properties that the choice of kernels depends on. Pure except ``local_hardware`` and ``cpu_has_avx512``."""

import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, get_args

Generation = Literal["cpu", "ampere", "hopper", "blackwell"]
Package = Literal["transformer_engine", "deep_gemm", "flashinfer", "deep_ep", "hybrid_ep"]
PACKAGES: tuple[Package, ...] = get_args(Package)


@dataclass(frozen=True)
class Hardware:
    """A GPU generation, or a CPU, and the kernel packages installed there; by default all of them."""

    generation: Generation
    packages: frozenset[Package] = frozenset(PACKAGES)

    @property
    def is_gpu(self) -> bool:
        return self.generation != "cpu"


def generation_of(major: int) -> Generation:
    """The GPU generation of a major compute capability; 0 for no GPU."""
    return "cpu" if major == 0 else "ampere" if major < 9 else "hopper" if major == 9 else "blackwell"


@cache
def installed_packages() -> frozenset[Package]:
    """Which of :data:`PACKAGES` are installed. Imports none of them."""
    from megatron_fp8rl.kernels.deep_gemm import has_deep_gemm  # imports torch

    names: tuple[Package, ...] = ("transformer_engine", "flashinfer")
    packages: set[Package] = set()
    packages.update(name for name in names if importlib.util.find_spec(name))
    if has_deep_gemm():
        packages.add("deep_gemm")
    if (spec := importlib.util.find_spec("deep_ep")) and spec.origin:  # importing it loads CUDA libraries
        packages.add("deep_ep")
        if Path(spec.origin).with_name("hybrid_ep_buffer.py").exists():
            packages.add("hybrid_ep")
    return frozenset(packages)


def cpu_has_avx512() -> bool:
    """Whether this machine's processor has AVX-512 (Linux), without which vLLM has no FP8 KV cache on CPUs."""
    cpus = Path("/proc/cpuinfo")
    return cpus.exists() and " avx512f " in cpus.read_text()


def local_hardware() -> Hardware:
    """This process's GPU as torch reports it, and the installed kernel packages."""
    import torch

    major = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0
    return Hardware(generation_of(major), installed_packages())
