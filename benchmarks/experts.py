"""Whether FP8 is faster for experts of a shape: Transformer Engine, grouped kernels, and the peak rates of the GPU.

    python -m benchmarks.experts
    python -m benchmarks.experts --config grpo_qwen3_30b_a3b
    python -m benchmarks.experts --shape 64,65536,4096,1536 --pattern equal skewed
    python -m benchmarks.experts --shape 64,65536,4096,1536 --sweep

Forward and backward of all experts of a rank, with quantization (weights in every call) and FP32 gradient accumulation.
``te`` is Transformer Engine's GroupedLinear; ``grouped`` are this library's experts, including the router's weights. A
token counts once for each of its experts. ``--sweep`` measures 128 to 131,072 tokens. One large product and a copy in
the same process give the ceilings. ``first_s`` is the first call, which compiles kernels into DG_JIT_CACHE_DIR.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial

from benchmarks import record, runner
from benchmarks.expert_arms import ARMS, experts
from benchmarks.record import Row
from benchmarks.timing import Call, ceilings, passes, runnable
from megatron_fp8rl.precision.matmul_shapes import Experts as Shape
from megatron_fp8rl.precision.matmul_shapes import experts_of

PATTERNS = ("balanced", "equal", "skewed", "half empty", "one has all")
SWEEP = tuple(128 * 4**power for power in range(6))  # 128 to 131,072
_BUSY = ", busy"  # columns of times behind other GPU work


def parse_shape(text: str) -> Shape:
    """``experts,tokens,hidden,width``."""
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 4 or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a shape is experts,tokens,hidden,width")
    return Shape(*numbers)


SHAPES = (
    Shape(128, 131_072, 2048, 768),  # Qwen3-30B-A3B, 16,384 tokens on one rank
    Shape(128, 32_768, 2048, 768),
    Shape(128, 4_096, 2048, 768),
    Shape(128, 512, 2048, 768),
    Shape(16, 131_072, 2048, 768),  # the same with experts over 8 ranks
    Shape(16, 131_072, 4096, 1536),  # Qwen3-235B-A22B over 8 ranks
    Shape(32, 65_536, 7168, 2048),  # DeepSeek-V3 over 8 ranks
    Shape(8, 32_768, 4096, 14_336),  # Mixtral 8x7B
    Shape(256, 131_072, 2048, 512),  # Qwen3.5-35B-A3B
)


def token_counts(pattern: str, num_tokens: int, num_experts: int) -> list[int]:
    """Tokens of each expert, the same in every run. ``balanced`` draws uniformly; ``equal`` is exact."""
    import torch

    if pattern == "equal":
        return [num_tokens // num_experts + (i < num_tokens % num_experts) for i in range(num_experts)]
    order = torch.arange(num_experts)
    shares = {
        "balanced": torch.ones(num_experts),
        "skewed": 1.0 / (order + 1),  # Zipf's law
        "half empty": (order % 2 == 0).float(),
        "one has all": (order == num_experts // 2).float(),
    }[pattern]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(shares / shares.sum(), num_tokens, replacement=True, generator=generator)
    return torch.bincount(drawn, minlength=num_experts).tolist()


def measure_arms(
    measured: str, arms: Sequence[str], calls: Callable[[str], tuple[Call, Call]], operations: int, rounds: int
) -> Iterator[Row]:
    """A row for each arm. ``calls`` returns (forward, forward and backward) of an arm."""
    import torch

    for arm in arms:
        row = {"measured": measured, "arm": arm}
        try:
            row |= passes(*calls(arm), rounds)
            row["TFLOPs"] = round(operations / row["ms"] / 1e9)
        except (RuntimeError, ValueError, ImportError, AssertionError) as error:
            row["error"] = runner.reason(error)
        torch.cuda.empty_cache()
        yield row


def measure_experts(shape: Shape, counts: Sequence[int], arms: Sequence[str], rounds: int) -> Iterator[Row]:
    calls = partial(experts, counts=counts, hidden=shape.hidden, width=shape.width)
    return measure_arms("experts", arms, calls, shape.num_operations, rounds)


def lines(rows: Sequence[Row], measured: str, names: Sequence[str]) -> list[Row]:
    """A line for each shape: milliseconds of each arm, and the ratio of the fastest BF16 and FP8 arms of the run."""
    by_shape: dict[tuple, Row] = {}
    for row in rows:
        if row["measured"] == measured:
            head = {name: row.get(name, "-") for name in ("run", *names)}
            line = by_shape.setdefault(tuple(head.values()), head)
            line[row["arm"]] = round(row["ms"], 3)
            if "busy_ms" in row:
                line[row["arm"] + _BUSY] = round(row["busy_ms"], 3)
    for line in by_shape.values():
        for kind in ("", _BUSY):
            arms = [arm for arm in line if arm not in ("run", *names) and arm.endswith(_BUSY) == bool(kind)]
            bf16 = [line[arm] for arm in arms if arm.removesuffix(_BUSY).endswith(" bf16")]
            fp8 = [line[arm] for arm in arms if not arm.removesuffix(_BUSY).endswith(" bf16")]
            line["bf16 : fp8" + kind] = round(min(bf16) / min(fp8), 2) if bf16 and fp8 else None
    return list(by_shape.values())


def parts(rows: Sequence[Row], measured: str, names: Sequence[str]) -> str:
    others: dict[str, list[Row]] = {}
    for row in rows:
        head = {"run": row.get("run", "-")}
        fields = {name: row[name] for name in row if name not in ("measured", "run", "stamp")}
        others.setdefault(row["measured"], []).append(head | fields)
    others.pop(measured, None)
    return "\n\n".join(record.table(part) for part in (lines(rows, measured, names), *others.values()) if part)


class Experts(runner.Benchmark):
    name, title, about = "experts", "Experts", __doc__
    keys = ("measured", "experts", "tokens", "hidden", "width", "pattern", "arm", "device")

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--config", help="measure the shape of this configuration")
        parser.add_argument("--shape", type=parse_shape, nargs="+", default=SHAPES, metavar="E,T,H,F")
        parser.add_argument("--sweep", action="store_true", help="measure the shapes with 128 to 131,072 tokens")
        runner.choices(parser, "--pattern", PATTERNS, ["balanced", "skewed"], help="pattern of routing")
        runner.choices(parser, "--arms", ARMS, ARMS)
        parser.add_argument("--rounds", type=int, default=20)

    def settle(self, options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        if options.config:
            from megatron_fp8rl.cli import load_config

            cfg = load_config(options.config)
            if (shape := experts_of(cfg.model, cfg.parallel, cfg.optim)) is None:
                parser.error(f"--config {options.config}: the model is dense; use python -m benchmarks.linears")
            options.shape = [shape]
        if options.quick:
            options.rounds, options.pattern, options.shape = 5, ["skewed"], [Shape(16, 16_384, 2048, 768)]
        if options.sweep:
            options.shape = [replace(shape, tokens=tokens) for shape in options.shape for tokens in SWEEP]

    def arms(self, options: argparse.Namespace) -> Iterator[Row]:
        for pattern in options.pattern:
            for shape in options.shape:
                yield asdict(shape) | {"pattern": pattern}

    def measure(self, arm: Row, options: argparse.Namespace) -> Iterator[Row]:
        arms = runnable(options.arms)
        shape, best = Shape(**{name: arm[name] for name in ("experts", "tokens", "hidden", "width")}), ceilings()
        counts = token_counts(arm["pattern"], shape.tokens, shape.experts)
        yield {"measured": "ceilings"} | {name: round(rate / 1e12, 3) for name, rate in best.items()}
        for row in measure_experts(shape, counts, arms, options.rounds):
            yield arm | row

    def table(self, rows: Sequence[Row]) -> str:
        return parts(rows, "experts", ("experts", "tokens", "hidden", "width", "pattern", "device"))

    def notes(self, rows: Sequence[Row]) -> str:
        return (
            "Milliseconds, forward and backward. Weights are quantized in every call; gradients are added to FP32 "
            "buffers. A token counts once for each of its experts. Busy: behind other GPU work, as in a step; other "
            "times include launches. Ceilings: one 8192-cubed product without block scales (TFLOP/s), and a copy "
            "(TB/s)."
        )


if __name__ == "__main__":
    sys.exit(runner.main(Experts()))
