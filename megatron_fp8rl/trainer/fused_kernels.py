"""Which kernels the trainer computes with, and the ones that come with them.

Imports nothing of Transformer Engine: on a machine without it this module says what is missing.
"""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch

from megatron_fp8rl.config import PrecisionConfig, RunConfig
from megatron_fp8rl.precision.auto_kernels import chosen

Kernels = Literal["te", "emulated"]
LinearKernels = Literal["te", "emulated", "deep_gemm"]
ExpertKernels = Literal["te", "deep_gemm"]

_REMEDY = (
    "Install it: pip install 'transformer-engine[pytorch]' built for this PyTorch (FP8RL_EXTRA=gpu make install does), "
    "or choose --precision.kernels emulated, which is exact and slow"
)


def has_transformer_engine() -> bool:
    """Whether Transformer Engine is installed. Its bindings for PyTorch lie inside it, out of the finders' sight."""
    return importlib.util.find_spec("transformer_engine") is not None


def choose_kernels(precision: PrecisionConfig, device: torch.device) -> Kernels:
    """The kernels of ``precision.kernels`` on a device.

    Raises ValueError when Transformer Engine is asked for on a CPU, or MXFP8 on a GPU before Blackwell, and
    RuntimeError when a GPU has no Transformer Engine; each with its remedy.
    """
    if device.type != "cuda":
        if precision.kernels == "te":
            raise ValueError(
                "precision.kernels = 'te': Transformer Engine needs a GPU and this trainer runs on a CPU. "
                "Choose --precision.kernels auto"
            )
        return "emulated"
    if precision.kernels == "emulated":
        return "emulated"
    if not has_transformer_engine():
        raise RuntimeError(
            f"precision.kernels = {precision.kernels!r}: transformer_engine is not installed. {_REMEDY}"
        )
    capability = torch.cuda.get_device_capability(device)
    if precision.trainer == "mxfp8" and capability < (10, 0):
        raise ValueError(
            f"precision.trainer = 'mxfp8': its tensor cores need compute capability 10.0 (Blackwell), and this GPU has "
            f"{capability[0]}.{capability[1]}. Choose --precision.trainer blockwise"
        )
    return "te"


def choose_expert_kernels(cfg: RunConfig, device: torch.device) -> ExpertKernels:
    """What multiplies the experts on a device: the linears' own kernels ("te"), or DeepGEMM's grouped ones.

    ``auto`` is what precision/auto_kernels.py says, where DeepGEMM runs. On a CPU "deep_gemm" runs the same program on
    products in torch. Where it is named, raises ValueError on a GPU other than Hopper, and RuntimeError when DeepGEMM
    is not installed, each with its remedy.
    """
    return "deep_gemm" if _takes_deep_gemm("experts", cfg, device) else "te"


def choose_linear_kernels(cfg: RunConfig, device: torch.device) -> LinearKernels:
    """What multiplies the FP8 linears that are no experts: :func:`choose_kernels`' choice, or "deep_gemm".

    Raises what :func:`choose_kernels` raises, and for "deep_gemm" what :func:`choose_expert_kernels` does.
    """
    kernels = choose_kernels(cfg.precision, device)
    return "deep_gemm" if _takes_deep_gemm("linears", cfg, device) else kernels


def _takes_deep_gemm(field: Literal["experts", "linears"], cfg: RunConfig, device: torch.device) -> bool:
    """Whether ``precision.{field}`` is "deep_gemm", or ``auto`` and DeepGEMM is the faster of what can run here."""
    if chosen(field, cfg) != "deep_gemm":
        return False
    if getattr(cfg.precision, field) == "auto":
        return device.type == "cuda" and _problem(field, device) is None
    if (problem := _problem(field, device)) is not None:
        raise problem
    return True


_NEEDS = {
    "experts": "the grouped kernels of weight gradients need",
    "linears": "FP8 products in blocks of float32 scales need",
}


def _problem(field: Literal["experts", "linears"], device: torch.device) -> Exception | None:
    """Why ``precision.{field} = "deep_gemm"`` cannot run on a device; None when it can."""
    if device.type != "cuda":
        return None
    from megatron_fp8rl.kernels.deep_gemm import has_deep_gemm

    asked = f"precision.{field} = 'deep_gemm'"
    capability = torch.cuda.get_device_capability(device)
    if capability[0] != 9:
        return ValueError(
            f"{asked}: {_NEEDS[field]} compute capability 9.0 (Hopper), and this GPU has "
            f"{capability[0]}.{capability[1]}. Choose --precision.{field} te"
        )
    if not has_deep_gemm():
        return RuntimeError(
            f"{asked}: DeepGEMM is not installed; vLLM for CUDA brings it. Install vLLM, or choose "
            f"--precision.{field} te"
        )
    return None


def fused_kernels(cfg: RunConfig, device: torch.device) -> dict[str, str]:
    """What computes each part of a training step, in words for the record of a run."""
    from megatron.core.optimizer import Adam  # what Megatron-Core found when it was imported

    on_te = choose_kernels(cfg.precision, device) == "te"
    engine = "Transformer Engine" if on_te else "PyTorch"
    linears = engine if on_te else "PyTorch (emulated)"
    if choose_linear_kernels(cfg, device) == "deep_gemm":
        linears = "DeepGEMM" if device.type == "cuda" else "PyTorch (as DeepGEMM)"
    experts = f"{engine} (grouped)" if on_te else engine
    if choose_expert_kernels(cfg, device) == "deep_gemm":
        experts = "DeepGEMM (grouped)" if device.type == "cuda" else "PyTorch (as DeepGEMM)"
    return {
        "trainer kernel, FP8 linears": linears,
        "trainer kernel, expert linears": experts,
        "trainer kernel, norms": engine,
        "trainer kernel, optimizer": f"{Adam.__module__.partition('.')[0]}.{Adam.__name__}",
    }
