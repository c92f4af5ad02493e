"""Our CUDA kernel for weight gradients, run in threads of a CPU against float64: where numbers lie, who waits for whom."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from megatron_fp8rl.trainer import weight_gradients
from megatron_fp8rl.trainer.expert_kernels import Layout, permute_quantize
from megatron_fp8rl.trainer.expert_reference import swizzled

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

KERNEL = Path(weight_gradients.__file__).with_suffix(".cu")
HEADER = Path(__file__).parents[2] / "helpers" / "emulated_gpu.h"
CLUSTERS = [(1, 1), (1, 2), (2, 1), (2, 2)]  # blocks down and across
DEADLINE_S = 120
PROGRAM = """
#include "{header}"
#include "{kernel}"
extern "C" void run(int blocks, const u8* g, const float* gs, const u8* x, const float* xs, const int* offsets, float* out,
                    int experts, int n, int k) {{
    launch<CLUSTER>(blocks, add_weight_gradients, g, gs, x, xs, offsets, out, experts, n, k);
}}
"""


@pytest.fixture(scope="module", params=CLUSTERS, ids=lambda size: f"{size[0]} x {size[1]}")
def kernel(request, tmp_path_factory):
    """(blocks of a cluster down, across, the function)."""
    down, across = request.param
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "run.cpp").write_text(PROGRAM.format(header=HEADER, kernel=KERNEL))
    command = ["g++", "-O2", "-std=c++17", "-shared", "-fPIC", "-pthread", "-Wno-unknown-pragmas", f"-DDOWN={down}"]
    command += [f"-DACROSS={across}", "-DSTAGES=3", str(folder / "run.cpp"), "-o", str(folder / "run.so")]
    subprocess.run(command, check=True, timeout=DEADLINE_S)
    return down, across, ctypes.CDLL(str(folder / "run.so")).run


@pytest.mark.parametrize(
    "counts, groups", [([130], 1), ([256, 0, 1, 600, 0, 100], 1), ([0, 0, 300, 0], 2)], ids=["one", "many", "few"]
)
def test_gradients_of_every_expert_are_added(kernel, counts, groups):
    """``groups`` of blocks share the tiles; experts without a token keep what is there."""
    down, across, run = kernel
    num_rows, num_columns = 128 * down * groups, 128 * across * 2
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
    operands = [tensor for m in made for tensor in (m.columns, m.column_scales)] + [layout.offsets, out]
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in operands]
    run(groups * down * across, *pointers, *out.shape)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(out[layout.padded_counts == 0], expected.float()[layout.padded_counts == 0])
