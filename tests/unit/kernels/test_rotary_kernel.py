"""The rotation's kernel against torch, bit for bit: in Triton's interpreter, and compiled for a Hopper GPU."""

import subprocess
from pathlib import Path

import pytest
import torch

from megatron_fp8rl.trainer.model.rotary import Rotary
from tests.helpers.interpreter import INTERPRETED, assert_passes_interpreted, in_interpreter, starts_interpreter

# (features of a head, first rotated one, rotated ones, heads, pairs are neighbours)
CASES = {
    "whole heads": (128, 0, 128, 32, False),
    "few heads of an odd number": (64, 0, 64, 3, False),
    "half of each": (96, 0, 48, 20, False),
    "the last part, neighbours": (192, 128, 64, 5, True),
    "neighbours alone": (40, 0, 40, 17, True),
}


@pytest.mark.slow
@starts_interpreter
def test_in_the_interpreter():
    assert_passes_interpreted(__file__)


def case(name: str):
    """(heads in a wider tensor, as a fused projection leaves them; cosines; sines; gradient; the rotary of torch)."""
    width, first, rotated, heads, interleaved = CASES[name]
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(7, heads, width + 8, generator=generator).bfloat16().requires_grad_()
    angles = torch.randn(7, 1, rotated // 2, generator=generator) * 9
    cos, sin = (table.bfloat16().float() for table in (angles.cos(), angles.sin()))
    rotary = Rotary(num_features=rotated, first_feature=first, theta=1e4, scaling=None, interleaved=interleaved)
    return wide, cos, sin, torch.randn(7, heads, width, generator=generator).bfloat16(), rotary


@in_interpreter
@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_torch(name):
    from megatron_fp8rl.kernels.triton import rotate

    wide, cos, sin, grad, rotary = case(name)
    x = wide[..., : grad.shape[-1]]
    expected = rotary.rotate(x, cos, sin)
    found = rotate.rotate(x, cos, sin, rotary.first_feature, rotary.interleaved)
    assert torch.equal(found, expected) and found.dtype == torch.bfloat16 and found.is_contiguous()
    strided = grad.transpose(0, 1).contiguous().transpose(0, 1)
    for gradient in (grad, strided):
        ours, theirs = (torch.autograd.grad(y, wide, gradient, retain_graph=True)[0] for y in (found, expected))
        assert torch.equal(ours, theirs)


@in_interpreter
def test_no_token_at_all():
    from megatron_fp8rl.kernels.triton import rotate

    nothing = torch.zeros(0, 1, 8)
    assert rotate.rotate(torch.zeros(0, 4, 16).bfloat16(), nothing, nothing, 0, False).shape == (0, 4, 16)


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels do not compile")
def test_products_are_not_fused_with_sums(tmp_path: Path):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron_fp8rl.kernels.triton.rotate import _rotate_heads

    types = {"x": "*bf16", "out": "*bf16", "cos": "*fp32", "sin": "*fp32"}
    constants = dict(
        WIDTH=128,
        FIRST=0,
        HALF=64,
        HALF_UP=64,
        WIDTH_UP=128,
        IN_STEP=1,
        IN_RIGHT=64,
        OUT_STEP=1,
        OUT_RIGHT=64,
        BACKWARD=False,
        HEADS=16,
        HARDWARE=True,
    )
    signature = {arg: "constexpr" if arg in constants else types.get(arg, "i32") for arg in _rotate_heads.arg_names}
    hints = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind != "constexpr"}
    options = {"num_warps": 4, "enable_fp_fusion": False}
    source = ASTSource(_rotate_heads, signature, constants, hints)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    assert "fma.rn.f32" not in ptx and "mul" in ptx
    assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx
    path = tmp_path / "kernel.ptx"
    path.write_text(ptx)
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    command = [str(ptxas), "-v", "-arch=sm_90a", "--fmad=false", str(path), "-o", str(tmp_path / "kernel.cubin")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stderr
    assert " 0 bytes spill stores" in said, said
