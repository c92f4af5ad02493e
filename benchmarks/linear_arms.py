"""Linears and feed-forward parts of each implementation, for benchmarks/linears.py."""

from __future__ import annotations

from typing import Any

from benchmarks.timing import Call, device, te_recipe
from megatron_fp8rl.config import PrecisionConfig
from megatron_fp8rl.kernels.types import BLOCK
from megatron_fp8rl.precision.matmul_shapes import Linear as Shape

TE_RECIPES = ("bf16", "blockwise", "delayed")
OURS = ("ours te bf16", "ours te blockwise", "ours deep_gemm")
APART = "ours deep_gemm, apart"  # feed-forward parts only
ARMS = (*(f"te {recipe}" for recipe in TE_RECIPES), *OURS, APART)


def calls(arm: str, shape: Shape) -> tuple[Call, Call]:
    """(forward, forward and backward) of an arm; weights are quantized in every call."""
    import torch

    width_in = shape.rows if shape.what == "mlp" else shape.columns
    x = torch.randn(shape.tokens, width_in, device=device()).bfloat16().requires_grad_()
    grad = torch.randn(shape.tokens, shape.rows, device=device()).bfloat16() * 1e-3
    run = _te_module(arm, shape) if arm.startswith("te ") else _ours(arm, shape)

    def both() -> None:
        x.grad = None
        run(x).backward(grad)

    return lambda: run(x), both


def _matrices(shape: Shape) -> list[tuple[int, int]]:
    if shape.what == "linear":
        return [(shape.rows, shape.columns)]
    return [(2 * shape.columns, shape.rows), (shape.rows, shape.columns)]


def _between(first: Any, last: Any, x: Any) -> Any:
    from torch.nn.functional import silu

    gate, up = first(x).chunk(2, dim=-1)
    return last(silu(gate) * up)


def _te_module(arm: str, shape: Shape) -> Call:
    import torch
    import transformer_engine.pytorch as te

    recipe = te_recipe(arm)
    settings = dict(bias=False, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
    linears = [te.Linear(columns, rows, **settings) for rows, columns in _matrices(shape)]
    for linear in linears:
        linear.weight.main_grad = torch.zeros_like(linear.weight, dtype=torch.float32)

    def run(x: Any) -> Any:
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            return linears[0](x) if len(linears) == 1 else _between(*linears, x)

    return run


def _ours(arm: str, shape: Shape) -> Call:
    import torch

    from megatron_fp8rl.precision.recipes import make_recipe
    from megatron_fp8rl.trainer.model import linear_deep_gemm
    from megatron_fp8rl.trainer.model.weight_cache import WeightCache

    numbers = [torch.randn(size, device=device()) / size[1] ** 0.5 for size in _matrices(shape)]
    weights = [torch.nn.Parameter(matrix.bfloat16()) for matrix in numbers]
    del numbers
    for weight in weights:
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight, dtype=torch.float32), False
    recipe = make_recipe(PrecisionConfig(trainer="bf16" if arm.endswith("bf16") else "blockwise", rollout="bf16"))
    if "deep_gemm" in arm:
        require_whole_blocks(shape)

    def linear(weight: Any) -> Call:
        if arm.startswith("ours te"):
            from megatron_fp8rl.trainer.model.linear_te import te_linear

            return lambda x: te_linear(x, [weight], recipe)
        return lambda x: linear_deep_gemm.linear(x, linear_deep_gemm.Matrix(weight, recipe.fmt, WeightCache()))

    def run(x: Any) -> Any:
        for weight in weights:
            weight.grad = None  # as Megatron-Core's hooks do
        if len(weights) == 1:
            return linear(weights[0])(x)
        if arm != "ours deep_gemm":
            return _between(*map(linear, weights), x)
        return linear_deep_gemm.mlp(
            x, *(linear_deep_gemm.Matrix(weight, recipe.fmt, WeightCache()) for weight in weights)
        )

    return run


def require_whole_blocks(shape: Shape) -> None:
    """Raise ValueError for a shape without whole FP8 blocks: DeepGEMM would read beyond the matrix."""
    if shape.rows % BLOCK or shape.columns % BLOCK:
        raise ValueError(f"{shape.rows} x {shape.columns} are no multiples of {BLOCK}; the trainer takes te for it")
