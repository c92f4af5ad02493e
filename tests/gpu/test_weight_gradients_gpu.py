"""Our kernel for weight gradients on a Hopper GPU: the sums of DeepGEMM's, whatever the experts' shares; -s shows ms."""

from __future__ import annotations

import statistics

import pytest
import torch

from megatron_fp8rl.trainer import weight_gradients
from megatron_fp8rl.trainer.expert_kernels import Layout, permute_quantize
from megatron_fp8rl.trainer.expert_reference import swizzled
from megatron_fp8rl.trainer.grouped_gemm import deep_gemm, has_deep_gemm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]

COUNTS = {
    "balanced": [256] * 16,
    "ragged": [300, 0, 1, 640, 0, 129, 127, 5],
    "one has all": [0] * 7 + [4096],
    "none": [0] * 4,
}


def operands(counts, *widths: int, scales: str = "pow2"):
    """The layout, and for each width random tokens in columns."""
    layout = Layout.of(torch.tensor(counts, device="cuda"), sum(counts), counts)
    generator = torch.Generator("cuda").manual_seed(0)
    made = []
    for width in widths:
        x = torch.randn(sum(counts), width, device="cuda", generator=generator).bfloat16()
        made.append(permute_quantize(x, layout, scales, rows=False, columns=True))
    return layout, [tensor for m in made for tensor in (m.columns, m.column_scales)]


def in_matrices(lines, scales, layout):
    """What DeepGEMM's k-grouped kernel takes: each expert's [K, its rows], one behind the other."""
    blocks = [rows // 128 for rows in layout.host_counts]
    parts = swizzled(lines)[: sum(blocks)].split(blocks)
    return torch.cat([part.transpose(0, 1).flatten() for part in parts]), scales.t()


@pytest.mark.skipif(not has_deep_gemm(), reason="needs DeepGEMM")
@pytest.mark.parametrize("scales", ["pow2", "fp32"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (384, 512), (1536, 2048)])
def test_the_sums_are_deep_gemms(shape, counts, scales):
    layout, (g, gs, x, xs) = operands(counts, *shape, scales=scales)
    ours = torch.randn(len(counts), *shape, device="cuda")
    theirs = ours.clone()
    weight_gradients.add(g, gs, x, xs, layout.offsets, ours)
    if layout.num_rows:
        deep_gemm().k_grouped_fp8_gemm_nt_contiguous(
            in_matrices(g, gs, layout), in_matrices(x, xs, layout), theirs, layout.host_counts, layout.padded_counts,
            theirs,
        )  # fmt: skip
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-4 * float(theirs.abs().max()))
    if scales == "pow2":
        assert torch.equal(ours, theirs)


def test_sums_are_the_same_at_every_time_and_wait_for_nobody():
    layout, tensors = operands(COUNTS["ragged"], 768, 512)
    first = torch.zeros(8, 768, 512, device="cuda")
    weight_gradients.add(*tensors, layout.offsets, first)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        others = [torch.zeros_like(first) for _ in range(4)]
        for out in others:
            weight_gradients.add(*tensors, layout.offsets, out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(out, first) for out in others)


def test_what_is_no_number_stays_with_its_feature():
    layout, (g, gs, x, xs) = operands([200, 300], 256, 256)
    gs[1, 7] = torch.nan  # the second block of the first expert
    out = torch.zeros(2, 256, 256, device="cuda")
    weight_gradients.add(g, gs, x, xs, layout.offsets, out)
    assert out[0, 7].isnan().all() and not out[1].isnan().any()
    assert not out[0, [row for row in range(256) if row != 7]].isnan().any()


@pytest.mark.skipif(not has_deep_gemm(), reason="needs DeepGEMM")
def test_it_is_faster_than_deep_gemms():
    """Experts of Qwen3-30B-A3B. The bound is so wide that the kernel has to be broken to miss it."""

    def milliseconds(call) -> float:
        call()
        times = []
        for _ in range(7):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(1_500_000)
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        return statistics.median(times)

    for shape in ((1536, 2048), (2048, 768)):
        layout, (g, gs, x, xs) = operands([1024] * 128, *shape)
        out = torch.zeros(128, *shape, device="cuda")
        ours = milliseconds(lambda: weight_gradients.add(g, gs, x, xs, layout.offsets, out))
        matrices = in_matrices(g, gs, layout), in_matrices(x, xs, layout)
        theirs = milliseconds(
            lambda: deep_gemm().k_grouped_fp8_gemm_nt_contiguous(
                *matrices, out, layout.host_counts, layout.padded_counts, out
            )
        )
        print(f"\nweight gradients of 128 x {shape}: {ours:.3f} ms, DeepGEMM {theirs:.3f} ms")
        assert ours < 1.1 * theirs
