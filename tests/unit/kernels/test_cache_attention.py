"""Attention over an FP8 cache against torch in float64: in Triton's interpreter, and compiled for a Hopper GPU."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_fp8rl.kernels.cuda import launch
from tests.helpers.compiled import compile_kernel, instructions, register_report
from tests.helpers.decode_cases import Case, expected
from tests.helpers.interpreter import assert_passes_interpreted, in_interpreter, starts_interpreter
from tests.tolerances import DECODE_ATTENTION

pytest.importorskip("triton")


@pytest.mark.slow
@starts_interpreter
def test_in_the_interpreter():
    assert_passes_interpreted(__file__, deadline_s=900.0)


@in_interpreter
@pytest.mark.parametrize(
    ("heads", "parts_of_a_program", "page_tokens"),
    [
        ((4, 1, 64), 1, 16),
        ((4, 2, 128), 2, 64),
        ((4, 2, 128), 1, 16),
        ((16, 1, 64), 4, 16),
        ((24, 2, 64), 1, 64),
        ((4, 2, 96), 1, 64),
        ((16, 1, 96), 4, 16),
        ((2, 2, 256), 1, 16),
        ((12, 1, 256), 2, 64),
    ],
    ids=str,
)
def test_sequences_of_one_part_and_of_several(heads, parts_of_a_program, page_tokens):
    """Parts have 512 tokens: a sequence of none, of one token, of exactly one part, and of three."""
    case = Case.drawn(heads, lengths=(1, 0, 130, 512, 513, 1100), page_tokens=page_tokens)
    out = _decoded(case, parts_of_a_program)
    assert not out[1].any()
    torch.testing.assert_close(out.double(), expected(case), **DECODE_ATTENTION)


def _decoded(case: Case, parts_of_a_program: int | None = None, window: int | None = None) -> torch.Tensor:
    from megatron_fp8rl.kernels.triton.attention import decode

    out = torch.full_like(case.query, 7.0)
    scales = case.key_scale, case.value_scale, case.softmax_scale
    decode(case.query, case.cache, case.pages, case.lengths, *scales, out, parts_of_a_program, window)
    return out


def _without_pages_before(case: Case, window: int, page_tokens: int) -> Case:
    """The same tokens in pages of another size; tokens before the window are NaN, and their pages are nobody's."""
    cache, pages = [torch.full_like(case.cache[:1], 0x7F).flatten(0, 1)[:1].expand(page_tokens, -1, -1)], []
    for row, length in zip(case.pages, case.lengths.tolist()):
        tokens = case.cache[row.long()].flatten(0, 1)[:length].clone()
        first = max(0, length - window)
        tokens[:first] = 0x7F
        own = torch.full((-(-length // page_tokens) * page_tokens, *tokens.shape[1:]), 0x7F, dtype=torch.uint8)
        own[:length] = tokens
        kept = own.view(-(-length // page_tokens), page_tokens, *own.shape[1:])[first // page_tokens :]
        pages.append(torch.zeros(-(-length // page_tokens), dtype=torch.int32))
        pages[-1][first // page_tokens :] = torch.arange(len(cache), len(cache) + len(kept))
        cache += kept
    padded = torch.nn.utils.rnn.pad_sequence(pages, batch_first=True)
    return replace(case, cache=torch.stack(cache), pages=padded)


def _padded(x: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, width - x.shape[-1]))


def _even_and_odd(key: torch.Tensor) -> torch.Tensor:
    """As the CUDA kernel reads keys: 96 features as 128."""
    width = 64 if key.shape[-1] == 96 else key.shape[-1] // 2
    return torch.cat([_padded(key[..., 0::2], width), _padded(key[..., 1::2], width)], dim=-1)


@in_interpreter
@pytest.mark.parametrize("window", [1, 129, 600, 4096])
def test_windows_have_the_same_bits_in_any_pages_and_programs(window):
    """Queries of sequences shorter and longer than the window, whose first part and tile are partly visible."""
    case = Case.drawn((4, 2, 64), lengths=(1, 0, 513, 1100), page_tokens=16)
    out = _decoded(case, 1, window)
    torch.testing.assert_close(out.double(), expected(case, window), **DECODE_ATTENTION)
    for page_tokens, parts in ((16, 2), (64, 4)):
        assert torch.equal(_decoded(_without_pages_before(case, window, page_tokens), parts, window), out)
    is_short = case.lengths <= window
    assert torch.equal(_decoded(case)[is_short], out[is_short]), "the bits of attention without a window"


@in_interpreter
@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_rows_of_the_trainer_are_those_of_the_cache(head_dim):
    from megatron_fp8rl.kernels.kv_rounding import as_cached, to_cache
    from megatron_fp8rl.kernels.triton.attention import read_rows

    generator = torch.Generator().manual_seed(head_dim)
    key, value = (torch.randn(77, 3, head_dim, generator=generator).bfloat16() for _ in range(2))
    scales = torch.tensor([2.0**-6]), torch.tensor([2.0**-4])
    keys, values = read_rows(*(as_cached(x, s[0]) for x, s in zip((key, value), scales)), *scales)
    of_cache = [to_cache(x, s).half() for x, s in zip((key, value), scales)]
    assert torch.equal(keys, _even_and_odd(of_cache[0]))
    assert torch.equal(values, _padded(of_cache[1], 128 if head_dim == 96 else head_dim))


@in_interpreter
@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_sequences_are_read_from_their_pages(head_dim):
    from megatron_fp8rl.kernels.triton.attention import read_pages

    lengths = (3, 0, 70)
    case = Case.drawn((4, 2, head_dim), lengths=lengths, page_tokens=16)
    keys, values = read_pages(case.cache, case.pages, torch.tensor([0, 5, 7]).int(), case.lengths, 80, 70)
    rows = torch.tensor([*range(3), *range(7, 77)])
    cached = [case.cache[row.long()].flatten(0, 1)[:n].view(torch.float8_e4m3fn) for row, n in zip(case.pages, lengths)]
    key, value = torch.cat(cached).half().chunk(2, dim=-1)
    assert torch.equal(keys[rows], _even_and_odd(key))
    assert torch.equal(values[rows], _padded(value, 128 if head_dim == 96 else head_dim))
    assert not values[[3, 4, 5, 6, 77, 78, 79]].any()
    firsts = torch.tensor([-5, 0, 20]).int()  # of windows
    fewer, visible = read_pages(case.cache, case.pages, torch.tensor([0, 5, 7]).int(), case.lengths, 80, 70, firsts)
    seen = torch.tensor([*range(3), *range(27, 77)])
    assert torch.equal(fewer[seen], keys[seen]) and torch.equal(visible[seen], values[seen])
    assert not visible[7:27].any(), "values that weights of 0 multiply"


@in_interpreter
def test_every_byte_is_the_number_that_it_stands_for():
    """The only key of a sequence has all the weight, so the result is its value: each of the 254 finite numbers."""
    from megatron_fp8rl.kernels.triton.attention import decode

    finite = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8)
    case = Case.drawn((2, 2, 128), lengths=(1,), page_tokens=16)
    values = case.cache[case.pages[0, 0], 0, :, 128:]
    values.copy_(torch.cat([finite, finite[:2]]).view(2, 128))
    out = torch.empty_like(case.query)
    one = torch.ones(1)
    decode(case.query, case.cache, case.pages, case.lengths, one, one, 1.0, out)
    assert torch.equal(out[0].float(), values.view(torch.float8_e4m3fn).float())


def test_other_shapes_are_refused():
    from megatron_fp8rl.kernels.triton.attention import decode

    for heads in ((4, 2, 80), (34, 2, 64)):
        case = Case.drawn(heads, lengths=(3,), page_tokens=16)
        with pytest.raises(ValueError, match="not supported by this kernel"):
            decode(case.query, case.cache, case.pages, case.lengths, case.key_scale, case.value_scale, 1.0, case.query)


@starts_interpreter
@pytest.mark.parametrize("columns", [8, 16])
@pytest.mark.parametrize("head_dim, warps, stages", [(64, 4, 3), (96, 4, 3), (128, 4, 3), (256, 8, 2)])
@pytest.mark.parametrize("window", [0, 512])
def test_compiled_it_reads_the_cache_asynchronously_and_converts_bytes_by_pairs(
    head_dim, warps, stages, window, columns, tmp_path
):
    from megatron_fp8rl.kernels.triton import attention

    types = {"query": "*bf16", "cache": "*i16", "pages": "*i32", "lengths": "*i32", "out": "*bf16"}
    types |= dict.fromkeys(("key_scale", "value_scale", "parts", "norms"), "*fp32") | {"softmax_scale": "fp32"}
    constants = {"PAGE": 16, "D": head_dim, "GROUP": columns, "COLUMNS": columns, "TILE": 128, "SPLIT": 512, "EACH": 4}
    constants |= {"HARDWARE": True, "WINDOW": window}

    def is_aligned(name: str, kind: str) -> bool:
        return kind.startswith("*") or name.endswith("_stride")

    how = dict(default="i32", is_aligned=is_aligned, num_warps=warps, num_stages=stages)
    ptx = compile_kernel(attention._decode, types, constants, **how)["ptx"]
    assert " 0 bytes spill stores" in register_report(ptx, tmp_path)
    actual, width = instructions(ptx), 128 if head_dim == 96 else head_dim
    assert actual["cp.async.cg.shared.global"] > 0
    if columns == 8 and width > 64:  # wider products use the instructions of warp groups, narrow ones convert twice
        # 128 keys and 128 values of WIDTH bytes, by 32 threads of each warp, 2 bytes at a time.
        assert actual["cvt.rn.f16x2.e4m3x2"] == 2 * 128 * width // 2 // (32 * warps)
        # A product of 16 x 8 x 16 needs 2,048 multiplications: 128 x 8 x WIDTH, twice.
        products = actual["mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"]
        assert products == 2 * 128 * 8 * width // 2048 // warps


@starts_interpreter
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs a CUDA compiler")
@pytest.mark.parametrize("head_dim, most", [(64, 16), (128, 32), (256, 256)])
@pytest.mark.parametrize("window", [0, 512])
def test_the_cuda_kernel_spills_few_registers(head_dim, most, window, tmp_path):
    options = [f"-DDIM={head_dim}", "-DTILES=4", f"-DWINDOW={window}", "-arch=sm_90a", "-cubin", "-Xptxas", "-v"]
    source = Path(launch.__file__).parent / "packed_attention.cu"
    command = ["nvcc", "-std=c++17", *options, str(source), "-o", str(tmp_path / "kernel.cubin")]
    report = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stderr
    assert int(re.findall(r"(\d+) bytes spill stores", report)[0]) <= most, report
    assert launch._attention_bytes(head_dim) <= 227 << 10
