"""The kernels compile for Hopper without one, and read and write memory in vectors of 16 bytes where they may."""

import os
import re
from collections import Counter

import pytest

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels do not compile")
triton = pytest.importorskip("triton")


def instructions(
    kernel, signature: dict[str, str], constants: dict, num_warps: int, multiples: tuple[int, ...] = ()
) -> Counter[str]:
    """How often each memory, conversion and division instruction stands in the kernel's PTX.

    Pointers, and the arguments at the places ``multiples``, are multiples of 16, as Triton finds when it is launched.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature |= dict.fromkeys(constants, "constexpr")
    kinds = enumerate(signature.values())
    hints = {(i,): [["tt.divisibility", 16]] for i, kind in kinds if kind.startswith("*") or i in multiples}
    source = ASTSource(kernel, signature, constants, hints)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    return Counter(
        re.findall(r"\b(?:ld\.global|st\.global|cp\.async|cvt|mma|div|mul|atom)\.[\w.:]+", compiled.asm["ptx"])
    )


@pytest.mark.parametrize("pow2", [True, False])
@pytest.mark.parametrize("bits, loads", [("uint16", 8), ("uint32", 16)])
def test_a_block_is_read_and_written_once_in_vectors(bits, loads, pow2):
    from megatron_fp8rl.kernels.triton import quantize

    constants = {"SOURCE": getattr(triton.language, bits), "POW2": pow2, "ALIGNED": True, "HARDWARE": True}
    signature = {"table": "*i64", "matrix_of_block": "*i32"}
    found = instructions(quantize._quantize_blocks, signature, constants, num_warps=8)
    # A thread of 256 has 64 numbers of a block.
    assert found["ld.global.v4.b32"] == loads and found["st.global.v4.b32"] == 4
    assert found["cvt.rn.satfinite.e4m3x2.f32"] == 32
    # Divisions round as IEEE says, and nothing flushes subnormal numbers.
    assert found["div.rn.f32"] == (0 if pow2 else 65) and found["div.full.f32"] == 0
    assert not [name for name in found if "ftz" in name]


def test_the_digest_adds_in_64_bits():
    from megatron_fp8rl.kernels.triton import digest_tensors

    signature = {"table": "*i64", "tensor_of_chunk": "*i32", "totals": "*i64"}
    found = instructions(digest_tensors._add_chunks, signature, {"NARROW": False}, num_warps=4)
    assert sum(found[name] for name in found if name.startswith("atom") and name.endswith("add.u64")) == 1
    assert found["ld.global.b64"] == 4 + 4  # of the table, and 4 words a thread in each turn of the loop


def test_bytes_are_transposed_in_vectors():
    from megatron_fp8rl.kernels.triton import quantize

    signature = {"data": "*u8", "turned": "*i32", "num_rows": "i32", "num_columns": "i32"}
    found = instructions(quantize._transpose_tiles, signature, {}, num_warps=8, multiples=(2, 3))
    assert found["ld.global.v4.b32"] == found["st.global.v4.b32"] == 4  # a thread of 256 has 64 bytes
