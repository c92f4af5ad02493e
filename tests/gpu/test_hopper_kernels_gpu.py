"""Our CUDA kernels on a Hopper GPU: the sums of DeepGEMM, the bytes of Triton; -s shows milliseconds."""

from functools import partial

import pytest
import torch

from benchmarks.timing import milliseconds
from megatron_fp8rl.kernels.cuda import launch
from megatron_fp8rl.kernels.deep_gemm import deep_gemm, has_deep_gemm
from megatron_fp8rl.kernels.fused_moe import (
    expert_permutation,
    permute_quantize,
    swiglu_backward_quantize,
    unpermute,
)
from megatron_fp8rl.kernels.fused_moe_torch import swizzled
from megatron_fp8rl.kernels.gemm import Fp8, multiply_fp8, multiply_fp8_to_tokens, quantized
from megatron_fp8rl.precision.formats import BLOCKWISE_POW2, blockwise_format
from tests.helpers.hopper import ON_HOPPER

pytestmark = ON_HOPPER

busy_ms = partial(milliseconds, rounds=7, warm=1, busy=0.75)  # of the GPU, behind other work
COUNTS = {
    "balanced": [256] * 16,
    "ragged": [300, 0, 1, 640, 0, 129, 127, 5],
    "one has all": [0] * 7 + [4096],
    "none": [0] * 4,
}


def operands(counts, *widths: int, scales: str = "pow2"):
    """The layout, and for each width random tokens in columns."""
    layout = expert_permutation(torch.tensor(counts, device="cuda"), sum(counts), counts)
    generator = torch.Generator("cuda").manual_seed(0)
    made = []
    for width in widths:
        x = torch.randn(sum(counts), width, device="cuda", generator=generator).bfloat16()
        made.append(permute_quantize(x, layout, blockwise_format(scales), rows=False, columns=True))
    return layout, [tensor for m in made for tensor in (m.columns, m.column_scales)]


