"""The canonical form of E4M3 blocks is what vLLM's own conversion for DeepGEMM makes of them, bytes and scales."""

import pytest
import torch

from megatron_fp8rl.kernels import blockwise

fp8_utils = pytest.importorskip("vllm.model_executor.layers.quantization.utils.fp8_utils")


def by_vllm(data: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    data, scale = data.clone(), scale.clone()
    with torch.compiler.set_stance("force_eager"):
        fp8_utils.requant_weight_ue8m0_inplace(data, scale, (128, 128))
    return data, scale


def assert_same(actual, expected) -> None:
    assert torch.equal(actual[1], expected[1])
    assert torch.equal(actual[0].view(torch.uint8), expected[0].view(torch.uint8))


def weights(shape: tuple[int, int], seed: int) -> torch.Tensor:
    """BF16 with blocks of all magnitudes, from below vLLM's least one; some block maxima on edges of the grid."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randint(-12, 3, shape, generator=generator).float())
    for i in range(0, shape[0], 128):
        for j in range(0, shape[1], 128):
            x[i : i + 128, j : j + 128] *= 2.0 ** float(torch.randint(-30, 10, (), generator=generator))
    x[:64, :64] = 0
    return x.bfloat16()


@pytest.mark.parametrize("shape", [(256, 384), (300, 200), (64, 128)])
def test_quantized_weights(shape):
    num_changed = 0
    for seed in range(20):
        data, scale = blockwise.quantize_weight(weights(shape, seed), "pow2")
        actual = blockwise.canonical(data, scale)
        assert_same(actual, by_vllm(data, scale))
        assert_same(blockwise.canonical(*actual), actual)
        num_changed += int((actual[1] != scale).sum())
    assert num_changed > 0


def test_every_largest_byte_under_scales_large_and_small():
    """One block for each largest magnitude 0 to 126; below it all smaller ones, of both signs."""
    data = torch.zeros(128, 127 * 128, dtype=torch.uint8)
    for largest in range(127):
        smaller = torch.arange(128 * 128, dtype=torch.int64) % (largest + 1)
        signs = (torch.arange(128 * 128) // 128 % 2) * 128
        data[:, largest * 128 : (largest + 1) * 128] = (smaller | signs).to(torch.uint8).view(128, 128)
    data = data.view(torch.float8_e4m3fn)
    for exponent in (-60, -31, -25, -23, -22, -21, -18, -9, 0, 7, 40):
        scale = torch.full((1, 127), 2.0**exponent)
        actual = blockwise.canonical(data, scale)
        assert_same(actual, by_vllm(data, scale))
        assert_same(blockwise.canonical(*actual), actual)
        values = blockwise.dequantize_weight(*actual)
        if exponent >= -9:  # nothing is rounded then: the same values in another form
            assert torch.equal(values, blockwise.dequantize_weight(data, scale))


def test_a_block_at_half_of_the_largest_number_is_doubled():
    # 230 under a scale of 1 rounds to 224: its byte, 0x76, becomes that of 448, 0x7E, under a scale of one half.
    weight = torch.zeros(128, 128)
    weight[0, :3] = torch.tensor([230.0, -(2.0**-9), 2.0**-7])
    data, scale = blockwise.quantize_weight(weight, "pow2")
    assert scale.item() == 1.0 and data.view(torch.uint8)[0, :3].tolist() == [0x76, 0x81, 0x04]
    data, scale = blockwise.canonical(data, scale)
    assert scale.item() == 0.5 and data.view(torch.uint8)[0, :3].tolist() == [0x7E, 0x82, 0x08]


def test_blocks_that_are_not_finite_stay_so():
    weight = torch.ones(128, 256)
    weight[0, 0] = torch.nan
    data, scale = blockwise.canonical(*blockwise.quantize_weight(weight, "pow2"))
    assert scale.isnan().tolist() == [[True, False]]
    assert data[:, :128].float().isnan().all() and not data[:, 128:].float().isnan().any()
