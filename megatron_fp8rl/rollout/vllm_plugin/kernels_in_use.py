"""Reports which kernels an engine worker computes with, read from its model without importing vLLM.

The attributes are those of vLLM 0.26: the ``attn_backend`` of attention and a layer's ``quant_method``. FP8 linears
have its ``fp8_linear`` or the layer's ``scheme.kernel``, experts its ``fp8_backend`` or ``unquantized_backend``.
"""

from typing import Any

from torch import nn

from megatron_fp8rl.precision.formats import SCALE_SUFFIXES


def kernels_in_use(model: nn.Module) -> dict[str, list[str]]:
    """Return vLLM's kernel names by role ("linears" in FP8, "experts", "attention"), sorted and unique."""
    by_role: dict[str, set[str]] = {}
    for module in model.modules():
        backend, method = getattr(module, "attn_backend", None), getattr(module, "quant_method", None)
        if backend is not None:
            by_role.setdefault("attention", set()).add(backend.get_name())
        if hasattr(module, "w13_weight"):
            by_role.setdefault("experts", set()).add(_of_experts(method))
        elif any(hasattr(module, f"weight{suffix}") for suffix in SCALE_SUFFIXES):
            scheme = getattr(module, "scheme", None)
            kernel = getattr(method, "fp8_linear", None) or getattr(scheme, "kernel", method)
            by_role.setdefault("linears", set()).add(type(kernel).__name__)
    return {role: sorted(names) for role, names in by_role.items()}


def _of_experts(method: Any) -> str:
    """Return the method and, in parentheses, its backend."""
    backend = getattr(method, "fp8_backend", None) or getattr(method, "unquantized_backend", None)
    name = type(method).__name__
    return name if backend is None else f"{name} ({backend.value})"
