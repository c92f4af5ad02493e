"""Gated delta nets on a GPU: the chunked form against the recurrence on a CPU."""

import pytest
import torch

from megatron_fp8rl.config import GdnConfig
from megatron_fp8rl.kernels import gated_delta
from tests import tolerances

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

LENGTHS = [1, 5, 63, 64, 65, 200]
SIZES = [(4, 8, 128, 128), (2, 2, 64, 64), (2, 4, 128, 64)]  # key heads, value heads, features of each


def inputs(gdn: GdnConfig) -> list[torch.Tensor]:
    """Inputs of the convolution, b, a, and its weights, A_log and dt_bias, in BF16."""
    generator = torch.Generator().manual_seed(0)
    tokens, heads = sum(LENGTHS), gdn.num_value_heads
    channels = 2 * gdn.num_key_heads * gdn.key_head_dim + heads * gdn.value_head_dim
    shapes = [(tokens, channels), (tokens, heads), (tokens, heads), (channels, gdn.conv_width), (heads,), (heads,)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors[3] *= 0.5
    return [tensor.bfloat16() for tensor in tensors]


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over that of the expected tensor."""
    wide = expected.double()
    return ((actual.cpu().double() - wide).norm() / wide.norm()).item()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_outputs_and_gradients_are_those_of_the_recurrence(sizes):
    gdn = GdnConfig(**dict(zip(("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"), sizes)))
    on_cpu = [tensor.requires_grad_() for tensor in inputs(gdn)]
    on_gpu = [tensor.detach().cuda().requires_grad_() for tensor in on_cpu]
    wanted, _ = gated_delta.gated_delta_net(*on_cpu[:3], LENGTHS, *on_cpu[3:], gdn)
    out = gated_delta.chunked(*on_gpu[:3], LENGTHS, *on_gpu[3:], gdn)
    assert out.shape == wanted.shape and out.dtype == wanted.dtype
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted.backward(cotangent)
    out.backward(cotangent.cuda())
    names = ["output", "input", "b", "a", "convolution", "A_log", "dt_bias"]
    pairs = [(out.detach(), wanted.detach()), *((x.grad, y.grad) for x, y in zip(on_gpu, on_cpu, strict=True))]
    errors = {name: difference(*pair) for name, pair in zip(names, pairs, strict=True)}
    print({name: f"{error:.1e}" for name, error in errors.items()})
    assert max(errors.values()) < tolerances.CHUNKED_DELTA_RULE, errors


def test_the_gated_norm_and_its_gradients_are_those_of_a_cpu():
    generator = torch.Generator().manual_seed(0)
    on_cpu = [torch.randn(shape, generator=generator).bfloat16() for shape in ((70, 8, 128), (70, 8, 128), (128,))]
    on_gpu = [tensor.cuda().requires_grad_() for tensor in on_cpu]
    wanted = gated_delta.gated_norm(*(tensor.requires_grad_() for tensor in on_cpu), 1e-6)
    out = gated_delta.gated_norm(*on_gpu, 1e-6)
    cotangent = torch.randn(out.shape, generator=generator).bfloat16()
    wanted.backward(cotangent)
    out.backward(cotangent.cuda())
    pairs = [(out.detach(), wanted.detach()), *((x.grad, y.grad) for x, y in zip(on_gpu, on_cpu, strict=True))]
    errors = [difference(*pair) for pair in pairs]
    print([f"{error:.1e}" for error in errors])
    assert max(errors) < tolerances.GATED_NORM, errors


def test_a_repeated_pass_gives_equal_bits_and_sequences_are_independent():
    gdn = GdnConfig(num_key_heads=2, num_value_heads=4, key_head_dim=128, value_head_dim=128)
    tensors = [tensor.cuda() for tensor in inputs(gdn)]
    first, again = (gated_delta.chunked(*tensors[:3], LENGTHS, *tensors[3:], gdn) for _ in range(2))
    assert torch.equal(first, again)
    rows = slice(sum(LENGTHS[:5]), sum(LENGTHS))
    alone = gated_delta.chunked(*(x[rows] for x in tensors[:3]), LENGTHS[5:], *tensors[3:], gdn)
    assert difference(alone, first[rows].cpu()) < tolerances.CHUNKED_DELTA_RULE  # other kernels multiply other shapes
