"""Which kernels for dense linears? Transformer Engine and DeepGEMM, forward and backward, next to what the GPU can do.

    python -m benchmarks.linears
    python -m benchmarks.linears --shape 16384,6144,4096 --arms "te blockwise" deep_gemm
    python -m benchmarks.linears --layers 4
    python -m benchmarks.linears --quick

Linears alone: forward and backward of one linear, or of a feed-forward part (gate, up, down and SwiGLU between them),
with all quantization (weights too, in every call) and FP32 gradient accumulation. ``te`` is Transformer Engine's own
module; ``ours te`` are its kernels as the trainer calls them (trainer/te_linear.py), ``ours deep_gemm`` is
trainer/dense_linear.py, ``ours deep_gemm, apart`` the same linears with SwiGLU by PyTorch. In the same run one large
product and a copy give the GPU's ceilings, and each kernel of DeepGEMM's path is timed by itself.

``--layers`` runs so many layers of Qwen3-8B's shape forward and backward, 16,384 tokens, with a small vocabulary, so
that it is the layers that are timed; weights are quantized once for both passes. BF16 linears are Megatron-Core's own.

Rows add up in ``--results``; the table is made of all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.expert_arms import Call, dense_rates, milliseconds
from benchmarks.results import FOLDER, Results, Row, copy_bandwidth, require_gpus
from megatron_fp8rl.config import OptimConfig, PrecisionConfig, RolloutConfig, RunConfig

KEYS = ("measured", "what", "tokens", "rows", "columns", "arm", "layers", "device")
TE_RECIPES = ("bf16", "blockwise", "delayed")
OURS = ("ours te bf16", "ours te blockwise", "ours deep_gemm")
APART = "ours deep_gemm, apart"  # of a feed-forward part alone
ARMS = (*(f"te {recipe}" for recipe in TE_RECIPES), *OURS, APART)
LAYER_ARMS = {
    "bf16": PrecisionConfig(trainer="bf16", rollout="bf16"),
    "te blockwise": PrecisionConfig(trainer="blockwise", rollout="bf16", linears="te"),
    "te delayed": PrecisionConfig(trainer="delayed", rollout="bf16", linears="te"),
    "deep_gemm": PrecisionConfig(trainer="blockwise", rollout="bf16", linears="deep_gemm"),
}
_TOKENS = 16_384
_VOCABULARY = 2_048


@dataclass(frozen=True)
class Shape:
    """A linear [rows, columns] = [N, K]; of a feed-forward part, N = H and K = F."""

    what: str
    tokens: int
    rows: int
    columns: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """``tokens,rows,columns``, and ``mlp`` behind them for a feed-forward part."""
        *numbers, last = text.split(",")
        is_mlp = last == "mlp"
        sizes = [int(word) for word in (numbers if is_mlp else [*numbers, last])]
        if len(sizes) != 3 or min(sizes) < 1:
            raise argparse.ArgumentTypeError(f"{text!r}: a shape is tokens,rows,columns or tokens,hidden,width,mlp")
        return cls("mlp" if is_mlp else "linear", *sizes)

    @property
    def num_operations(self) -> int:
        """Of the products of forward and the twice as many of backward."""
        return (3 if self.what == "mlp" else 1) * 3 * 2 * self.tokens * self.rows * self.columns


SHAPES = (
    Shape("linear", _TOKENS, 6_144, 4_096),  # Qwen3-8B: q, k and v
    Shape("linear", _TOKENS, 4_096, 4_096),  # o
    Shape("linear", _TOKENS, 24_576, 4_096),  # gate and up
    Shape("linear", _TOKENS, 4_096, 12_288),  # down
    Shape("mlp", _TOKENS, 4_096, 12_288),
    Shape("linear", _TOKENS, 5_120, 2_048),  # Qwen3-30B-A3B: q, k and v
    Shape("linear", _TOKENS, 2_048, 4_096),  # o
)


def passes(arm: str, shape: Shape) -> tuple[Call, Call]:
    """(forward, forward and backward) of an arm; weights are quantized in every call."""
    import torch

    width_in = shape.rows if shape.what == "mlp" else shape.columns
    x = torch.randn(shape.tokens, width_in, device="cuda").bfloat16().requires_grad_()
    grad = torch.randn(shape.tokens, shape.rows, device="cuda").bfloat16() * 1e-3
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
        with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            return linears[0](x) if len(linears) == 1 else _between(*linears, x)

    return run


def _ours(arm: str, shape: Shape) -> Call:
    """The trainer's linears."""
    import torch

    from megatron_fp8rl.fp8.recipe import make_recipe
    from megatron_fp8rl.trainer import dense_linear
    from megatron_fp8rl.trainer.weight_cache import WeightCache

    weights = [
        torch.nn.Parameter((torch.randn(size, device="cuda") / size[1] ** 0.5).bfloat16()) for size in _matrices(shape)
    ]
    for weight in weights:
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight, dtype=torch.float32), False
    recipe = make_recipe(PrecisionConfig(trainer="bf16" if arm.endswith("bf16") else "blockwise", rollout="bf16"))

    def linear(weight: Any) -> Call:
        if arm.startswith("ours te"):
            from megatron_fp8rl.trainer.te_linear import te_linear

            return lambda x: te_linear(x, [weight], recipe)
        return lambda x: dense_linear.linear(x, dense_linear.Matrix(weight, recipe.scales, WeightCache()))

    def run(x: Any) -> Any:
        for weight in weights:
            weight.grad = None  # as Megatron-Core's hooks do; the gradients are in the buffers
        if len(weights) == 1:
            return linear(weights[0])(x)
        if arm != "ours deep_gemm":
            return _between(*map(linear, weights), x)
        return dense_linear.mlp(x, *(dense_linear.Matrix(weight, recipe.scales, WeightCache()) for weight in weights))

    return run


