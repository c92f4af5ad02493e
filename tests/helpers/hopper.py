"""Marks of tests that need a Hopper GPU: where there is none they are skipped, with the reason."""

import pytest
import torch

ON_HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]
