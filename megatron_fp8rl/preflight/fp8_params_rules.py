"""What FP8 primary weights (``precision.params = "fp8"``) do not go with. Pure."""

from __future__ import annotations

from megatron_fp8rl.config import FP8_BLOCK
from megatron_fp8rl.preflight.findings import Findings

_KEEP = "Choose --precision.params bf16"
_OTHERWISE = "or --precision.params bf16"
_ONE_SCALE = "FP8 parameters are blocks of 128x128, which engines take as they are; here a weight has one scale"
_RECIPES = {
    "bf16": "precision.trainer = 'bf16' multiplies nothing in FP8",
    "delayed": _ONE_SCALE,
    "tensorwise": _ONE_SCALE,
    "mxfp8": "Megatron-Core gathers MXFP8 parameters in BF16, and no engine here holds blocks of 32",
}


def check_primary_weights(found: Findings, accelerator: str) -> None:
    """Refuse what cannot keep its weights in FP8 alone, by the field that has to change."""
    cfg, precision = found.cfg, found.cfg.precision
    if precision.params != "fp8":
        return
    if accelerator != "hopper":
        found.refuse(
            "precision.params",
            f"Hopper's kernels multiply blocks of {FP8_BLOCK} as they lie, and this machine is {accelerator!r}",
            _KEEP,
        )
    if precision.trainer in _RECIPES:
        found.refuse("precision.params", _RECIPES[precision.trainer], f"{_KEEP}, or --precision.trainer blockwise")
    elif precision.rollout != "blockwise":
        found.refuse(
            "precision.rollout", "FP8 parameters are sent to engines as they are", f"Choose blockwise, {_OTHERWISE}"
        )
    if precision.kernels == "emulated":
        found.refuse("precision.kernels", "the emulation rounds BF16 parameters", f"Choose auto, {_OTHERWISE}")
    for field in ("linears", "experts"):
        if getattr(precision, field) == "deep_gemm":
            problem = "what feeds DeepGEMM's kernels here quantizes BF16 parameters"
            found.refuse(f"precision.{field}", problem, f"Choose te, {_OTHERWISE}")
    if cfg.model.mla is None and cfg.model.head_dim % FP8_BLOCK:
        found.refuse(
            "precision.params",
            f"heads of {cfg.model.head_dim} rows do not fill blocks of {FP8_BLOCK}: a block of Megatron's matrix of "
            "queries, keys and values would hold rows of two of them, where the engine's holds rows of one",
            _KEEP,
        )
