"""Our CUDA kernels in threads of a CPU: where numbers lie, who waits for whom, and what the results are."""

import contextlib
import ctypes
import itertools
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from megatron_fp8rl.kernels import fused_moe_torch
from megatron_fp8rl.kernels.blockwise import quantize_weight
from megatron_fp8rl.kernels.cuda import launch
from megatron_fp8rl.kernels.fused_moe import expert_permutation, permute_quantize, unpermute
from megatron_fp8rl.kernels.fused_moe_torch import swizzled
from megatron_fp8rl.kernels.gemm import Fp8, multiply_fp8, multiply_fp8_to_tokens
from megatron_fp8rl.precision.formats import BLOCKWISE_POW2
from tests.tolerances import DECODE_ATTENTION

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

FOLDER = Path(launch.__file__).parent
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
    """The kernel as a function of the number of blocks and its arguments, with C++ ``types``, called as CUDA's."""
    source = PROGRAM.format(
        emulation=EMULATION,
        kernel=FOLDER / file,
        cluster=cluster,
        threads=threads,
        name=name,
        arguments=", ".join(f"*({kind}*)arguments[{i}]" for i, kind in enumerate(types)),
    )
    (folder / "run.cpp").write_text(source)
    command = ["g++", "-O2", "-std=c++17", "-shared", "-fPIC", "-pthread", "-Wno-unknown-pragmas", *options]
    subprocess.run([*command, str(folder / "run.cpp"), "-o", str(folder / "run.so")], check=True, timeout=DEADLINE_S)
    library = ctypes.CDLL(str(folder / "run.so"))
    return lambda blocks: launch._Kernel(launch.launcher(library), 1, blocks, threads, 0), launch.encoder(library)


@pytest.fixture(autouse=True)
def one_stream(monkeypatch):
    monkeypatch.setattr(launch, "_stream", lambda: None)


@pytest.fixture(scope="module", params=CLUSTERS, ids=lambda size: f"{size[0]} x {size[1]}")
def add_weight_gradients(request, tmp_path_factory):
    """(blocks of a cluster down, across, the kernel)."""
    down, across = request.param
    operand = ["const u8*", "const float*"]
    types = [*operand, *operand, "const int*", "float*", "int", "int", "int"]
    options = [f"-DDOWN={down}", f"-DACROSS={across}", "-DSTAGES=3", "-DLONG=150"]
    folder = tmp_path_factory.mktemp("kernel")
    name = "add_weight_gradients"
    return down, across, compiled(folder, "grouped_wgrad.cu", name, types, down * across, 384, options)[0]


