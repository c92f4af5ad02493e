"""How DeepGEMM's dense kernels are called, with a stand-in that wants of its arguments what they want on Hopper."""

import pytest
import torch

from megatron_fp8rl.kernels import gemm
from megatron_fp8rl.kernels.blockwise import dequantize_activation, dequantize_weight
from megatron_fp8rl.precision.formats import BLOCKWISE_POW2
from megatron_fp8rl.trainer.model import linear_deep_gemm
from megatron_fp8rl.trainer.model.linear_deep_gemm import Matrix
from megatron_fp8rl.trainer.model.weight_cache import WeightCache
from tests.tolerances import BF16_ROUNDING


class StandIn:
    """DeepGEMM 2.5 on Hopper: both operands K-major, scales where no copy is needed, sums in float32 in place."""

    def __init__(self):
        self.calls = []

    def fp8_gemm_nt(self, a, b, d, c=None, recipe=None, compiled_dims="nk", disable_ue8m0_cast=False):
        (left, left_scale), (right, right_scale) = a, b
        (m, k), n = left.shape, right.shape[0]
        assert right.shape[1] == k and d.shape == (m, n) and d.is_contiguous() and k % 128 == 0
        for data in (left, right):
            assert data.dtype == torch.float8_e4m3fn and data.is_contiguous()
        self._check_rows(left_scale, m, k)
        x = dequantize_activation(left, left_scale)
        if recipe is None:
            assert c is None and d.dtype == torch.bfloat16 and compiled_dims == "nk"
            assert right_scale.dtype == torch.float32 and right_scale.is_contiguous()
            assert right_scale.shape == (n // 128, k // 128) and n % 128 == 0
            d.copy_(x @ dequantize_weight(right, right_scale).t())
        else:
            # A kernel for two operands in 1x128 blocks adds to float32, and only so.
            assert recipe == (1, 1, 128) and c is d and d.dtype == torch.float32 and compiled_dims == "mn"
            self._check_rows(right_scale, n, k)
            d.addmm_(x, dequantize_activation(right, right_scale).t())
        self.calls.append((m, n, k))

    @staticmethod
    def _check_rows(scale, rows, k):
        """Rows beside each other, so that TMA reads the scales of a block; the distance is a multiple of 16 bytes."""
        assert scale.dtype == torch.float32 and scale.shape == (rows, k // 128)
        assert scale.stride(0) == 1 and (scale.stride(1) == rows or k == 128) and rows % 4 == 0


@pytest.mark.parametrize("tokens", [256, 130, 1])
def test_linear_and_feed_forward_part_call_the_kernels_as_they_want_it(tokens, monkeypatch):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, size=1.0):
        return (torch.randn(shape, generator=generator) * size).bfloat16()

    fc1, fc2 = (
        Matrix(torch.nn.Parameter(draw(*shape, size=0.05)), BLOCKWISE_POW2, WeightCache())
        for shape in ((768, 256), (256, 384))
    )
    x, grads = draw(tokens, 256).requires_grad_(), {n: draw(tokens, n, size=1e-3) for n in (256, 768)}

    def run():
        result = []
        for y, weights in (
            (linear_deep_gemm.linear(x, fc1), [fc1.weight]),
            (linear_deep_gemm.mlp(x, fc1, fc2), [fc1.weight, fc2.weight]),
        ):
            result += [y.detach(), *torch.autograd.grad(y, [x, *weights], grads[y.shape[1]])]
        return result

    expected, stand_in = run(), StandIn()
    monkeypatch.setattr(gemm, "_is_on_gpu", lambda x: True)
    monkeypatch.setattr(gemm, "deep_gemm", lambda: stand_in)
    for ours, theirs in zip(run(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, **BF16_ROUNDING)
    rows = -(-tokens // 128) * 128
    assert stand_in.calls == [
        (rows, 768, 256),
        (rows, 768, 256),
        (rows, 256, 384),
        (768, 256, rows),
        (rows, 256, 768),
        (rows, 384, 256),
        (256, 384, rows),
        (768, 256, rows),
        (rows, 256, 768),
    ]
