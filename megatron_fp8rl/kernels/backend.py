"""Selects the implementation of an operation for a tensor: Triton or torch."""

import os

from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton kernels run on the CPU, for tests


def runs_triton(tensor: Tensor) -> bool:
    """Whether Triton kernels can process this tensor: it is on a GPU, or Triton runs in interpreter mode."""
    return tensor.is_cuda or INTERPRETED