def kernel_calls(shape: Shape) -> Iterator[tuple[str, Call, int, int]]:
    """(name, call, operations, bytes that it has to move or 0) of each kernel of a linear on DeepGEMM."""
    import torch

    from megatron_fp8rl.fp8 import blockwise
    from megatron_fp8rl.trainer import dense_gemm, dense_linear, grouped_gemm
    from megatron_fp8rl.trainer.expert_kernels import permute_quantize_bytes
    from megatron_fp8rl.trainer.grouped_gemm import Fp8

    tokens = shape.tokens
    x, grad = (torch.randn(tokens, n, device="cuda").bfloat16() for n in (shape.columns, shape.rows))
    weight = torch.randn(shape.rows, shape.columns, device="cuda").bfloat16()
    made = [dense_linear._quantize(m, "pow2", rows=True, columns=True) for m in (x, grad)]
    w = Fp8(*blockwise.quantize_weight(weight, "pow2"))
    back = Fp8(*(part.unsqueeze(0) for part in w)).transposed()
    w_KN = Fp8(back.data[0], back.scale[0].contiguous())
    out, numbers = torch.zeros_like(weight, dtype=torch.float32), weight.numel()
    both, rows_alone = dict(rows=True, columns=True), dict(rows=True, columns=False)
    for what, options in (("rows and columns", both), ("rows", rows_alone)):
        num_bytes = permute_quantize_bytes(tokens, tokens, shape.columns, **options)
        yield f"quantize {what}", partial(dense_linear._quantize, x, "pow2", **options), 0, num_bytes
    yield "quantize the weight", partial(blockwise.quantize_weight, weight, "pow2"), 0, 3 * numbers
    yield "transpose the weight", Fp8(*(part.unsqueeze(0) for part in w)).transposed, 0, 2 * numbers
    operations = 2 * tokens * numbers
    columns = [dense_linear._columns(m) for m in made]
    yield "forward", partial(dense_gemm.multiply, dense_linear._rows(made[0]), w), operations, 0
    yield "dgrad", partial(dense_gemm.multiply, dense_linear._rows(made[1]), w_KN), operations, 0
    yield "wgrad", partial(dense_gemm.add_weight_gradient, columns[1], columns[0], out), operations, 0
    layout, out_1NK = dense_linear._layout(tokens, x.device), out.unsqueeze(0)
    flat = [Fp8(m.columns, m.column_scales) for m in (made[1], made[0])]
    grouped = partial(grouped_gemm.add_weight_gradients_fp8, *flat, layout, out_1NK)
    yield "wgrad, grouped kernel", grouped, operations, 0
    yield "forward in BF16, PyTorch", lambda: x @ weight.t(), operations, 0