def in_matrices(lines, scales, layout):
    """Input of DeepGEMM's k-grouped kernel: each expert's [K, its rows], concatenated."""
    blocks = [rows // 128 for rows in layout.host_counts]
    parts = swizzled(lines)[: sum(blocks)].split(blocks)
    return torch.cat([part.transpose(0, 1).flatten() for part in parts]), scales.t()


@pytest.mark.parametrize("scales", ["pow2", "fp32"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("shape", [(128, 128), (128, 256), (384, 512), (256, 384), (1536, 2048)])
def test_the_sums_are_exact_and_every_experts_own(shape, counts, scales):
    layout, (g, gs, x, xs) = operands(counts, *shape, scales=scales)
    before = torch.randn(len(counts), *shape, device="cuda")
    ours, blocks = before.clone(), [rows // 128 for rows in layout.host_counts]
    launch.add_weight_gradients(g, gs, x, xs, layout.offsets, ours)
    numbers = [swizzled(data).double() * scale[..., None] for data, scale in ((g, gs), (x, xs))]
    first = 0
    for expert, count in enumerate(blocks):
        mine = slice(first, first + count)
        expected = before[expert] + (numbers[0][mine] @ numbers[1][mine].transpose(1, 2)).sum(0)
        # Tensor cores add FP8 products in fewer bits than float32 has: 3e-4 of the largest were seen on an H200.
        torch.testing.assert_close(ours[expert].double(), expected, rtol=0, atol=1e-3 * float(expected.abs().max()))
        alone = before[expert : expert + 1].clone()
        offsets = torch.tensor([0, count * 128], dtype=torch.int32, device="cuda")
        launch.add_weight_gradients(g[mine], gs[mine], x[mine], xs[mine], offsets, alone)
        assert torch.equal(alone[0], ours[expert]), expert
        first += count


@pytest.mark.skipif(not has_deep_gemm(), reason="needs DeepGEMM")
@pytest.mark.parametrize("counts", [COUNTS["balanced"], COUNTS["one has all"], [8192, 0]])
@pytest.mark.parametrize("shape", [(384, 512), (1536, 2048)])
def test_the_sums_have_the_bits_of_deep_gemms(shape, counts):
    """Where experts have more than 128 rows: with fewer, DeepGEMM's are sometimes those of other operands."""
    layout, (g, gs, x, xs) = operands(counts, *shape)
    ours = torch.randn(len(counts), *shape, device="cuda")
    theirs = ours.clone()
    launch.add_weight_gradients(g, gs, x, xs, layout.offsets, ours)
    deep_gemm().k_grouped_fp8_gemm_nt_contiguous(
        in_matrices(g, gs, layout), in_matrices(x, xs, layout), theirs, layout.host_counts, layout.padded_counts, theirs
    )
    assert torch.equal(ours, theirs)


def test_sums_are_the_same_at_every_time_and_wait_for_nobody():
    layout, tensors = operands(COUNTS["ragged"], 768, 512)
    first = torch.zeros(8, 768, 512, device="cuda")
    launch.add_weight_gradients(*tensors, layout.offsets, first)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        others = [torch.zeros_like(first) for _ in range(4)]
        for out in others:
            launch.add_weight_gradients(*tensors, layout.offsets, out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(out, first) for out in others)


def test_what_is_no_number_stays_with_its_feature():
    layout, (g, gs, x, xs) = operands([200, 300], 256, 256)
    gs[1, 7] = torch.nan  # the second block of the first expert
    out = torch.zeros(2, 256, 256, device="cuda")
    launch.add_weight_gradients(g, gs, x, xs, layout.offsets, out)
    assert out[0, 7].isnan().all() and not out[1].isnan().any()
    assert not out[0, [row for row in range(256) if row != 7]].isnan().any()


@pytest.mark.skipif(not has_deep_gemm(), reason="needs DeepGEMM")
def test_weight_gradients_are_faster_than_deep_gemms():
    """Experts of Qwen3-30B-A3B. The bound is so wide that the kernel has to be broken to miss it."""
    for shape in ((1536, 2048), (2048, 768)):
        layout, (g, gs, x, xs) = operands([1024] * 128, *shape)
        out = torch.zeros(128, *shape, device="cuda")
        ours = busy_ms(lambda: launch.add_weight_gradients(g, gs, x, xs, layout.offsets, out))
        matrices = in_matrices(g, gs, layout), in_matrices(x, xs, layout)
        theirs = busy_ms(
            lambda: deep_gemm().k_grouped_fp8_gemm_nt_contiguous(
                *matrices, out, layout.host_counts, layout.padded_counts, out
            )
        )
        print(f"\nweight gradients of 128 x {shape}: {ours:.3f} ms, DeepGEMM {theirs:.3f} ms")
        assert ours < 1.1 * theirs


def products(counts, shape, scales="pow2"):
    """The layout, padded tokens [P, K] in rows, and weights [E, N, K]."""
    layout = expert_permutation(torch.tensor(counts, device="cuda"), sum(counts), counts)
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(layout.num_tokens, shape[1], device="cuda", generator=generator).bfloat16()
    weights = torch.randn(len(counts), *shape, device="cuda", generator=generator).bfloat16() / 16
    made = permute_quantize(x, layout, blockwise_format(scales))
    return layout, Fp8(made.rows, made.row_scales), quantized(weights, blockwise_format(scales))


@pytest.mark.skipif(not has_deep_gemm(), reason="needs DeepGEMM")
@pytest.mark.parametrize("scales", ["pow2", "fp32"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("shape", [(128, 256), (384, 512), (2048, 768)])
def test_rows_have_the_bits_of_deep_gemms(shape, counts, scales):
    layout, x, w = products(counts, shape, scales)
    probs = torch.rand(layout.num_tokens, device="cuda")
    for weights in (w, Fp8(w.data.transpose(1, 2).contiguous(), w.scale.transpose(1, 2)).transposed()):
        theirs = multiply_fp8(x, weights, layout, torch.bfloat16)
        ours = torch.full_like(theirs, torch.nan)
        if layout.num_rows:
            launch.multiply_rows(*x, *weights, layout.offsets, layout.experts, ours)
        assert torch.equal(ours, theirs)
        for p in (probs, None):
            actual = multiply_fp8_to_tokens(x, weights, layout, p)
            assert torch.equal(actual, unpermute(theirs, layout, p))


@pytest.mark.skipif(not has_deep_gemm(), reason="needs DeepGEMM")
@pytest.mark.parametrize("shape", [(1536, 2048), (2048, 768), (768, 2048), (2048, 1536)])
def test_products_to_tokens_are_faster_than_deep_gemms_and_a_copy(shape):
    """Experts of Qwen3-30B-A3B. The bound is so wide that the kernel has to be broken to miss it."""
    layout, x, w = products([1000] * 128, shape)
    out = torch.empty(layout.num_rows, shape[0], dtype=torch.bfloat16, device="cuda")
    to_rows = busy_ms(lambda: launch.multiply_rows(*x, *w, layout.offsets, layout.experts, out))
    theirs_to_rows = busy_ms(lambda: multiply_fp8(x, w, layout, torch.bfloat16))
    ours = busy_ms(lambda: multiply_fp8_to_tokens(x, w, layout))
    theirs = busy_ms(lambda: unpermute(multiply_fp8(x, w, layout, torch.bfloat16), layout))
    print(f"\n{shape}: {ours:.3f} ms, DeepGEMM {theirs:.3f} ms; padded {to_rows:.3f} and {theirs_to_rows:.3f} ms")
    assert ours < 1.1 * theirs


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("counts", [*COUNTS, "many"])
def test_the_gradient_of_swiglu_is_tritons(counts, weighted, monkeypatch):
    """Both add and multiply in float32, which compilers may contract differently, before they round to BF16."""
    counts, width = COUNTS.get(counts, [1024] * 128), 768
    layout = expert_permutation(torch.tensor(counts, device="cuda"), sum(counts), counts)
    generator = torch.Generator("cuda").manual_seed(0)
    h = torch.randn(layout.num_rows, 2 * width, device="cuda", generator=generator).bfloat16()
    dy = torch.randn(layout.num_rows, width, device="cuda", generator=generator).bfloat16()
    h[layout.experts < 0], dy[layout.experts < 0] = torch.nan, torch.nan
    probs = torch.rand(layout.num_tokens, device="cuda", generator=generator) if weighted else None

    def run():
        return swiglu_backward_quantize(dy, h, layout, BLOCKWISE_POW2, activation_columns=True, probs=probs)

    ours, ms = run(), busy_ms(run)
    monkeypatch.setattr(launch, "is_hopper", lambda device: False)
    theirs, tritons_ms = run(), busy_ms(run)
    print(f"\n{sum(counts)} tokens: {ms:.3f} ms, Triton {tritons_ms:.3f} ms")
    names = [("dh", "rows"), ("dh", "row_scales"), ("dh", "columns"), ("dh", "column_scales")]
    for part, name in [*names, ("activation", "columns"), ("activation", "column_scales")]:
        actual, expected = (getattr(getattr(x, part), name) for x in (ours, theirs))
        if actual.dtype == torch.float8_e4m3fn:
            actual, expected = actual.view(torch.uint8), expected.view(torch.uint8)
        differ = (actual != expected).float().mean().item() if actual.numel() else 0.0
        assert differ < 2e-3, f"{part} {name}: {differ:.2%} differ"
    if weighted:
        torch.testing.assert_close(ours.dprobs, theirs.dprobs, rtol=1e-4, atol=1e-3)
