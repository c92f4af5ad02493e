"""What the grouped kernels of experts cannot compute. Pure."""

from __future__ import annotations

from megatron_fp8rl.preflight.findings import Findings

_TILE = 128  # of the grouped kernels, BF16 ones as well


def check_experts(found: Findings, accelerator: str) -> None:
    """Refuse ``precision.experts = "deep_gemm"`` with what it cannot compute, by the field that has to change."""
    cfg, precision = found.cfg, found.cfg.precision
    if precision.experts != "deep_gemm":
        return
    if accelerator not in ("cpu", "hopper"):
        found.refuse(
            "precision.experts", f"the grouped kernels are Hopper's, and this machine is {accelerator!r}", "Choose te"
        )
    if precision.trainer not in ("bf16", "blockwise"):
        found.refuse(
            "precision.experts", f"the grouped kernels do not multiply in the recipe {precision.trainer}", "Choose te"
        )
    if precision.trainer == "blockwise" and precision.gradients != "e4m3":
        found.refuse("precision.gradients", "the grouped kernels of experts multiply E4M3", "Choose e4m3")
    if precision.params == "fp32":
        found.refuse("precision.params", "the grouped kernels of experts take BF16 activations", "Choose bf16")
    if precision.kernels == "emulated" and accelerator != "cpu":
        found.refuse("precision.experts", "precision.kernels = 'emulated' wants no kernels at all", "Choose te")
    if not cfg.model.is_moe or precision.trainer != "bf16":
        return  # blockwise FP8 wants the same tiles, and check_tiling looks at all matrices
    if cfg.model.hidden_size % _TILE:
        found.refuse("model.hidden_size", f"the grouped kernels want a multiple of {_TILE}", "Choose another size")
    features, ranks = cfg.model.moe_ffn_hidden_size, cfg.parallel.expert_tensor
    if features % ranks == 0 and features // ranks % _TILE:
        found.refuse(
            "parallel.expert_tensor",
            f"leaves a rank {features // ranks} features of an expert, and grouped kernels want a multiple of {_TILE}",
            "Lower it, or choose --precision.experts te",
        )
