"""Which implementation of an operation runs on a tensor: Triton's or torch's."""

from __future__ import annotations

import os

from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's kernels run on the CPU, for tests


def runs_triton(tensor: Tensor) -> bool:
    """Whether Triton kernels work on this tensor: it is on a GPU, or they are interpreted."""
    return tensor.is_cuda or INTERPRETED