def measure_linears(shape: Shape, ceilings: dict[str, float], options: argparse.Namespace) -> Iterator[Row]:
    """A row for each arm that has none yet, and for each kernel of DeepGEMM's path."""
    import torch

    for arm in options.arms:
        row = {"measured": "linears", **vars(shape), "arm": arm}
        if arm == APART and shape.what != "mlp" or options.is_known(row) or _is_late(options, f"{shape} {arm}"):
            continue
        try:
            forward, both = passes(arm, shape)
            both()  # kernels compile
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            both()
            torch.cuda.synchronize()
            row["peak_GiB"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)
            ms = milliseconds(both, options.rounds)
            row |= {"ms": round(ms, 4), "forward_ms": round(milliseconds(forward, options.rounds), 4)}
            rate = shape.num_operations / ms * 1e3
            ceiling = ceilings["bf16" if arm.endswith("bf16") else "fp8"]
            row |= {"TFLOPs": round(rate / 1e12), "of_dense": round(rate / ceiling, 3)}
            del forward, both
        except (RuntimeError, ValueError, ImportError, AssertionError) as error:
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        torch.cuda.empty_cache()
        yield row
    if shape.what == "linear" and "ours deep_gemm" in options.arms and not _is_late(options, f"kernels of {shape}"):
        try:
            yield from _measure_kernels(shape, ceilings, options.rounds)
        except (RuntimeError, ImportError) as error:
            print(f"SKIPPED the kernels of {shape} by themselves: {error}", flush=True)


def _measure_kernels(shape: Shape, ceilings: dict[str, float], rounds: int) -> Iterator[Row]:
    for name, call, operations, num_bytes in kernel_calls(shape):
        row = {"measured": "kernels", **vars(shape), "arm": name}
        ms = milliseconds(call, rounds)
        row["ms"] = round(ms, 4)
        if operations:
            rate = operations / ms * 1e3
            ceiling = ceilings["bf16" if "BF16" in name else "fp8"]
            row |= {"TFLOPs": round(rate / 1e12), "of_dense": round(rate / ceiling, 3)}
        else:
            speed = num_bytes / ms * 1e3
            row |= {"GB/s": round(speed / 1e9), "of_copy": round(speed / ceilings["copy"], 3)}
        yield row


