"""What DeepGEMM's dense kernels cannot compute. Pure."""

from __future__ import annotations

from megatron_fp8rl.preflight.findings import Findings


def check_linears(found: Findings, accelerator: str) -> None:
    """Refuse ``precision.linears = "deep_gemm"`` with what it cannot compute, by the field that has to change."""
    precision = found.cfg.precision
    if precision.linears != "deep_gemm":
        return
    if accelerator not in ("cpu", "hopper"):
        found.refuse(
            "precision.linears", f"its kernels are Hopper's, and this machine is {accelerator!r}", "Choose te"
        )
    elif precision.kernels == "emulated" and accelerator != "cpu":
        found.refuse("precision.linears", "precision.kernels = 'emulated' wants no kernels at all", "Choose te")
    if precision.trainer != "blockwise":
        found.refuse("precision.linears", f"its kernels do not multiply in the recipe {precision.trainer}", "Choose te")
    elif precision.gradients != "e4m3":
        found.refuse("precision.gradients", "DeepGEMM's kernels of linears multiply E4M3", "Choose e4m3")
    if precision.params == "fp32":
        found.refuse("precision.params", "DeepGEMM's kernels of linears take BF16 activations", "Choose bf16")
