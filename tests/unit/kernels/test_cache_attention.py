"""Attention over an FP8 cache against torch in float64: in Triton's interpreter, and compiled for a Hopper GPU."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.compiled import compile_kernel, instructions
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
    [((4, 1, 64), 1, 16), ((4, 2, 128), 2, 64), ((4, 2, 128), 1, 16), ((16, 1, 64), 4, 16), ((24, 2, 64), 1, 64)],
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
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_of_the_trainer_are_those_of_the_cache(head_dim):
    from megatron_fp8rl.kernels.kv_rounding import as_cached, to_cache
    from megatron_fp8rl.kernels.triton.attention import read_rows

    generator = torch.Generator().manual_seed(head_dim)
    key, value = (torch.randn(77, 3, head_dim, generator=generator).bfloat16() for _ in range(2))
    scales = torch.tensor([2.0**-6]), torch.tensor([2.0**-4])
    keys, values = read_rows(*(as_cached(x, s[0]) for x, s in zip((key, value), scales)), *scales)
    of_cache = [to_cache(x, s).half() for x, s in zip((key, value), scales)]
    assert torch.equal(keys, of_cache[0].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2))
    assert torch.equal(values, of_cache[1])


@in_interpreter
@pytest.mark.parametrize("head_dim", [64, 128])
def test_sequences_are_read_from_their_pages(head_dim):
    from megatron_fp8rl.kernels.triton.attention import read_pages

    lengths = (3, 0, 70)
    case = Case.drawn((4, 2, head_dim), lengths=lengths, page_tokens=16)
    keys, values = read_pages(case.cache, case.pages, torch.tensor([0, 5, 7]).int(), case.lengths, 80, 70)
    rows = torch.tensor([*range(3), *range(7, 77)])
    cached = [case.cache[row.long()].flatten(0, 1)[:n].view(torch.float8_e4m3fn) for row, n in zip(case.pages, lengths)]
    key, value = torch.cat(cached).half().chunk(2, dim=-1)
    assert torch.equal(keys[rows], key.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2))
    assert torch.equal(values[rows], value)
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

    for heads in ((4, 2, 96), (34, 2, 64)):
        case = Case.drawn(heads, lengths=(3,), page_tokens=16)
        with pytest.raises(ValueError, match="not supported by this kernel"):
            decode(case.query, case.cache, case.pages, case.lengths, case.key_scale, case.value_scale, 1.0, case.query)


@starts_interpreter
@pytest.mark.parametrize("window", [0, 512])
def test_compiled_it_reads_the_cache_asynchronously_and_converts_bytes_by_pairs(window):
    from megatron_fp8rl.kernels.triton import attention

    types = {"query": "*bf16", "cache": "*i16", "pages": "*i32", "lengths": "*i32", "out": "*bf16"}
    types |= dict.fromkeys(("key_scale", "value_scale", "parts", "norms"), "*fp32") | {"softmax_scale": "fp32"}
    constants = {"PAGE": 16, "D": 128, "GROUP": 4, "COLUMNS": 8, "TILE": 128, "SPLIT": 512, "EACH": 4, "HARDWARE": True}
    constants["WINDOW"] = window

    def is_aligned(name: str, kind: str) -> bool:
        return kind.startswith("*") or name.endswith("_stride")

    how = dict(default="i32", is_aligned=is_aligned, num_warps=4)
    actual = instructions(compile_kernel(attention._decode, types, constants, **how)["ptx"])
    # 128 keys and 128 values of 128 bytes, by 128 threads: 32 bytes of each for a conversion, 2 bytes at a time.
    assert actual["cvt.rn.f16x2.e4m3x2"] == 2 * 128 // 2
    # A product of 16 x 8 x 16 needs 2,048 multiplications: 128 x 8 x 128, twice, by 4 warps.
    assert actual["mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"] == 2 * 128 * 8 * 128 // 2048 // 4
    assert actual["cp.async.cg.shared.global"] > 0
