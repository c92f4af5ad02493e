"""The GPU's sums of parts are those of the definition, here in Triton's interpreter: ragged ends, pitches, both widths."""

from __future__ import annotations

import pytest
import torch

from megatron_fp8rl.weight_sync.partial import PartialSums
from tests.helpers.interpreter import INTERPRETED, assert_passes_interpreted, in_interpreter, starts_interpreter


@starts_interpreter
def test_in_the_interpreter():
    assert_passes_interpreted(__file__)


def places() -> list[tuple[torch.Tensor, tuple[int, int, int]]]:
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
        found.append((buffer[start : start + num_bytes].view(dtype), layout))
        start += -(-num_bytes // 64) * 64
    return found


@in_interpreter
def test_kernel_equals_definition():
    from megatron_fp8rl.weight_sync import partial

    parts = places()
    expected = PartialSums(parts)().clone()
    sums = torch.zeros_like(expected)
    for launch in partial._prepare(parts):
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
    from megatron_fp8rl.weight_sync import partial

    constants = {"NARROW": narrow, "CHUNK": partial._CHUNK_WORDS}
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
    assert PartialSums(on_gpu)().tolist() == PartialSums(parts)().tolist()
