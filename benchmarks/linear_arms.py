"""What benchmarks/linears.py times: linears and feed-forward parts of each implementation, and DeepGEMM's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.timing import Call, device
from megatron_fp8rl.config import FP8_BLOCK, PrecisionConfig
from megatron_fp8rl.precision.matmul_shapes import Linear as Shape

TE_RECIPES = ("bf16", "blockwise", "delayed")
OURS = ("ours te bf16", "ours te blockwise", "ours deep_gemm")
APART = "ours deep_gemm, apart"  # of a feed-forward part alone
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
    """Rows and columns of each weight."""
    if shape.what == "linear":
        return [(shape.rows, shape.columns)]
    return [(2 * shape.columns, shape.rows), (shape.rows, shape.columns)]


def _between(first: Any, last: Any, x: Any) -> Any:
    """Two linears and SwiGLU by PyTorch."""
    from torch.nn.functional import silu

    gate, up = first(x).chunk(2, dim=-1)
    return last(silu(gate) * up)


def _te_module(arm: str, shape: Shape) -> Call:
    """Transformer Engine's own Linear."""
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    recipe = {
        "te bf16": lambda: None,
        "te blockwise": lambda: recipes.Float8BlockScaling(fp8_format=recipes.Format.E4M3),
        "te delayed": lambda: recipes.DelayedScaling(fp8_format=recipes.Format.HYBRID),
    }[arm]()
    settings = dict(bias=False, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
    linears = [te.Linear(columns, rows, **settings) for rows, columns in _matrices(shape)]
    for linear in linears:
        linear.weight.main_grad = torch.zeros_like(linear.weight, dtype=torch.float32)

    def run(x: Any) -> Any:
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            return linears[0](x) if len(linears) == 1 else _between(*linears, x)

    return run


def _ours(arm: str, shape: Shape) -> Call:
    """The trainer's linears."""
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
        return lambda x: linear_deep_gemm.linear(x, linear_deep_gemm.Matrix(weight, recipe.scales, WeightCache()))

    def run(x: Any) -> Any:
        for weight in weights:
            weight.grad = None  # as Megatron-Core's hooks do; the gradients are in the buffers
        if len(weights) == 1:
            return linear(weights[0])(x)
        if arm != "ours deep_gemm":
            return _between(*map(linear, weights), x)
        return linear_deep_gemm.mlp(x, *(linear_deep_gemm.Matrix(weight, recipe.scales, WeightCache()) for weight in weights))

    return run


def require_whole_blocks(shape: Shape) -> None:
    """Raise ValueError for a shape that DeepGEMM does not multiply; its kernels would read beside the matrix."""
    if shape.rows % FP8_BLOCK or shape.columns % FP8_BLOCK:
        raise ValueError(f"{shape.rows} x {shape.columns} are no multiples of {FP8_BLOCK}; the trainer takes te for it")


def kernel_calls(shape: Shape) -> Iterator[tuple[str, Call, int, int]]:
    """(name, call, operations, bytes that it has to move or 0) of each kernel of a linear on DeepGEMM."""
    import torch

    from benchmarks.moved_bytes import permute_quantize_bytes
    from megatron_fp8rl.kernels import blockwise, gemm
    from megatron_fp8rl.kernels.fused_moe import ExpertPermutation, permute_quantize
    from megatron_fp8rl.kernels.gemm import Fp8
    from megatron_fp8rl.trainer.model import linear_deep_gemm

    require_whole_blocks(shape)
    tokens = shape.tokens
    x, grad = (torch.randn(tokens, n, device=device()).bfloat16() for n in (shape.columns, shape.rows))
    weight = torch.randn(shape.rows, shape.columns, device=device()).bfloat16()
    made = [linear_deep_gemm._quantize(m, "pow2", rows=True, columns=True) for m in (x, grad)]
    w = Fp8(*blockwise.quantize_weight(weight, "pow2"))
    back = Fp8(*(part.unsqueeze(0) for part in w)).transposed()
    w_KN = Fp8(back.data[0], back.scale[0].contiguous())
    out, numbers = torch.zeros_like(weight, dtype=torch.float32), weight.numel()
    both, rows_alone = dict(rows=True, columns=True), dict(rows=True, columns=False)
    for what, options in (("rows and columns", both), ("rows", rows_alone)):
        num_bytes = permute_quantize_bytes(tokens, tokens, shape.columns, **options)
        yield f"quantize {what}", partial(linear_deep_gemm._quantize, x, "pow2", **options), 0, num_bytes
    yield "quantize the weight", partial(blockwise.quantize_weight, weight, "pow2"), 0, 3 * numbers
    yield "transpose the weight", Fp8(*(part.unsqueeze(0) for part in w)).transposed, 0, 2 * numbers
    operations = 2 * tokens * numbers
    columns = [linear_deep_gemm._columns(m) for m in made]
    yield "forward", partial(gemm.multiply_dense, linear_deep_gemm._rows(made[0]), w), operations, 0
    yield "dgrad", partial(gemm.multiply_dense, linear_deep_gemm._rows(made[1]), w_KN), operations, 0
    yield "wgrad", partial(gemm.add_dense_weight_gradient, columns[1], columns[0], out), operations, 0
    layout = ExpertPermutation.of(torch.tensor([tokens], device=device()), tokens, [tokens])
    blocks = [permute_quantize(m, layout, "pow2", rows=False, columns=True) for m in (grad, x)]
    operands = [Fp8(m.columns, m.column_scales) for m in blocks]
    grouped = partial(gemm.add_weight_gradients_fp8, *operands, layout, out.unsqueeze(0))
    yield "wgrad, grouped kernel", grouped, operations, 0
    yield "forward in BF16, PyTorch", lambda: x @ weight.t(), operations, 0
