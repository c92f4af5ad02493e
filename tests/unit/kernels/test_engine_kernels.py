"""Norm, product and sum of experts in an engine's order: in Triton's interpreter, and compiled, beside vLLM's."""

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.interpreter import INTERPRETED, assert_passes_interpreted, in_interpreter, starts_interpreter


@pytest.mark.slow
@starts_interpreter
def test_in_the_interpreter():
    assert_passes_interpreted(__file__)


@in_interpreter
@pytest.mark.parametrize("shape", [(5, 2048), (3, 1300), (40, 128), (0, 256)], ids=str)
def test_the_norm(shape):
    from megatron_fp8rl.kernels.triton import batch_invariant

    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(shape, generator=generator)  # float32: Triton's interpreter does not round to BF16 as GPUs do
    weight = 1 + torch.randn(shape[1], generator=generator) / 4
    found, scales = batch_invariant.rms_norm(x, weight, 1e-6)
    exact = (x.double().square().mean(dim=1) + 1e-6).rsqrt()
    torch.testing.assert_close(scales.double(), exact, rtol=1e-6, atol=0)
    assert torch.equal(found, x * scales[:, None] * weight)


@in_interpreter
@pytest.mark.parametrize("sizes", [(5, 12, 64), (130, 128, 200), (0, 8, 64)], ids=str)
def test_the_product(sizes):
    from megatron_fp8rl.kernels.triton import batch_invariant

    num_rows, num_outputs, num_terms = sizes
    generator = torch.Generator().manual_seed(1)
    # Whole numbers, whose sums are exact in any order.
    x, weight = (torch.randint(-8, 9, (n, num_terms), generator=generator).float() for n in (num_rows, num_outputs))
    assert torch.equal(batch_invariant.linear(x, weight), x @ weight.t())


@in_interpreter
@pytest.mark.parametrize("sizes", [(5, 8, 2048), (3, 3, 96), (1, 1, 1024), (0, 2, 64)], ids=str)
def test_the_sum_of_experts(sizes):
    from megatron_fp8rl.kernels.triton import batch_invariant

    num_tokens, top_k, hidden = sizes
    generator = torch.Generator().manual_seed(2)
    outputs, weights = torch.randn(num_tokens * top_k, hidden), torch.rand(num_tokens, top_k, generator=generator)
    rows = torch.randperm(num_tokens * top_k, generator=generator).view(num_tokens, top_k)
    total = torch.zeros(num_tokens, hidden)
    for slot in range(top_k):
        total += outputs[rows[:, slot]] * weights[:, slot, None]
    found = batch_invariant.weighted_sum(outputs, rows, weights)
    assert torch.equal(found, total)  # the interpreter rounds products, too: no fused multiply-add


# Of each kernel: vLLM's, what its arguments are called here, constants of both, warps and stages.
_SIZES = {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 8, "NUM_SMS": 132}
_SWITCHES = {"A_LARGE": False, "B_LARGE": False, "C_LARGE": False, "HAS_BIAS": False, "bias_ptr": None}
_STRIDES = {"stride_ak": 1, "stride_bk": 1, "stride_cn": 1}
KERNELS = {
    "_rms_norm": ("_rms_norm_kernel", {"BLOCK": 1024}, {"BLOCK_SIZE": 1024, "HAS_WEIGHT": True}, {"num_warps": 4}),
    "_product": (
        "matmul_kernel_persistent",
        {"TILE": 128, "TERMS": 64},
        _SIZES | _SWITCHES | _STRIDES,
        {"num_warps": 8, "num_stages": 3},
    ),
    "_weighted_sum": (
        "_fwd_kernel_ep_gather",
        {"TERMS": 8, "BLOCK": 1024},
        {"topk_num": 8, "BLOCK_D": 1024, "HAS_EXPERT_MAP": False, "expert_map": None},
        {"num_warps": 2},
    ),
}
_OPERATIONS = "fma|mul|add|sub|div|rcp|sqrt|rsqrt|wgmma\\.mma_async|shfl|cvt"
_ARITHMETIC = re.compile(rf"\b(?:{_OPERATIONS})\.[\w.]*(?:f32|bf16|b32)\b")


def _vllms(name: str, folder: Path) -> Any:
    """A kernel out of vLLM's source: its own module gives no kernels where there is no GPU."""
    layers = Path(importlib.util.find_spec("vllm").origin).parent / "model_executor/layers"
    file = "fused_moe/deep_gemm_utils.py" if name == "_fwd_kernel_ep_gather" else "batch_invariant.py"
    source = (layers / file).read_text()
    parts = [ast.get_source_segment(source, node) for node in ast.parse(source).body if _is_kernel(node)]
    copy = folder / "vllms_kernels.py"
    parts = ["import triton", "import triton.language as tl", *(f"@triton.jit\n{part}" for part in parts)]
    copy.write_text("\n\n".join(parts))
    spec = importlib.util.spec_from_file_location("vllms_kernels", copy)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def _is_kernel(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list)


def _compiled(kernel: Any, constants: dict, options: dict) -> Any:
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name == "scales":
            return "*fp32"
        if name in ("weights", "recv_topk_weight"):
            return "*fp32"
        if name in ("rows", "recv_topk_ids", "input_index"):
            return "*i32"
        if name in ("x", "weight", "out", "outputs", "input_tensor", "output_tensor") or name.endswith("_ptr"):
            return "*bf16"
        return "fp32" if name == "eps" else "i32"

    signature = {name: kind(name) for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, k in enumerate(signature.values()) if k in ("*bf16", "i32")}
    return compile(ASTSource(kernel, signature, constants, aligned), target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels do not compile")
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM's source")
@pytest.mark.parametrize("name", KERNELS)
def test_arithmetic_is_that_of_vllms_kernel(name, tmp_path):
    """The same instructions on numbers, in the same order, of threads in the same layout: the same bits."""
    from megatron_fp8rl.kernels.triton import batch_invariant

    other, constants, theirs, options = KERNELS[name]
    ours = _compiled(getattr(batch_invariant, name), constants, options)
    reference = _compiled(_vllms(other, tmp_path), theirs, options)
    words = [_ARITHMETIC.findall(each.asm["ptx"]) for each in (ours, reference)]
    if name == "_weighted_sum":  # a chain of one instruction; the compiler puts the loop before or behind the store
        words = [sorted(each) for each in words]
    layout = re.compile(r" = #ttg\.((?:blocked|nvidia_mma)<.*>)")
    layouts = [set(layout.findall(each.asm["ttgir"])) for each in (ours, reference)]
    wanted = {"_rms_norm": "sqrt", "_product": "wgmma", "_weighted_sum": "fma"}[name]
    assert any(wanted in word for word in words[0])
    assert words[0] == words[1]
    assert layouts[0] == layouts[1] or name == "_weighted_sum"  # nothing is added across threads there
    assert batch_invariant._NORM_BLOCK == 1024 and batch_invariant._TILE == 128 and batch_invariant._TERMS == 64
