"""The data movement of grouped experts on a GPU: equality with torch on large shapes, with vLLM's kernel, and GB/s.

Speeds are printed beside a copy's, and only compared with bounds so wide that a kernel has to be broken to miss them.
"""

import pytest
import torch
import torch.nn.functional as F

from megatron_fp8rl.kernels import blockwise, fused_moe, fused_moe_torch, gemm
from megatron_fp8rl.kernels.fused_moe import expert_permutation
from megatron_fp8rl.kernels.triton import swiglu
from megatron_fp8rl.kernels.types import ExpertPermutation
from megatron_fp8rl.precision.formats import BLOCKWISE_POW2, blockwise_format
from tests.helpers.operands import assert_equal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NUM_EXPERTS = 64
LAYOUTS = ("uniform", "skewed", "one has all", "half have none")


def counts_of(kind: str, num_tokens: int, num_experts: int = NUM_EXPERTS) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    shares = {
        "uniform": torch.ones(num_experts),
        "skewed": torch.exp(2 * torch.randn(num_experts, generator=generator)),
        "one has all": (torch.arange(num_experts) == num_experts // 2).float(),
        "half have none": (torch.arange(num_experts) % 2).float(),
    }[kind]
    drawn = torch.multinomial(shares / shares.sum(), num_tokens, replacement=True, generator=generator)
    return torch.bincount(drawn, minlength=num_experts).tolist()


def layout_of(counts: list[int], *, exact: bool = True) -> ExpertPermutation:
    return expert_permutation(torch.tensor(counts, device="cuda"), sum(counts), counts if exact else None)


def random_rows(*shape: int, seed: int = 0, octaves: int = 12) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(shape, device="cuda", generator=generator)
    x *= torch.exp2(torch.randint(-octaves, 4, shape, device="cuda", generator=generator).float())
    x[1::5, :128] = 0
    x[:, 2::50] = 0
    return x.bfloat16()


def assert_nearly_equal(actual: torch.Tensor, expected: torch.Tensor, layout: ExpertPermutation) -> None:
    """Equal but for numbers that a last bit of float32 rounds to the neighbour among BF16 numbers."""
    end = int(layout.offsets[-1])
    actual, expected = actual[:end].float(), expected[:end].float()
    differ = actual != expected
    assert differ.float().mean() < 2e-3, f"{int(differ.sum())} of {differ.numel()} differ"
    torch.testing.assert_close(actual, expected, rtol=2**-6, atol=1e-30)


@pytest.mark.parametrize("scales", ["pow2", "fp32"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_permutation(kind, scales):
    counts = counts_of(kind, 20_000)
    layout = layout_of(counts, exact=kind != "skewed")
    expected = expert_permutation(torch.tensor(counts), sum(counts), counts if kind != "skewed" else None)
    for name in ("offsets", "padded_counts", "experts", "rows", "positions"):
        assert torch.equal(getattr(layout, name).cpu(), getattr(expected, name)), name
    x, probs = random_rows(layout.num_tokens, 1024), torch.rand(layout.num_tokens, device="cuda")
    wanted = dict(rows=True, columns=True, bf16=True)
    for weights in (None, probs):
        actual = fused_moe.permute_quantize(x, layout, blockwise_format(scales), probs=weights, **wanted)
        assert_equal(actual, fused_moe_torch.permute_quantize(x, layout, scales, probs=weights, **wanted), layout)
    rows_alone = fused_moe.permute_quantize(x, layout, blockwise_format(scales))
    assert_equal(
        rows_alone,
        fused_moe_torch.permute_quantize(x, layout, scales, rows=True, columns=False, bf16=False, probs=None),
        layout,
    )
    y = random_rows(layout.num_rows, 1024, seed=1)
    for weights in (None, probs):
        out = fused_moe.unpermute(y, layout, weights)
        assert torch.equal(out, fused_moe_torch.unpermute(y, layout, weights))


@pytest.mark.parametrize("scales", ["pow2", "fp32"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_swiglu(kind, scales):
    """exp and division are approximations in forward, so BF16 is compared with torch, and bytes with this BF16."""
    layout = layout_of(counts_of(kind, 20_000), exact=kind != "skewed")
    h = random_rows(layout.num_rows, 1536, octaves=6)
    h[layout.experts < 0] = torch.nan
    actual = fused_moe.swiglu_quantize(h, layout, blockwise_format(scales), columns=True, bf16=True)
    valid = (layout.experts >= 0)[:, None]
    assert_nearly_equal(actual.bf16, fused_moe_torch.swiglu(torch.where(valid, h, 0.0)), layout)
    made_of = dict(rows=True, columns=True, bf16=True)
    assert_equal(actual, fused_moe_torch.quantized(actual.bf16, layout, scales, **made_of), layout)

    dy, probs = random_rows(layout.num_rows, 768, seed=2), torch.rand(layout.num_tokens, device="cuda")
    dy[layout.experts < 0] = torch.nan
    wanted = made_of | dict(activation_columns=True, activation_bf16=True)
    for weights in (None, probs):
        actual = fused_moe.swiglu_backward_quantize(
            dy, h.clone(), layout, blockwise_format(scales), probs=weights, **wanted
        )
        expected = fused_moe_torch.swiglu_backward_quantize(dy, h, layout, scales, probs=weights, **wanted)
        assert_nearly_equal(actual.dh.bf16, expected.dh.bf16, layout)
        assert_nearly_equal(actual.activation.bf16, expected.activation.bf16, layout)
        assert_equal(actual.dh, fused_moe_torch.quantized(actual.dh.bf16, layout, scales, **made_of), layout)
        of_activation = dict(columns=True, bf16=True)
        again = fused_moe_torch.quantized(actual.activation.bf16, layout, scales, **of_activation)
        assert_equal(actual.activation, again, layout)
        if weights is not None:
            largest = float(expected.dprobs.abs().max())
            torch.testing.assert_close(actual.dprobs, expected.dprobs, rtol=1e-3, atol=largest * 1e-4)


@pytest.mark.parametrize("scales", ["pow2", "fp32"])
def test_weights_are_those_that_are_published(scales):
    weights = random_rows(3 * 512, 384).view(3, 512, 384)
    actual = gemm.quantized(weights, blockwise_format(scales))
    data, scale = blockwise.quantize_weight(weights.view(-1, 384), scales)
    assert torch.equal(actual.data.view(torch.uint8).view(-1, 384), data.view(torch.uint8))
    assert torch.equal(actual.scale.flatten(0, 1), scale)
    turned = actual.transposed()
    assert torch.equal(turned.data.view(torch.uint8), actual.data.view(torch.uint8).transpose(1, 2))
    assert torch.equal(turned.scale, actual.scale.transpose(1, 2))


def test_forward_bytes_are_those_of_the_engines_kernel():
    fp8_utils = pytest.importorskip("vllm.model_executor.layers.quantization.utils.fp8_utils")
    layout = layout_of([8192])
    h = random_rows(8192, 1536, octaves=6)
    data = torch.empty(8192, 768, dtype=torch.float8_e4m3fn, device="cuda")
    data, scale = fp8_utils.silu_mul_per_token_group_quant_fp8_colmajor(input=h, output=data, use_ue8m0=True)
    actual = fused_moe.swiglu_quantize(h, layout, BLOCKWISE_POW2)
    assert torch.equal(actual.rows.view(torch.uint8), data.view(torch.uint8))
    is_zero = (actual.rows.float().view(8192, 6, 128) == 0).all(-1)  # whose scale means nothing
    assert torch.equal(actual.row_scales[~is_zero], scale[~is_zero])


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Signs of zeros included; NaN is NaN."""
    differ = (actual.view(torch.int16) != expected.view(torch.int16)) & ~(actual.isnan() & expected.isnan())
    where = differ.nonzero()[:1].tolist()
    assert actual.shape == expected.shape and not differ.any(), (
        f"{int(differ.sum())} of {differ.numel()}, first {where}"
    )


def test_swiglu_between_linears_has_the_bits_of_torch():
    """Every BF16 number as a gate, and numbers of many orders of magnitude; sizes that fill no tile, too."""
    every = torch.arange(2**16, device="cuda").to(torch.int16).view(torch.bfloat16).view(512, 128)
    cases = [torch.cat([every, torch.ones_like(every)], 1), torch.cat([every, random_rows(512, 128)], 1)]
    cases += [random_rows(rows, 2 * width, octaves=6) for rows, width in ((4099, 768), (37, 1000), (5, 3))]
    for h in cases:
        gate, up = h.chunk(2, dim=1)
        assert_same_bits(swiglu.swiglu(h), F.silu(gate) * up)


def test_gradients_between_linears_are_those_of_float64():
    h, dy = random_rows(4099, 2 * 1000, octaves=6).requires_grad_(), random_rows(4099, 1000, seed=1, octaves=6)
    exact = h.detach().double().requires_grad_()
    gate, up = exact.chunk(2, dim=1)
    (expected,) = torch.autograd.grad(F.silu(gate) * up, exact, dy.double())
    (actual,) = torch.autograd.grad(swiglu.swiglu(h), h, dy)
    # Half a unit of BF16's last place; terms of the slope cancel near gate -1.28, to float32's error.
    size = torch.cat([dy * up.detach(), dy * gate.detach()], 1).abs()
    assert ((actual - expected).abs() <= 2**-8 * 1.01 * expected.abs() + 1e-5 * size).all()


@pytest.mark.parametrize("rows, width", [(4099, 2048), (37, 1000), (0, 64)])
def test_the_routers_weight_behind_linears(rows, width):
    y, dy = random_rows(rows, width).requires_grad_(), random_rows(rows, width, seed=1)
    probs = torch.rand(rows, device="cuda").requires_grad_()
    actual, expected = swiglu.weighted(y, probs), (y * probs[:, None]).to(y.dtype)
    assert_same_bits(actual, expected)
    of_y, of_probs = torch.autograd.grad(actual, (y, probs), dy)
    assert_same_bits(of_y, torch.autograd.grad(expected, y, dy)[0])
    terms = y.detach().double() * dy.double()
    assert ((of_probs - terms.sum(1)).abs() <= 2e-6 * terms.abs().sum(1)).all()


def test_one_pass_between_linears_is_faster_than_torch():
    """Forward and backward at the size of test_speed; what -s prints is milliseconds."""
    h, y = random_rows(131_072, 1536).requires_grad_(), random_rows(131_072, 2048).requires_grad_()
    da, dy, probs = random_rows(131_072, 768), random_rows(131_072, 2048), torch.rand(131_072, device="cuda")
    probs.requires_grad_()

    def torch_swiglu(h: torch.Tensor) -> torch.Tensor:
        gate, up = h.chunk(2, dim=1)
        return F.silu(gate) * up

    arms = {
        "SwiGLU": (swiglu.swiglu, torch_swiglu, (h,), da),
        "weighted": (swiglu.weighted, lambda y, probs: (y * probs[:, None]).to(y.dtype), (y, probs), dy),
    }
    for name, (ours, theirs, inputs, grad) in arms.items():
        ms = []
        for function in (ours, theirs):
            for attempt in range(8):
                if attempt == 3:
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                torch.autograd.grad(function(*inputs), inputs, grad)
            end.record()
            torch.cuda.synchronize()
            ms.append(begin.elapsed_time(end) / 5)
        print(f"\n{name}, forward and backward: {ms[0]:.3f} ms, torch {ms[1]:.3f} ms")
        assert ms[0] < ms[1], name


def test_speed():
    """Qwen3-30B-A3B experts: 131,072 routed tokens, hidden size 2048, 768 features."""
    from benchmarks.timing import copy_bandwidth
    from tests.helpers.moved_bytes import movement_calls

    copy = copy_bandwidth()
    counts = counts_of("uniform", 131_072, 128)
    for name, call, num_bytes in movement_calls(layout_of(counts), 2048, 768, "pow2"):
        for _ in range(3):
            call()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(10):
            call()
        end.record()
        torch.cuda.synchronize()
        seconds = begin.elapsed_time(end) / 1e4
        speed = num_bytes / seconds
        print(f"{name}: {seconds * 1e3:.3f} ms, {speed / 1e9:.0f} GB/s, {speed / copy:.2f} of a copy's")
        assert speed > 0.1 * copy, name
