"""Our CUDA kernels in threads of a CPU: where numbers lie, who waits for whom, and what the results are."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from megatron_fp8rl.trainer import expert_reference, hopper
from megatron_fp8rl.trainer.expert_kernels import Layout, permute_quantize
from megatron_fp8rl.trainer.expert_reference import swizzled

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

FOLDER = Path(hopper.__file__).with_name("cuda")
EMULATION = Path(__file__).parents[2] / "helpers" / "emulated_gpu.h"
DEADLINE_S = 120
PROGRAM = """
#include "{emulation}"
#include "{kernel}"
extern "C" int cuLaunchKernel(void* function, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned, unsigned,
                              unsigned, void* stream, void** arguments, void** options) {{
    if (function != (void*)1 || threads != {threads} || stream || options) return 1;
    launch<{cluster}, {threads}>(blocks, {name}, {arguments});
    return 0;
}}
"""
CLUSTERS = [(1, 1), (1, 2), (2, 1), (2, 2)]  # blocks down and across
COUNTS = {"one": [130], "many": [256, 0, 1, 600, 0, 100], "few": [0, 0, 300, 0]}


def compiled(folder: Path, file: str, name: str, types: list[str], cluster: int, threads: int, options: list[str]):
    """The kernel as a function of a number of blocks and its own arguments, of ``types`` in C++: called as CUDA's is."""
    source = PROGRAM.format(
        emulation=EMULATION, kernel=FOLDER / file, cluster=cluster, threads=threads, name=name,
        arguments=", ".join(f"*({kind}*)arguments[{i}]" for i, kind in enumerate(types)),
    )  # fmt: skip
    (folder / "run.cpp").write_text(source)
    command = ["g++", "-O2", "-std=c++17", "-shared", "-fPIC", "-pthread", "-Wno-unknown-pragmas", *options]
    subprocess.run([*command, str(folder / "run.cpp"), "-o", str(folder / "run.so")], check=True, timeout=DEADLINE_S)
    launch = hopper.launcher(ctypes.CDLL(str(folder / "run.so")))
    return lambda blocks, *arguments: hopper._Kernel(launch, 1, blocks, threads, 0)(*arguments)


@pytest.fixture(autouse=True)
def one_stream(monkeypatch):
    monkeypatch.setattr(hopper, "_stream", lambda: None)


@pytest.fixture(scope="module", params=CLUSTERS, ids=lambda size: f"{size[0]} x {size[1]}")
def add_weight_gradients(request, tmp_path_factory):
    """(blocks of a cluster down, across, the kernel)."""
    down, across = request.param
    operand = ["const u8*", "const float*"]
    types = [*operand, *operand, "const int*", "float*", "int", "int", "int"]
    options = [f"-DDOWN={down}", f"-DACROSS={across}", "-DSTAGES=3", "-DLONG=150"]
    folder = tmp_path_factory.mktemp("kernel")
    return down, across, compiled(
        folder, "weight_gradients.cu", "add_weight_gradients", types, down * across, 384, options
    )


