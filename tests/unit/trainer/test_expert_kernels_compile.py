"""The kernels of grouped experts compile for Hopper without one: vectors of 16 bytes, and no registers spilled."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels do not compile")
triton = pytest.importorskip("triton")

_POINTERS = {
    "*bf16": "x h dy y out bf16 a_bf16",
    "*u8": "data columns_data a_columns",
    "*i32": "row_scales column_scales a_scales rows experts offsets positions padded_counts",
    "*i64": "tokens_per_expert",
    "*fp32": "probs dprobs",
    "i32": "num_rows num_columns width num_tokens",
}
TYPES = {name: kind for kind, names in _POINTERS.items() for name in names.split()}
_QUANTIZED = {"GATHER": True, "WEIGHTED": False, "ROWS": True, "COLUMNS": False, "BF16": False, "POW2": True}
_SWIGLU = {"ROWS": True, "COLUMNS": False, "BF16": False, "POW2": True, "HARDWARE": True}
_BACKWARD = _SWIGLU | {"WEIGHTED": True, "COLUMNS": True, "A_COLUMNS": True, "A_BF16": False}


def compiled(name: str, constants: dict, num_warps: int, tmp_path: Path) -> tuple[Counter[str], str]:
    """(how often each instruction stands in the PTX, what ptxas says about registers)."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron_fp8rl.trainer import expert_triton

    kernel = getattr(expert_triton, name)
    signature = {arg: "constexpr" if arg in constants else TYPES[arg] for arg in kernel.arg_names}
    hints = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind != "constexpr"}
    source = ASTSource(kernel, signature, constants, hints)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps}).asm["ptx"]
    path = tmp_path / "kernel.ptx"
    path.write_text(ptx)
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    command = [str(ptxas), "-v", "-arch=sm_90a", str(path), "-o", str(tmp_path / "kernel.cubin")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stderr
    return Counter(re.findall(r"\b(?:ld\.global|st\.global|cvt|div)\.[\w.:]+", ptx)), said


@pytest.mark.parametrize(
    "name, constants, num_warps, loads, stores, conversions",
    [
        ("_quantize", _QUANTIZED | {"HARDWARE": True}, 4, 16, 8, 64),
        ("_quantize", _QUANTIZED | {"HARDWARE": True, "COLUMNS": True}, 8, 8, 8, 64),
        ("_swiglu_quantize", _SWIGLU, 8, 16, 4, 32),
        ("_swiglu_backward_quantize", _BACKWARD, 16, 32, 10, 80),
        ("_unpermute", {"WEIGHTED": True, "ROWS": 16, "COLUMNS": 512, "HARDWARE": True}, 8, 4, 4, 0),
    ],
    ids=["rows", "rows and columns", "swiglu", "swiglu backward", "unpermute"],
)
def test_memory_moves_in_vectors_and_registers_suffice(
    name, constants, num_warps, loads, stores, conversions, tmp_path
):
    found, said = compiled(name, constants, num_warps, tmp_path)
    assert found["ld.global.v4.b32"] == loads and found["st.global.v4.b32"] == stores
    assert found["cvt.rn.satfinite.e4m3x2.f32"] == conversions
    assert " 0 bytes spill stores" in said, said
    assert not [instruction for instruction in found if "ftz" in instruction]


def test_the_layout_is_one_small_kernel(tmp_path):
    _, said = compiled("_build_layout", {"NUM_EXPERTS": 128, "EXPERTS": 128}, 4, tmp_path)
    assert " 0 bytes spill stores" in said, said
