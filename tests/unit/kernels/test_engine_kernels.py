"""SwiGLU, products and sums of experts: in Triton's interpreter, and compiled beside vLLM's kernels."""

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.compiled import compile_kernel
from tests.helpers.interpreter import INTERPRETED, assert_passes_interpreted, in_interpreter, starts_interpreter

SIZES = [(19, 264), (8, 256), (1, 40), (5, 1)]  # (rows, features): parts of tiles, a whole one, less than one


@pytest.mark.slow
@starts_interpreter
def test_in_the_interpreter():
    assert_passes_interpreted(__file__, deadline_s=400.0)


def numbers(*shape: int, seed: int) -> torch.Tensor:
    """BF16 of magnitudes from 2^-6 to 2^5, and zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-6, 4, shape, generator=generator).float())
    x[:, ::7] = 0
    return x.clamp(-60, 60).bfloat16()


def assert_rounded_once(actual: torch.Tensor, exact: torch.Tensor) -> None:
    """Half a unit of BF16's last place, and float32's own errors, which are larger where terms cancel."""
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.double(), exact, rtol=2**-8 * 1.01, atol=1e-5)


@in_interpreter
@pytest.mark.parametrize("rows, width", SIZES)
def test_swiglu(rows, width):
    from megatron_fp8rl.kernels.triton import swiglu

    wide = numbers(rows, 2 * width + 8, seed=0).requires_grad_()
    h, grad = wide[:, : 2 * width], numbers(width, rows, seed=1).t()
    actual = swiglu.swiglu(h)
    gate, up = h.detach().chunk(2, dim=1)
    expected = F.silu(gate) * up
    differ = actual != expected  # exp of numpy and of torch may differ in the last bit of float32
    assert differ.float().mean() < 2e-3 and actual.is_contiguous()
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=0)
    (ours,) = torch.autograd.grad(actual, wide, grad)
    exact = h.detach().double().requires_grad_()
    gate, up = exact.chunk(2, dim=1)
    (theirs,) = torch.autograd.grad(F.silu(gate) * up, exact, grad.double())
    assert_rounded_once(ours[:, : 2 * width], theirs)
    assert not ours[:, 2 * width :].any()


@in_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, width", SIZES)
def test_the_routers_weight(rows, width, dtype):
    from megatron_fp8rl.kernels.triton import swiglu

    y, grad = numbers(rows, width, seed=0).requires_grad_(), numbers(width, rows, seed=1).t()
    probs = torch.rand(rows, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()
    actual = swiglu.weighted(y, probs)
    expected = (y * probs[:, None]).to(y.dtype)
    assert torch.equal(actual, expected)
    dy, dprobs = torch.autograd.grad(actual, (y, probs), grad)
    assert torch.equal(dy, torch.autograd.grad(expected, y, grad)[0])
    exact = (y.detach().double() * grad.double()).sum(1)
    tolerance = 2**-8 if dtype == torch.bfloat16 else 2e-6
    bound = tolerance * (y.detach().double() * grad.double()).abs().sum(1)
    assert dprobs.dtype == dtype and ((dprobs.double() - exact).abs() <= bound).all()


@in_interpreter
def test_no_token_at_all():
    from megatron_fp8rl.kernels.triton import swiglu

    h, probs = torch.zeros(0, 64).bfloat16().requires_grad_(), torch.zeros(0).requires_grad_()
    out = swiglu.weighted(swiglu.swiglu(h), probs)
    out.sum().backward()
    assert out.shape == (0, 32) and h.grad.shape == (0, 64) and probs.grad.shape == (0,)


@in_interpreter
@pytest.mark.parametrize("sizes", [(5, 12, 64), (130, 128, 200), (0, 8, 64)], ids=str)
def test_the_product(sizes):
    from megatron_fp8rl.kernels.triton import batch_invariant

    num_rows, num_outputs, num_terms = sizes
    generator = torch.Generator().manual_seed(1)
    # Whole numbers, whose sums are exact in any order.
    x, weight = (torch.randint(-8, 9, (n, num_terms), generator=generator).float() for n in (num_rows, num_outputs))
    assert torch.equal(batch_invariant.linear(x, weight), x @ weight.t())
    wide = batch_invariant.linear(x.half(), weight.half(), torch.float32)  # the interpreter has no products of BF16
    assert wide.dtype == torch.float32 and torch.equal(wide, x @ weight.t())


@in_interpreter
def test_gradients_of_a_product_in_a_fixed_order():
    from megatron_fp8rl.trainer.model.linear import in_fixed_order

    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randint(-4, 5, (n, 130), generator=generator).float().requires_grad_() for n in (7, 20))
    expected = x @ weight.t()
    grad = torch.randint(-4, 5, expected.shape, generator=generator).float()
    part = weight.detach()[:, :128].requires_grad_()  # not contiguous, as a part of a divided matrix
    actual = [in_fixed_order(None, x, (weight,), None), in_fixed_order(None, x[:, :128], (part,), None)]
    assert torch.equal(actual[0], expected) and torch.equal(actual[1], x[:, :128] @ part.t())
    theirs = torch.autograd.grad(expected, (x, weight), grad)
    assert all(map(torch.equal, torch.autograd.grad(actual[0], (x, weight), grad), theirs))
    (of_part,) = torch.autograd.grad(actual[1], part, grad)
    assert torch.equal(of_part, theirs[1][:, :128])


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
    actual = batch_invariant.weighted_sum(outputs, rows, weights)
    assert torch.equal(actual, total)  # the interpreter rounds products, too: no fused multiply-add


# Of each kernel: vLLM's, what its arguments are called here, constants of both, warps and stages.
_SIZES = {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 8, "NUM_SMS": 132}
_SWITCHES = {"A_LARGE": False, "B_LARGE": False, "C_LARGE": False, "HAS_BIAS": False, "bias_ptr": None}
_STRIDES = {"stride_ak": 1, "stride_bk": 1, "stride_cn": 1}
KERNELS = {
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
    executor = Path(importlib.util.find_spec("vllm").origin).parent / "model_executor"
    file = "deep_gemm_utils.py" if name == "_fwd_kernel_ep_gather" else "batch_invariant.py"
    source = next(executor.rglob(file)).read_text()
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


TYPES = dict.fromkeys(("scales", "weights", "recv_topk_weight"), "*fp32")
TYPES |= dict.fromkeys(("rows", "recv_topk_ids", "input_index"), "*i32")
TYPES |= dict.fromkeys("x weight out outputs input_tensor output_tensor".split(), "*bf16")
TYPES |= {"eps": "fp32"}


def _compiled(kernel: Any, constants: dict, options: dict) -> dict[str, str]:
    types = TYPES | {name: "*bf16" for name in kernel.arg_names if name.endswith("_ptr")}
    return compile_kernel(
        kernel, types, constants, default="i32", is_aligned=lambda _, kind: kind in ("*bf16", "i32"), **options
    )


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels do not compile")
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM's source")
@pytest.mark.parametrize("name", KERNELS)
def test_arithmetic_is_that_of_vllms_kernel(name, tmp_path):
    """The same instructions on numbers, in the same order, of threads in the same layout: the same bits."""
    from megatron_fp8rl.kernels.triton import batch_invariant

    other, constants, theirs, options = KERNELS[name]
    ours = _compiled(getattr(batch_invariant, name), constants, options)
    reference = _compiled(_vllms(other, tmp_path), theirs, options)
    args = [_ARITHMETIC.findall(each["ptx"]) for each in (ours, reference)]
    if name == "_weighted_sum":  # a chain of one instruction; the compiler puts the loop before or behind the store
        args = [sorted(each) for each in args]
    layout = re.compile(r" = #ttg\.((?:blocked|nvidia_mma)<.*>)")
    layouts = [set(layout.findall(each["ttgir"])) for each in (ours, reference)]
    wanted = {"_product": "wgmma", "_weighted_sum": "fma"}[name]
    assert any(wanted in word for word in args[0])
    assert args[0] == args[1]
    assert layouts[0] == layouts[1] or name == "_weighted_sum"  # nothing is added across threads there
    assert batch_invariant._TILE == 128 and batch_invariant._TERMS == 64
