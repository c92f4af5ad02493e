"""The norm rounds where the published models and the engine round: bit for bit those of transformers."""

import types

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from megatron_fp8rl.trainer.model.linear import RMSNorm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norm_is_that_of_the_published_models(dtype):
    generator = torch.Generator().manual_seed(0)
    weight = (1 + torch.randn(320, generator=generator) / 4).to(dtype)
    x = torch.randn(50, 320, generator=generator).to(dtype)
    ours = RMSNorm(types.SimpleNamespace(params_dtype=dtype, sequence_parallel=False), 320, eps=1e-6)
    theirs = Qwen3RMSNorm(320, eps=1e-6).to(dtype)
    with torch.no_grad():
        ours.weight.copy_(weight)
        theirs.weight.copy_(weight)
    if dtype == torch.bfloat16:
        assert torch.equal(ours(x), theirs(x))
    else:  # float32 sums in another order
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-6, atol=1e-6)
