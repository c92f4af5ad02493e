"""The kernels of digests and of sums of parts, in Triton's interpreter against their definitions, and compiled."""

import pytest
import torch

from megatron_fp8rl.weight_sync import digest
from megatron_fp8rl.weight_sync.part_sums import PartSums
from megatron_fp8rl.weight_sync.schedule import Extent
from tests.helpers.compiled import compile_kernel
from tests.helpers.interpreter import INTERPRETED, assert_passes_interpreted, in_interpreter, starts_interpreter


@pytest.mark.slow
@starts_interpreter
def test_in_the_interpreter():
    assert_passes_interpreted(__file__, says="4 skipped", deadline_s=500.0)


def by_kernel(tensors: list[torch.Tensor]) -> list[str]:
    from megatron_fp8rl.kernels.triton import digest_tensors

    # The interpreter reports that 64-bit products wrap, which is what they are for.
    return digest._lines(digest._finish(digest_tensors.sums(tensors), tensors)).split()


@in_interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_sums_of_every_length_near_words_tiles_and_chunks():
    generator = torch.Generator().manual_seed(1)
    lengths = [0, 1, 7, 8, 9, 15, 16, 1000, 8 * 1024 - 1, 8 * 1024, 8 * 1024 + 3]
    lengths += [8 * 16384 + extra for extra in (-8, -1, 0, 1, 8)] + [8 * 16384 * 3 + 5]
    tensors = [torch.randint(0, 256, (n,), generator=generator, dtype=torch.uint8) for n in lengths]
    assert by_kernel(tensors) == digest.digests(tensors)


@in_interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_dtypes_and_views_that_begin_anywhere():
    generator = torch.Generator().manual_seed(2)
    buffer = torch.randint(0, 256, (40_000,), generator=generator, dtype=torch.uint8)
    tensors = [
        torch.randn(33, 129, generator=generator).bfloat16(),
        torch.randn(5, 7, generator=generator),
        torch.randn(128, 64, generator=generator).to(torch.float8_e4m3fn),
        buffer[3:20_000],
        buffer[8:20_000],
        torch.zeros(100, dtype=torch.int64),
        torch.full((9,), -1, dtype=torch.int64),
    ]
    assert by_kernel(tensors) == digest.digests(tensors)


@in_interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_prepared_sums_follow_the_content_of_the_memory():
    from megatron_fp8rl.kernels.triton import digest_tensors

    generator = torch.Generator().manual_seed(3)
    scales = torch.randn(61, 33, generator=generator)
    weights = torch.randn(64, 129, generator=generator).bfloat16()
    tensors = [
        scales,
        scales[7:9],  # begins between words of 8 bytes
        scales[:, 3:8],  # rows lie apart
        scales.t(),
        torch.randn(20_011, generator=generator),
        weights,
        weights[:, :64],
        weights[3:5],
        weights[:0],
        scales[:0],
    ]
    sums = digest_tensors.prepare(tensors, widen=True)
    for _ in range(3):
        wide = [digest.widened(tensor) for tensor in tensors]
        assert digest._lines(digest._finish(sums().tolist(), wide)).split() == digest.digests(wide)
        scales.mul_(-1.5)
        weights[3].add_(1)
    assert digest_tensors.sums([]) == []


def places() -> list[tuple[torch.Tensor, Extent]]:
    """Parts of one buffer, as they lie in a message: 64-byte steps, tensors that end anywhere."""
    buffer = torch.randint(0, 256, (1 << 18,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    result, start = [], 0
    for num_bytes, dtype, layout in (
        (128 * 1024, torch.float8_e4m3fn, (5, 16, 48)),
        (64 * 3 * 8, torch.bfloat16, (1000, 192, 192)),
        (26, torch.bfloat16, (0, 4, 4)),
        (4 * 15, torch.float32, (2, 3, 7)),
        (4 * 3001, torch.float32, (0, 3001, 3001)),
        (8, torch.bfloat16, ((1 << 40), 1, 1)),
    ):
        result.append((buffer[start : start + num_bytes].view(dtype), extent_of(num_bytes, dtype, *layout)))
        start += -(-num_bytes // 64) * 64
    return result


def extent_of(num_bytes: int, dtype: torch.dtype, first: int, row: int, pitch: int) -> Extent:
    """Of a layout in words: 4 bytes of float32 numbers, 8 of others; the last word may be short."""
    word = 4 if dtype == torch.float32 else 8
    if row == pitch:
        return Extent(first * word, num_bytes, num_bytes, 1, first * word + num_bytes)
    num_rows = num_bytes // (row * word)
    return Extent(first * word, row * word, pitch * word, num_rows, (first + num_rows * pitch) * word)


@in_interpreter
def test_kernel_equals_definition():
    from megatron_fp8rl.weight_sync import part_sums

    parts = places()
    expected = PartSums(parts)().clone()
    sums = torch.zeros_like(expected)
    for launch in part_sums._prepare(
        [(i, t, e.words(4 if t.dtype == torch.float32 else 8)) for i, (t, e) in enumerate(parts)]
    ):
        launch(sums)
    assert sums.tolist() == expected.tolist()
    assert len(set(sums.tolist())) == len(parts)


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels do not compile")
@pytest.mark.parametrize("narrow", [False, True])
def test_kernel_compiles_for_hopper_without_one(narrow):
    from megatron_fp8rl.kernels.triton import digest_parts
    from megatron_fp8rl.weight_sync import part_sums

    constants = {"NARROW": narrow, "CHUNK": part_sums._CHUNK_WORDS}
    types = {"table": "*i64", "of_chunk": "*i32", "sums": "*i64"}
    ptx = compile_kernel(digest_parts._add_sums, types, constants, is_aligned=lambda *_: False, num_warps=8)["ptx"]
    assert "add.u64" in ptx and "st.local" not in ptx  # one atomic; no register spills


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.skipif(INTERPRETED, reason="the interpreter reads memory of the host")
def test_same_on_cuda():
    parts = places()
    storage = parts[0][0].untyped_storage()
    moved = torch.empty(0, dtype=torch.uint8).set_(storage).cuda()
    on_gpu = []
    for tensor, layout in parts:
        start = tensor.storage_offset() * tensor.element_size()
        num_bytes = tensor.numel() * tensor.element_size()
        on_gpu.append((moved[start : start + num_bytes].view(tensor.dtype), layout))
    assert PartSums(on_gpu)().tolist() == PartSums(parts)().tolist()
