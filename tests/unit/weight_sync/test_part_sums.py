"""The GPU's sums of parts are those of the definition, here in Triton's interpreter: ragged ends, pitches, both widths."""

import pytest
import torch

from megatron_fp8rl.weight_sync.part_sums import PartSums
from megatron_fp8rl.weight_sync.schedule import Extent
from tests.helpers.interpreter import INTERPRETED, assert_passes_interpreted, in_interpreter, starts_interpreter


@pytest.mark.slow
@starts_interpreter
def test_in_the_interpreter():
    assert_passes_interpreted(__file__)


def places() -> list[tuple[torch.Tensor, Extent]]:
    """Parts of one buffer, as they lie in a message: 64-byte steps, tensors that end anywhere."""
    buffer = torch.randint(0, 256, (1 << 18,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found, start = [], 0
    for num_bytes, dtype, layout in (
        (128 * 1024, torch.float8_e4m3fn, (5, 16, 48)),
        (64 * 3 * 8, torch.bfloat16, (1000, 192, 192)),
        (26, torch.bfloat16, (0, 4, 4)),
        (4 * 15, torch.float32, (2, 3, 7)),
        (4 * 3001, torch.float32, (0, 3001, 3001)),
        (8, torch.bfloat16, ((1 << 40), 1, 1)),
    ):
        found.append((buffer[start : start + num_bytes].view(dtype), extent_of(num_bytes, dtype, *layout)))
        start += -(-num_bytes // 64) * 64
    return found


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
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron_fp8rl.kernels.triton import digest_parts
    from megatron_fp8rl.weight_sync import part_sums

    constants = {"NARROW": narrow, "CHUNK": part_sums._CHUNK_WORDS}
    signature = {"table": "*i64", "of_chunk": "*i32", "sums": "*i64"} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(digest_parts._add_sums, signature, constants, {})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
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
