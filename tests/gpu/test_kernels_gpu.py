"""The Triton kernels on a GPU: bit equality with their definitions in torch, and their speed beside a copy.

Speeds are printed, and only compared with bounds so wide that a kernel has to be broken to miss them.
"""

import math
import time

import pytest
import torch

from megatron_fp8rl.kernels import blockwise
from megatron_fp8rl.weight_sync import digest

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SCALES = ("pow2", "fp32")


def heavy_tailed(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Numbers over 24 orders of two, blocks over 60 more, so that some blocks are of subnormal numbers or zero."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(shape, device="cuda", generator=generator)
    x *= torch.exp2(torch.randint(-16, 8, shape, device="cuda", generator=generator).float())
    rows = torch.randint(-130, 60, (shape[0] // 128 + 1,), device="cuda", generator=generator).float()
    x *= torch.exp2(rows.repeat_interleave(128)[: shape[0], None])
    x[:128, :128] = 0
    return x.to(dtype)


def assert_equals_definition(weight: torch.Tensor, scales: str, data: torch.Tensor, scale: torch.Tensor) -> None:
    for where in ("cuda", "cpu"):
        if where == "cpu" and weight.numel() > 1 << 22:
            continue
        expected, expected_scale = blockwise.quantize_weight_in_torch(weight.to(where), scales)
        actual, found_scale = data.to(where).view(torch.uint8), scale.to(where)
        assert torch.equal(found_scale.isnan(), expected_scale.isnan()), where
        same = (found_scale == expected_scale) | expected_scale.isnan()
        assert same.all(), f"{where}: {(~same).sum().item()} of {same.numel()} scales differ"
        expected = expected.view(torch.uint8)
        same = (actual == expected) | ((actual & 0x7F == 0x7F) & (expected & 0x7F == 0x7F))
        assert same.all(), f"{where}: {(~same).sum().item()} of {same.numel()} bytes differ"


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(4096, 4096), (1536, 2048), (2048, 768), (1000, 1600), (333, 77), (1, 8)])
def test_quantized_bytes(shape, dtype, scales):
    weight = heavy_tailed(*shape, dtype=dtype)
    assert_equals_definition(weight, scales, *blockwise.quantize_weight(weight, scales))


@pytest.mark.parametrize("scales", SCALES)
def test_numbers_that_are_not_finite(scales):
    weight = heavy_tailed(512, 512, dtype=torch.bfloat16, seed=1)
    weight[5, 5], weight[130, 300], weight[400, 100] = math.nan, math.inf, -math.inf
    data, scale = blockwise.quantize_weight(weight, scales)
    assert scale.isnan().nonzero().tolist() == [[0, 0], [1, 2], [3, 0]]
    assert_equals_definition(weight, scales, data, scale)


@pytest.mark.parametrize("scales", SCALES)
def test_every_bf16_number(scales):
    numbers = torch.arange(0, 0x8000, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).cuda()
    numbers = numbers[numbers.float() <= 448.0]
    weight = torch.nn.functional.pad(torch.cat([numbers, -numbers]), (0, 127), value=448.0)
    weight = weight[: len(weight) // 127 * 127].view(-1, 127)
    weight = torch.cat([weight, torch.full((len(weight), 1), 448.0, dtype=torch.bfloat16, device="cuda")], dim=1)
    data, scale = blockwise.quantize_weight(weight, scales)
    assert (scale == 1).all()
    assert torch.equal(data.view(torch.uint8), weight.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("scales", SCALES)
def test_many_strided_matrices_into_one_buffer(scales):
    from megatron_fp8rl.kernels.triton import quantize

    fused = heavy_tailed(3072, 4096, dtype=torch.bfloat16, seed=2)
    weights = [*fused.split([1024, 512, 1536]), fused[:, 1024:2048], fused[:, 3:1000], fused.t()[:256, :300]]
    weights += [heavy_tailed(768, 2048, dtype=torch.float32, seed=s) for s in range(3)]
    buffer = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    data, scale, end = [], [], 0
    for weight in weights:
        data.append(buffer[end : end + weight.numel()].view(torch.float8_e4m3fn).view(weight.shape))
        end += -(-weight.numel() // 64) * 64
        shape = [-(-n // 128) for n in weight.shape]
        scale.append(buffer[end : end + 4 * math.prod(shape)].view(torch.float32).view(shape))
        end += -(-4 * math.prod(shape) // 64) * 64
    quantize.quantize_weights_into(weights, data, scale, scales)
    for matrix in zip(weights, data, scale):
        assert_equals_definition(matrix[0], scales, *matrix[1:])
    assert not buffer[end:].any()


def test_canonical_form_is_the_same_as_on_a_cpu():
    for seed in range(3):
        data, scale = blockwise.quantize_weight(heavy_tailed(1024, 512, dtype=torch.bfloat16, seed=seed), "pow2")
        actual = blockwise.canonical(data, scale)
        expected = blockwise.canonical(data.cpu(), scale.cpu())
        assert torch.equal(actual[0].view(torch.uint8).cpu(), expected[0].view(torch.uint8))
        assert torch.equal(actual[1].cpu(), expected[1])


def test_digests_are_those_of_a_cpu():
    generator = torch.Generator("cuda").manual_seed(3)
    lengths = [0, 1, 7, 8, 9, 4096, 8 * 16384 - 1, 8 * 16384, 8 * 16384 + 1, 50_000_003]
    tensors = [torch.randint(0, 256, (n,), device="cuda", generator=generator, dtype=torch.uint8) for n in lengths]
    tensors += [tensors[-1][3:1000], tensors[-1][8 : 1 << 20], heavy_tailed(300, 200, dtype=torch.bfloat16)]
    tensors += [heavy_tailed(256, 512, dtype=torch.float32)[:, 128:256]]  # rows are strided
    assert digest.digests(tensors) == digest.digests([t.cpu() for t in tensors])


def prepare_digests(tensors):
    values = digest.prepare_values(tensors)
    return lambda: digest._lines(values()).split()


def test_prepared_digests_follow_the_content_of_the_memory():
    """Float32 numbers count as 64-bit words; views begin between words, and their rows lie apart."""
    scales, weights = torch.randn(61, 33, device="cuda"), torch.randn(640, 129, device="cuda").bfloat16()
    tensors = [scales, scales[7:9], scales[:, 3:8], scales.t(), heavy_tailed(300, 500, dtype=torch.float32)]
    tensors += [weights, weights[:, :64], weights[3:5], weights[:0], scales[:0]]
    prepared = prepare_digests(tensors)
    for _ in range(3):
        assert prepared() == digest.digests([digest.widened(t.cpu()) for t in tensors])
        scales.mul_(-1.5)
        weights[3].add_(1)


def test_digests_of_many_small_tensors_take_the_host_little_time(capsys):
    """As many as an engine of Qwen3-30B-A3B holds, with 8 KiB each: what is measured is not the GPU's memory."""
    weights = torch.zeros(18_432, 64, 128, device="cuda", dtype=torch.float8_e4m3fn).unbind()
    scales = torch.ones(18_432, 6, 16, device="cuda").unbind()
    took = seconds(prepare_digests([*weights, *scales]))
    with capsys.disabled():
        print(f"\ndigest of {2 * 18_432} small tensors: {took * 1e3:.1f} ms")
    assert took < 0.03


def seconds(function) -> float:
    """Of one call, the median of seven, launches included."""
    function()
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[3]


def copy_speed() -> float:
    """Bytes read and written per second by a copy of 2 GiB, the limit of all memory-bound work."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source))


def test_speed(capsys):
    from megatron_fp8rl.kernels.triton import quantize

    copy = copy_speed()
    lines = [f"copy: {copy / 1e9:.0f} GB/s read and written"]
    experts = [torch.randn(768, 2048, device="cuda").bfloat16() for _ in range(384)]
    data = [torch.empty(w.shape, dtype=torch.float8_e4m3fn, device="cuda") for w in experts]
    scale = [torch.empty(6, 16, device="cuda") for _ in experts]
    large = torch.randn(16384, 16384, device="cuda").bfloat16()
    large_data, large_scale = torch.empty_like(large, dtype=torch.float8_e4m3fn), torch.empty(128, 128, device="cuda")
    speeds = {}
    for scales in SCALES:
        for name, weights, outs in (
            ("384 experts", experts, (data, scale)),
            ("16384^2", [large], ([large_data], [large_scale])),
        ):
            moved = 3 * sum(w.numel() for w in weights)
            speed = moved / seconds(quantize.prepare_weights_into(weights, *outs, scales))
            speeds[f"quantize {name}, {scales}"] = speed
    held = [*experts, *scale, large]
    speeds["digest"] = sum(t.nbytes for t in held) / seconds(prepare_digests(held))
    lines += [f"{name}: {speed / 1e9:.0f} GB/s, {speed / copy:.0%} of the copy" for name, speed in speeds.items()]
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    slow = [name for name, speed in speeds.items() if speed < 0.15 * copy]
    assert not slow, "\n".join(lines)
