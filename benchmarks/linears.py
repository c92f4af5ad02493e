"""Whether FP8 is faster for linears of a shape: Transformer Engine, DeepGEMM, and the peak rates of the GPU.

    python -m benchmarks.linears
    python -m benchmarks.linears --config grpo_qwen3_8b
    python -m benchmarks.linears --shape 16384,6144,4096 16384,4096,12288,mlp --arms "te blockwise" "ours deep_gemm"
    python -m benchmarks.linears --shape 16384,4096,12288,mlp --sweep

Forward and backward of a linear, or of a feed-forward part (gate, up, SwiGLU and down), with quantization (weights in
every call) and FP32 gradient accumulation. ``te`` is Transformer Engine's module; ``ours te`` calls its kernels as
trainer/model/linear_te.py does; ``ours deep_gemm`` is trainer/model/linear_deep_gemm.py; ``ours deep_gemm, apart`` has
SwiGLU by PyTorch. ``--sweep`` measures 128 to 131,072 tokens. One large product and a copy in the same process give the
ceilings. ``first_s`` is the first call, which compiles kernels.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

from benchmarks import runner
from benchmarks.experts import SWEEP, measure_arms, parts
from benchmarks.linear_arms import APART, ARMS, calls
from benchmarks.record import Row
from benchmarks.timing import ceilings, runnable
from megatron_fp8rl.precision.matmul_shapes import Linear as Shape
from megatron_fp8rl.precision.matmul_shapes import linears_of


def parse_shape(text: str) -> Shape:
    """``tokens,rows,columns``, or ``tokens,hidden,width,mlp`` for a feed-forward part."""
    numbers, is_mlp = text.removesuffix(",mlp").split(","), text.endswith(",mlp")
    sizes = [int(word) for word in numbers if word.isdecimal()]
    if len(sizes) != 3 or len(numbers) != 3 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a shape is tokens,rows,columns or tokens,hidden,width,mlp")
    return Shape("mlp" if is_mlp else "linear", *sizes)


SHAPES = (
    Shape("linear", 16_384, 6_144, 4_096),  # Qwen3-8B: q, k and v
    Shape("linear", 16_384, 4_096, 4_096),  # o
    Shape("linear", 16_384, 24_576, 4_096),  # gate and up
    Shape("linear", 16_384, 4_096, 12_288),  # down
    Shape("mlp", 16_384, 4_096, 12_288),
    Shape("linear", 16_384, 5_120, 2_048),  # Qwen3-30B-A3B: q, k and v
    Shape("linear", 16_384, 2_048, 4_096),  # o
)


def measure_linears(shape: Shape, arms: Sequence[str], best: dict[str, float], rounds: int) -> Iterator[Row]:
    """A row for each arm of this shape, with its share of the rate of one large product."""
    arms = [arm for arm in arms if arm != APART or shape.what == "mlp"]
    for row in measure_arms("linears", arms, lambda arm: calls(arm, shape), shape.num_operations, rounds):
        if "ms" in row:
            ceiling = best["bf16" if row["arm"].endswith("bf16") else "fp8"]
            row["of_dense"] = round(shape.num_operations / row["ms"] * 1e3 / ceiling, 3)
        yield row


class Linears(runner.Benchmark):
    name, title, about = "linears", "Dense linears", __doc__
    keys = ("measured", "what", "tokens", "rows", "columns", "arm", "device")

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--config", help="measure the shapes of this configuration")
        parser.add_argument("--shape", type=parse_shape, nargs="+", default=SHAPES, metavar="T,N,K[,mlp]")
        parser.add_argument("--sweep", action="store_true", help="measure the shapes with 128 to 131,072 tokens")
        runner.choices(parser, "--arms", ARMS, ARMS)
        parser.add_argument("--rounds", type=int, default=20)

    def settle(self, options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        if options.config:
            from megatron_fp8rl.cli import load_config

            options.shape = list(dict.fromkeys(use.shape for use in linears_of(load_config(options.config))))
            if not options.shape:
                parser.error("--config: no layer is in FP8; lower precision.bf16_first_layers and bf16_last_layers")
        if options.quick:
            options.rounds, options.shape = 5, [SHAPES[2], SHAPES[4]]
        if options.sweep:
            options.shape = [replace(shape, tokens=tokens) for shape in options.shape for tokens in SWEEP]

    def arms(self, options: argparse.Namespace) -> list[Row]:
        return [asdict(shape) for shape in options.shape]

    def measure(self, arm: Row, options: argparse.Namespace) -> Iterator[Row]:
        arms, best = runnable(options.arms), ceilings()
        yield {"measured": "ceilings"} | {name: round(rate / 1e12, 3) for name, rate in best.items()}
        for row in measure_linears(Shape(**arm), arms, best, options.rounds):
            yield arm | row

    def table(self, rows: Sequence[Row]) -> str:
        return parts(rows, "linears", ("what", "tokens", "rows", "columns", "device"))

    def notes(self, rows: Sequence[Row]) -> str:
        return (
            "Milliseconds, forward and backward. Weights are quantized in every call; gradients are added to FP32 "
            "buffers. Busy: behind other GPU work, as in a step; other times include launches. Ceilings: one "
            "8192-cubed product without block scales (TFLOP/s), and a copy (TB/s)."
        )


if __name__ == "__main__":
    sys.exit(runner.main(Linears()))