@pytest.mark.slow
@pytest.mark.parametrize("counts, groups", [("one", 1), ("many", 1), ("few", 2)])
def test_weight_gradients_of_every_expert_are_added(add_weight_gradients, counts, groups):
    """``groups`` of blocks share the tiles; experts without a token keep what is there."""
    down, across, run = add_weight_gradients
    counts, num_rows, num_columns = COUNTS[counts], 128 * down * groups, 128 * across * 2
    layout = expert_permutation(torch.tensor(counts), sum(counts), counts)
    generator = torch.Generator().manual_seed(0)
    tokens = (torch.randn(sum(counts), n, generator=generator).bfloat16() for n in (num_rows, num_columns))
    made = [permute_quantize(x, layout, BLOCKWISE_POW2, rows=False, columns=True) for x in tokens]
    out = torch.randn(len(counts), num_rows, num_columns, generator=generator)
    g, x = (swizzled(m.columns).double() * m.column_scales[..., None] for m in made)
    products = g @ x.transpose(1, 2)
    ends = (layout.offsets // 128).tolist()
    sums = torch.stack([products[begin:end].sum(0) for begin, end in itertools.pairwise(ends)])
    expected = out.double() + sums
    operands = [tensor for m in made for tensor in (m.columns, m.column_scales)]
    run(groups * down * across)(*operands, layout.offsets, out, *out.shape)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(out[layout.padded_counts == 0], expected.float()[layout.padded_counts == 0])


@pytest.fixture(scope="module")
def multiply_rows(tmp_path_factory):
    """(the kernel, what describes matrices to it)."""
    types = ["const TensorMap", "const float*"] * 2 + ["const int*"] * 3 + ["const float*", "u16*"] + ["int"] * 6
    folder = tmp_path_factory.mktemp("kernel")
    options = ["-DSTAGES=3", f"-DWIDTH={launch._WIDTH}"]
    return compiled(folder, "grouped_gemm_to_tokens.cu", "multiply_rows", types, 2, 384, options)


@pytest.mark.parametrize(
    "counts, num_columns, weighted, exact",
    [("many", 256, True, True), ("one", 384, True, True), ("few", 128, False, False)],
)
def test_rows_are_multiplied_by_their_experts_weights_and_written_to_their_tokens(
    multiply_rows, monkeypatch, counts, num_columns, weighted, exact
):
    """``exact``: the host knows the counts. With transposed scales; or to all rows of the layout."""
    kernel, encode = multiply_rows
    monkeypatch.setattr(launch, "_multiply_rows", lambda device: kernel(4))
    monkeypatch.setattr(launch, "_encoder", lambda: encode)
    counts, depth = COUNTS[counts], 256
    layout = expert_permutation(torch.tensor(counts), sum(counts), counts if exact else None)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(sum(counts), depth, generator=generator).bfloat16()
    made = permute_quantize(tokens, layout, BLOCKWISE_POW2)
    weights = torch.randn(len(counts) * depth, num_columns, generator=generator) / 16
    data, scale = (x.view(len(counts), -1, x.shape[1]) for x in quantize_weight(weights.bfloat16(), "pow2"))
    w = Fp8(data, scale).transposed()
    probs = torch.rand(layout.num_tokens, generator=generator) if weighted else None
    operands = made.rows, made.row_scales, *w, layout.offsets, layout.experts
    to_tokens = torch.full((layout.num_tokens, num_columns), torch.nan).bfloat16()
    launch.multiply_rows(*operands, to_tokens, layout.rows, probs)
    to_rows = torch.full((layout.num_rows, num_columns), torch.nan).bfloat16()
    launch.multiply_rows(*operands, to_rows)

    end = int(layout.offsets[-1])
    alone = expert_permutation(torch.tensor(counts), sum(counts), counts)
    expected = multiply_fp8(Fp8(made.rows[:end], made.row_scales[:end]), w, alone, torch.bfloat16)
    close = dict(rtol=1e-2, atol=1e-2)  # sums round to BF16, and are in another order
    torch.testing.assert_close(to_rows[:end], expected, **close)
    assert to_rows[end:].isnan().all(), "rows behind the last expert are left alone"
    torch.testing.assert_close(to_tokens, unpermute(expected, alone, probs), **close)
    assert torch.equal(to_tokens, unpermute(to_rows[:end], alone, probs)), "the same bits, each at its place"


@pytest.mark.parametrize("counts, has_all", [([100, 28], True), ([100, 20], False), (None, False)])
def test_tokens_without_a_row_are_zeros(monkeypatch, counts, has_all):
    """Memory is cleared where the host does not know that every token has a row, which the kernel writes."""
    layout = expert_permutation(torch.tensor(counts or [100, 28]), 128, counts)
    assert layout.has_all_tokens == has_all
    made = permute_quantize(torch.ones(128, 256).bfloat16(), layout, BLOCKWISE_POW2)
    w = Fp8(torch.zeros(2, 128, 256).to(torch.float8_e4m3fn), torch.ones(2, 1, 2))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **how: empty(*size, **how).fill_(7))
    monkeypatch.setattr(launch, "is_hopper", lambda device: True)
    monkeypatch.setattr(launch, "multiply_rows", lambda *arguments: None)
    out = multiply_fp8_to_tokens(Fp8(made.rows, made.row_scales), w, layout)
    assert out.shape == (128, 128) and (out == (7 if has_all else 0)).all()


@pytest.fixture(scope="module", params=[True, False], ids=["weighted", "of dense layers"])
def swiglu_backward(request, tmp_path_factory):
    """(whether outputs are weighted, the kernel)."""
    types = (
        ["const u16*"] * 2 + ["const float*"] + ["const int*"] * 2 + ["u8*", "float*"] * 3 + ["float*", "int", "int"]
    )
    options = [f"-DWEIGHTED={int(request.param)}"]
    folder = tmp_path_factory.mktemp("kernel")
    return request.param, compiled(folder, "swiglu_backward.cu", "swiglu_backward", types, 1, 640, options)[0]


