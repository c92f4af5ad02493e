"""Weights that are NaN or infinite are not published. Runs on trainer rank 0."""

from __future__ import annotations

import torch
from torch import Tensor


def require_finite(tensors: dict[str, Tensor]) -> None:
    """Raise ValueError that names the weights that are NaN or infinite. An FP8 block that is not has such a scale."""
    checked = {name: t for name, t in tensors.items() if t.dtype != torch.float8_e4m3fn}
    scales = [t.reshape(-1) for t in checked.values() if t.dtype == torch.float32]
    others = [t for t in checked.values() if t.dtype != torch.float32]
    # Scales of thousands of experts in one look; only a failure is worth one look each.
    if (not scales or torch.cat(scales).isfinite().all()) and all(t.isfinite().all() for t in others):
        return
    wrong = [name.removesuffix("_scale_inv") for name, t in checked.items() if not t.isfinite().all()]
    more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
    raise ValueError(
        f"not published, for they hold NaN or infinity: {', '.join(wrong[:5])}{more}; lower optim.lr and resume from "
        "the last checkpoint"
    )