def measure_layers(num_layers: int, options: argparse.Namespace) -> Iterator[Row]:
    """A row for each arm: milliseconds of forward and backward of a few layers on one GPU."""
    import torch

    from benchmarks.synthetic import Language
    from benchmarks.training import batches, free_memory, gradients, model_of, single_rank
    from megatron_fp8rl.trainer.model import finish_fp8_step
    from megatron_fp8rl.trainer.policy import Policy
    from megatron_fp8rl.trainer.weight_cache import forget_quantized_weights

    first = RunConfig(
        name="linears",
        model=replace(model_of("qwen3_8b", num_layers), vocab_size=_VOCABULARY),
        precision=LAYER_ARMS["bf16"],
        optim=OptimConfig(recompute="none"),
        rollout=RolloutConfig(max_tokens_per_microbatch=_TOKENS),
    )
    with single_rank(first) as parallel:
        length = 2048
        (batch,) = batches(first, Language(_VOCABULARY), 1, num_sequences=_TOKENS // length, length=length)
        for arm, precision in LAYER_ARMS.items():
            row: Row = {"measured": "layers", "what": "qwen3_8b", "layers": num_layers, "tokens": _TOKENS, "arm": arm}
            if options.is_known(row) or _is_late(options, f"{num_layers} layers, {arm}"):
                continue
            policy = None
            try:
                policy = Policy.build(replace(first, precision=precision), parallel)
                times = []
                for _ in range(3 + options.rounds):  # kernels compile in the first, which gives delayed scaling a past
                    forget_quantized_weights()
                    torch.cuda.synchronize()
                    started = time.perf_counter()
                    gradients(policy, batch)
                    torch.cuda.synchronize()
                    times.append(time.perf_counter() - started)
                    if len(times) == 1:
                        finish_fp8_step(policy.chunks, parallel)
                row |= {"ms": round(1e3 * statistics.median(times[3:]), 2)}
                row["peak_GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            except (RuntimeError, ValueError, AssertionError) as error:
                row["error"] = f"{type(error).__name__}: {error}"[:300]
            del policy
            free_memory()
            torch.cuda.reset_peak_memory_stats()
            yield row


def _is_late(options: argparse.Namespace, what: str) -> bool:
    """Whether the budget is spent; says what is left out."""
    if time.monotonic() - options.started <= options.budget_s:
        return False
    print(f"SKIPPED {what}: the budget is spent; run the same command again", flush=True)
    return True


def table(rows: Sequence[Row]) -> list[Row]:
    """One line per shape: milliseconds of each arm, and how much faster DeepGEMM is than BF16 and TE's blockwise."""
    lines: dict[tuple, Row] = {}
    for row in rows:
        if row["measured"] in ("linears", "layers") and "ms" in row:
            names = [name for name in ("what", "layers", "tokens", "rows", "columns", "device") if name in row]
            key = tuple(row[name] for name in names)
            lines.setdefault(key, {name: row[name] for name in names})[row["arm"]] = row["ms"]
    for line in lines.values():
        ours = line.get("ours deep_gemm") or line.get("deep_gemm")
        for recipe in ("bf16", "blockwise"):
            theirs = line.get(f"te {recipe}") or line.get(recipe)
            line[f"{recipe} : ours"] = round(theirs / ours, 2) if ours and theirs else None
    return list(lines.values())


def write_section(rows: Sequence[Row]) -> None:
    from benchmarks import record

    notes = (
        "Milliseconds, forward and backward; of linears with weights quantized in every call, gradients added to FP32 "
        "buffers. `of_dense` is the share of one 8192-cubed product's rate in the same type, FP8 without block scales; "
        "`of_copy` that of a copy's speed, both measured in the same run."
    )
    lines = table(rows)
    parts = [[line for line in lines if "layers" not in line], [line for line in lines if "layers" in line]]
    parts += [
        [{name: value for name, value in row.items() if name != "measured"} for row in rows if row["measured"] == what]
        for what in ("kernels", "ceilings")
    ]
    record.section("linears", "Dense linears", "\n\n".join(record.table(part) for part in parts if part), notes=notes)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linears", description=__doc__.split("\n")[0])
    parser.add_argument("--shape", type=Shape.parse, nargs="+", default=list(SHAPES), metavar="T,N,K[,mlp]")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--layers", type=int, help="time so many layers instead of linears alone")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--again", action="store_true", help="measure also what --results has already")
    parser.add_argument("--budget-s", type=float, default=540.0)
    parser.add_argument("--quick", action="store_true", help="two shapes, few rounds; no rows of the table")
    parser.add_argument("--results", type=Path, default=FOLDER / "linears.jsonl")
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds, options.budget_s = 5, min(options.budget_s, 80.0)
        options.shape = [SHAPES[2], SHAPES[4]]
        options.results = options.results.with_name("linears_quick.jsonl")
    options.started = time.monotonic()
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    require_gpus(1, "benchmarks.linears")
    with contextlib.suppress(ImportError):
        import transformer_engine.pytorch  # noqa: F401  before PyTorch loads cuDNN
    import torch

    results, device = Results(options.results, KEYS), torch.cuda.get_device_name()
    options.is_known = lambda row: not (options.again or options.quick) and results.has(row | {"device": device})
    if options.layers:
        for row in measure_layers(options.layers, options):
            results.add(row | {"device": device})
    else:
        ceilings = dense_rates() | {"copy": copy_bandwidth()}
        shown = {name: round(rate / 1e12, 3) for name, rate in ceilings.items()}
        results.add({"measured": "ceilings", "device": device} | shown)  # TFLOP/s, and TB/s
        for shape in options.shape:
            for row in measure_linears(shape, ceilings, options):
                results.add(row | {"device": device})
    for line in table(results.rows()):
        print(line, flush=True)
    if not options.quick:
        write_section([row for row in results.rows() if "error" not in row])
    return 0


if __name__ == "__main__":
    sys.exit(main())