@pytest.mark.slow
@pytest.mark.parametrize("counts, exact", [("one", True), ("few", False)])
def test_the_gradient_of_swiglu_is_torchs_in_bytes(swiglu_backward, counts, exact):
    """In all forms at once; zeros, infinity and what stands in padding included."""
    weighted, run = swiglu_backward
    counts, width = COUNTS[counts], 256
    layout = expert_permutation(torch.tensor(counts), sum(counts), counts if exact else None)
    num_rows, end = layout.num_rows, int(layout.offsets[-1])
    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp2(torch.randint(-4, 3, (num_rows, 1), generator=generator).float())
    h = (torch.randn(num_rows, 2 * width, generator=generator) * sizes).bfloat16()
    dy = (torch.randn(num_rows, width, generator=generator) * 1e-2).bfloat16()
    h[:, 3], dy[5, :128], h[17, 9] = 0, 0, torch.inf
    h[layout.experts < 0], dy[layout.experts < 0] = torch.nan, torch.nan
    probs = torch.rand(layout.num_tokens, generator=generator)
    expected = fused_moe_torch.swiglu_backward_quantize(
        dy,
        h,
        layout,
        "pow2",
        rows=True,
        columns=True,
        bf16=False,
        activation_columns=True,
        activation_bf16=False,
        probs=probs if weighted else None,
    )
    dh = [torch.zeros(num_rows, 2 * width, dtype=torch.uint8), torch.zeros(2 * width // 128, num_rows)]
    for features in (2 * width, width):
        dh += [torch.zeros(num_rows // 128, features, 128, dtype=torch.uint8)]
        dh += [torch.zeros(num_rows // 128, features)]
    sums = torch.zeros(width // 128, num_rows)
    run(2)(dy, h, probs, layout.rows, layout.experts, *dh, sums, num_rows, width)

    of_dh, of_activation = expected.dh, expected.activation
    wanted = [of_dh.rows, of_dh.row_scales, of_dh.columns, of_dh.column_scales]
    wanted += [of_activation.columns, of_activation.column_scales]
    dh[1] = dh[1].t()
    for actual, right, last in zip(dh, wanted, [end, end] + [end // 128] * 4, strict=True):
        if actual.dtype == torch.uint8:
            actual, right = (torch.where(x & 0x7F == 0x7F, 0x7F, x) for x in (actual, right.view(torch.uint8)))
        same = (actual == right) | (actual.isnan() & right.isnan())
        assert same[:last].all(), same[:last].logical_not().nonzero()[:3]
        assert not actual[last:].any(), "rows behind the last expert are left alone"
    if weighted:
        dprobs = sums.sum(0)[layout.positions.clamp(min=0).long()]
        torch.testing.assert_close(dprobs, expected.dprobs, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim, window", [(64, 0), (128, 0), (64, 1), (128, 129), (64, 300), (256, 90)])
def test_packed_queries_attend_to_the_keys_before_them(head_dim, window, tmp_path, monkeypatch):
    """Two sequences of several parts (of 256 keys here), one with more keys than queries, and two heads of a group. The
    queries of an item see from none to all keys of a tile before their windows."""
    counts, lengths, num_heads, scale = (3, 40), (300, 400), 2, 0.05
    if window > 1:
        counts, num_heads = (3, 80 if head_dim == 256 else 140), 1
    types = ["const TensorMap"] * 2 + ["const u16*"] + ["const int*"] * 3 + ["const float*"] * 2
    types += ["u16*", "float*"] + ["int"] * 7
    options = [f"-DDIM={head_dim}", "-DTILES=2", f"-DWINDOW={window}"]
    run, encode = compiled(tmp_path, "packed_attention.cu", "packed_attention", types, 1, 384, options)
    monkeypatch.setattr(launch, "_encoder", lambda: encode)
    monkeypatch.setattr(launch, "_packed_attention", lambda device, dim, window: run(2))
    monkeypatch.setattr(launch, "is_hopper", lambda device: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    launch._map_of.cache_clear()

    generator = torch.Generator().manual_seed(0)
    query = torch.randn(sum(counts), num_heads, head_dim, generator=generator).bfloat16()
    key, value = (
        (4 * torch.randn(sum(lengths), head_dim, generator=generator)).to(torch.float8_e4m3fn).half() for _ in range(2)
    )
    keys = key.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    starts, ends = (torch.tensor([0, *x]).cumsum(0).int() for x in (counts, lengths))
    out, log_sums = torch.full_like(query, 7.0), torch.full((num_heads, sum(counts)), 7.0)
    scales = torch.tensor([0.5]), torch.tensor([2.0**-4])
    arguments = query, keys[:, None].contiguous(), value[:, None], starts, ends, ends.diff(), *scales, scale
    launch.packed_attention(*arguments, max(counts), out, log_sums, window)
    if window > 1:  # an item of one query starts later, and has the same bits
        alone, log_sum = out.new_empty(1, num_heads, head_dim), torch.empty(num_heads, 1)
        one = torch.tensor([0, 1]).int(), starts[1:2] * 0 + lengths[0], ends.diff()[1:]
        of_keys = arguments[1:3]
        launch.packed_attention(query[-1:], *of_keys, *one, *scales, scale, 1, alone, log_sum, window)
        assert torch.equal(alone[0], out[-1]) and torch.equal(log_sum[:, 0], log_sums[:, -1])
    launch._map_of.cache_clear()

    for row in range(sum(counts)):
        sequence = int(row >= counts[0])
        last = int(ends[sequence + 1]) - int(starts[sequence + 1]) + row + 1
        seen = slice(max(int(ends[sequence]), last - (window or last)), last)
        scores = query[row].double() @ key[seen].double().t() * (scale * 0.5)
        torch.testing.assert_close(
            out[row].double(), scores.softmax(-1) @ value[seen].double() * 2.0**-4, **DECODE_ATTENTION
        )
        torch.testing.assert_close(log_sums[:, row].double(), scores.logsumexp(-1), rtol=1e-4, atol=1e-3)
