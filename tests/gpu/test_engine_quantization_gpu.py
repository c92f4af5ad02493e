"""vLLM's operators that quantize, with our kernels: bytes and scales, and the time for the rows of a decode step.

Run with -s for times.
"""

import pytest
import torch

from megatron_fp8rl.kernels.blockwise import dequantize_activation, quantize_activation
from megatron_fp8rl.kernels.types import BLOCK
from megatron_fp8rl.precision.formats import BLOCKWISE_FP32, BLOCKWISE_POW2
from tests.helpers.dist import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

ROWS, WIDTH, FEATURES, EPS = 128, 4096, 12288, 1e-6


def _outputs(num_rows: int, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    data = torch.empty(num_rows, num_columns, dtype=torch.float8_e4m3fn, device="cuda")
    return data, torch.zeros(num_columns // BLOCK, num_rows, device="cuda").t()


def _milliseconds(call) -> float:
    """Milliseconds of one of 50 calls in a captured graph, as in a decode step."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(50):
            call()
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 50


def _play() -> dict[str, float]:
    """Runs in a new process, whose operators stay replaced: figures by name, "theirs" before and "ours" after."""
    from vllm import _custom_ops as _operators  # noqa: F401  loads vLLM's kernels

    from megatron_fp8rl.rollout.vllm_plugin import patches

    torch.manual_seed(0)
    x, residual = (torch.randn(ROWS, WIDTH, device="cuda").bfloat16() for _ in range(2))
    weight, h = (
        torch.rand(WIDTH, device="cuda").bfloat16(),
        4 * torch.randn(ROWS, 2 * FEATURES, device="cuda").bfloat16(),
    )
    total = x + residual
    number = total.double()
    normed = (number * (number.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()).bfloat16()
    gate, up = h.float().chunk(2, 1)
    activation = torch.nn.functional.silu(gate).bfloat16() * up.bfloat16()
    result: dict[str, float] = {}
    for whose in ("theirs", "ours"):
        if whose == "ours":
            patches.quantize_activations_as_the_trainer(BLOCKWISE_POW2)
        data, scale = _outputs(ROWS, WIDTH)
        stream = residual.clone()
        torch.ops._C.rms_norm_per_block_quant(data, x, weight, scale, EPS, None, stream, BLOCK, True)
        wide, wide_scale = _outputs(ROWS, FEATURES)
        torch.ops._C.silu_and_mul_per_block_quant(wide, h, wide_scale, BLOCK, None, True)
        assert torch.equal(stream, total)
        for name, one, ones, expected in (("norm", data, scale, normed), ("swiglu", wide, wide_scale, activation)):
            wanted, wanted_scale = quantize_activation(expected, "pow2")
            result[f"{whose} {name} scales"] = (ones == wanted_scale).float().mean().item()
            same = dequantize_activation(one, ones) == dequantize_activation(wanted, wanted_scale)
            result[f"{whose} {name} values"] = same.float().mean().item()
        result[f"{whose} norm us"] = 1e3 * _milliseconds(
            lambda: torch.ops._C.rms_norm_per_block_quant(data, x, weight, scale, EPS, None, stream, BLOCK, True)
        )
        result[f"{whose} swiglu us"] = 1e3 * _milliseconds(
            lambda: torch.ops._C.silu_and_mul_per_block_quant(wide, h, wide_scale, BLOCK, None, True)
        )
    return result


def _play_fp32() -> tuple[float, float, float]:
    """In a new process: the fractions of vLLM's FP32 scales, of rows and of experts, that are the definition's, and the
    fraction of its rows' bytes. Then bytes and scales of both replaced operators are compared."""
    from vllm import _custom_ops as _operators  # noqa: F401  loads vLLM's kernels
    from vllm.model_executor.layers.fused_moe.experts import deep_gemm_moe
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    from megatron_fp8rl.rollout.vllm_plugin import patches

    torch.manual_seed(0)
    x, h = torch.randn(ROWS, WIDTH, device="cuda").bfloat16(), 4 * torch.randn(256, 2048, device="cuda").bfloat16()
    gate, up = h.float().chunk(2, 1)
    wanted_rows = quantize_activation(x, "fp32")
    wanted = quantize_activation(torch.nn.functional.silu(gate).bfloat16() * up.bfloat16(), "fp32")
    before = []
    for is_ours in (False, True):
        if is_ours:
            patches.quantize_activations_as_the_trainer(BLOCKWISE_FP32)
        for aligned in (False, True):
            rows = fp8_utils.per_token_group_quant_fp8(
                x, BLOCK, column_major_scales=True, tma_aligned_scales=aligned, use_ue8m0=False
            )
        out = torch.empty(256, 1024, dtype=torch.float8_e4m3fn, device="cuda")
        experts = deep_gemm_moe.silu_mul_per_token_group_quant_fp8_colmajor(
            input=h, output=out, use_ue8m0=False, clamp_limit=None, group_size=BLOCK, alpha=1.0, beta=0.0
        )
        if not is_ours:
            pairs = ((rows[1], wanted_rows[1]), (experts[1], wanted[1]), (rows[0].float(), wanted_rows[0].float()))
            before = [(one == other).float().mean().item() for one, other in pairs]
            continue
        assert torch.equal(rows[1], wanted_rows[1]) and torch.equal(rows[0].float(), wanted_rows[0].float())
        same = dequantize_activation(*experts) == dequantize_activation(*wanted)
        # exp of Triton and of torch may round differently
        assert (experts[1] == wanted[1]).float().mean() > 0.999 and same.float().mean() > 0.99
    return before[0], before[1], before[2]


def test_fp32_scales_are_correctly_rounded_quotients():
    """On an H200 all of vLLM's scales of rows were the definition's, and 0.44 of those of experts."""
    ((rows, experts, data),) = run_ranks(1, _play_fp32, deadline_s=100)
    print(f"\nvLLM equals the definition: row scales {rows:.5f}, expert scales {experts:.5f}, row bytes {data:.5f}")
    assert experts < 0.99, "vLLM's own kernel of experts divides by 448: ours may go"


def test_engines_quantize_the_numbers_of_the_definition():
    (actual,) = run_ranks(1, _play, deadline_s=100)
    print("\n" + ", ".join(f"{name} {figure:.3f}" for name, figure in actual.items()))
    for name in ("norm", "swiglu"):
        assert actual[f"theirs {name} scales"] < 0.1, "vLLM's own kernels make powers of two: ours may go"
        assert actual[f"ours {name} scales"] > 0.999 and actual[f"ours {name} values"] > 0.99