@pytest.mark.parametrize("counts, groups", [("one", 1), ("many", 1), ("few", 2)])
def test_weight_gradients_of_every_expert_are_added(add_weight_gradients, counts, groups):
    """``groups`` of blocks share the tiles; experts without a token keep what is there."""
    down, across, run = add_weight_gradients
    counts, num_rows, num_columns = COUNTS[counts], 128 * down * groups, 128 * across * 2
    layout = Layout.of(torch.tensor(counts), sum(counts), counts)
    generator = torch.Generator().manual_seed(0)
    tokens = (torch.randn(sum(counts), n, generator=generator).bfloat16() for n in (num_rows, num_columns))
    made = [permute_quantize(x, layout, "pow2", rows=False, columns=True) for x in tokens]
    out = torch.randn(len(counts), num_rows, num_columns, generator=generator)
    g, x = (swizzled(m.columns).double() * m.column_scales[..., None] for m in made)
    products = g @ x.transpose(1, 2)
    ends = (layout.offsets // 128).tolist()
    sums = torch.stack([products[begin:end].sum(0) for begin, end in zip(ends, ends[1:])])
    expected = out.double() + sums
    operands = [tensor for m in made for tensor in (m.columns, m.column_scales)]
    run(groups * down * across, *operands, layout.offsets, out, *out.shape)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(out[layout.padded_counts == 0], expected.float()[layout.padded_counts == 0])


@pytest.fixture(scope="module", params=[True, False], ids=["weighted", "of dense layers"])
def swiglu_backward(request, tmp_path_factory):
    """(whether outputs are weighted, the kernel)."""
    types = ["const u16*"] * 2 + ["const float*"] + ["const int*"] * 2 + ["u8*", "float*"] * 3 + ["float*", "int", "int"]
    options = [f"-DWEIGHTED={int(request.param)}"]
    folder = tmp_path_factory.mktemp("kernel")
    return request.param, compiled(folder, "swiglu_backward.cu", "swiglu_backward", types, 1, 640, options)


@pytest.mark.parametrize("counts, exact", [("one", True), ("few", False)])
def test_the_gradient_of_swiglu_is_torchs_in_bytes(swiglu_backward, counts, exact):
    """In all forms at once; zeros, infinity and what stands in padding included."""
    weighted, run = swiglu_backward
    counts, width = COUNTS[counts], 256
    layout = Layout.of(torch.tensor(counts), sum(counts), counts if exact else None)
    num_rows, end = layout.num_rows, int(layout.offsets[-1])
    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp2(torch.randint(-4, 3, (num_rows, 1), generator=generator).float())
    h = (torch.randn(num_rows, 2 * width, generator=generator) * sizes).bfloat16()
    dy = (torch.randn(num_rows, width, generator=generator) * 1e-2).bfloat16()
    h[:, 3], dy[5, :128], h[17, 9] = 0, 0, torch.inf
    h[layout.experts < 0], dy[layout.experts < 0] = torch.nan, torch.nan
    probs = torch.rand(layout.num_tokens, generator=generator)
    expected = expert_reference.swiglu_backward_quantize(
        dy, h, layout, "pow2", rows=True, columns=True, bf16=False, activation_columns=True, activation_bf16=False,
        probs=probs if weighted else None,
    )  # fmt: skip
    dh = [torch.zeros(num_rows, 2 * width, dtype=torch.uint8), torch.zeros(2 * width // 128, num_rows)]
    for features in (2 * width, width):
        dh += [torch.zeros(num_rows // 128, features, 128, dtype=torch.uint8)]
        dh += [torch.zeros(num_rows // 128, features)]
    sums = torch.zeros(width // 128, num_rows)
    run(2, dy, h, probs, layout.rows, layout.experts, *dh, sums, num_rows, width)

    of_dh, of_activation = expected.dh, expected.activation
    wanted = [of_dh.rows, of_dh.row_scales, of_dh.columns, of_dh.column_scales]
    wanted += [of_activation.columns, of_activation.column_scales]
    dh[1] = dh[1].t()
    for found, right, last in zip(dh, wanted, [end, end] + [end // 128] * 4, strict=True):
        if found.dtype == torch.uint8:
            found, right = (torch.where(x & 0x7F == 0x7F, 0x7F, x) for x in (found, right.view(torch.uint8)))
        same = (found == right) | (found.isnan() & right.isnan())
        assert same[:last].all(), same[:last].logical_not().nonzero()[:3]
        assert not found[last:].any(), "rows behind the last expert are left alone"
    if weighted:
        dprobs = sums.sum(0)[layout.positions.clamp(min=0).long()]
        torch.testing.assert_close(dprobs, expected.dprobs, rtol=1e-5, atol=1e-6, equal_nan=True)
