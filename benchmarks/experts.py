"""Does FP8 pay for the experts of my shape? Transformer Engine and grouped kernels, next to what the GPU can do.

    python -m benchmarks.experts
    python -m benchmarks.experts --config grpo_qwen3_30b_a3b
    python -m benchmarks.experts --shape 64,65536,4096,1536 --pattern equal skewed
    python -m benchmarks.experts --layers 4
    python -m benchmarks.experts --quick

Experts alone: forward and backward of all experts of a rank, with all quantization (weights too, in every call) and
FP32 gradient accumulation. In the same run one large product and a copy give the GPU's ceilings, and each kernel is
timed by itself. The floor of an arm: its operations at the rate of one large product, its bytes at the copy's.
``te`` is Transformer Engine's GroupedLinear; ``grouped`` are this library's experts, who multiply by the router's
weights. Tokens are those that the experts of a rank receive: a token counts once for each of its experts.

``--layers`` trains models of so many layers, 16,384 tokens a step, with the experts and linears of each arm.

Rows add up in ``--results``; the table and the plot docs/experts.png are made of all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.expert_arms import ARMS, OURS, dense_rates, experts, milliseconds, movement_calls, product_calls
from benchmarks.results import FOLDER, Results, Row, copy_bandwidth, require_gpus
from megatron_fp8rl.config import PrecisionConfig, RunConfig

KEYS = ("measured", "experts", "tokens", "hidden", "width", "pattern", "arm", "model", "layers", "device")
PATTERNS = ("balanced", "equal", "skewed", "half empty", "one has all")
PLOT = Path("docs/experts.png")
_LAYER_ARMS = {
    "te bf16": PrecisionConfig(trainer="bf16", rollout="bf16", experts="te"),
    "te blockwise": PrecisionConfig(trainer="blockwise", rollout="bf16", experts="te"),
    "grouped bf16": PrecisionConfig(trainer="bf16", rollout="bf16", experts="deep_gemm"),
    "grouped fp8": PrecisionConfig(trainer="blockwise", rollout="bf16", experts="deep_gemm"),
}
_LAYER_MODELS = ("qwen3_30b_a3b", "qwen3_8b")
_LAYER_TOKENS = 16_384


@dataclass(frozen=True)
class Shape:
    """Experts of one rank and what they receive in one microbatch."""

    experts: int
    tokens: int  # routed: a token counts once for each of its experts
    hidden: int
    width: int  # features between the two linears

    @classmethod
    def parse(cls, text: str) -> Shape:
        """``experts,tokens,hidden,width``."""
        numbers = [int(word) for word in text.split(",")]
        if len(numbers) != 4 or min(numbers) < 1:
            raise argparse.ArgumentTypeError(f"{text!r}: a shape is experts,tokens,hidden,width")
        return cls(*numbers)

    @classmethod
    def of(cls, cfg: RunConfig) -> Shape:
        """What a rank of a run computes, with balanced routing. Raises ValueError for a model without experts."""
        model, parallel = cfg.model, cfg.parallel
        if not model.is_moe:
            raise ValueError("this configuration's model is dense: it has no experts to measure")
        own_tokens = cfg.rollout.max_tokens_per_microbatch // (parallel.tensor * parallel.context)
        return cls(
            experts=model.num_experts // parallel.expert,
            tokens=own_tokens * model.experts_per_token * parallel.expert_tensor,
            hidden=model.hidden_size,
            width=model.moe_ffn_hidden_size // parallel.expert_tensor,
        )

    @property
    def num_operations(self) -> int:
        """Of the three products of forward (gate, up, down) and the six of backward."""
        return 3 * 3 * 2 * self.tokens * self.hidden * self.width


SHAPES = (
    Shape(128, 131_072, 2048, 768),  # Qwen3-30B-A3B, 16,384 tokens on one rank
    Shape(128, 32_768, 2048, 768),
    Shape(128, 4_096, 2048, 768),
    Shape(128, 512, 2048, 768),
    Shape(16, 131_072, 2048, 768),  # the same with experts over 8 ranks
    Shape(16, 131_072, 4096, 1536),  # Qwen3-235B-A22B over 8 ranks
    Shape(32, 65_536, 7168, 2048),  # DeepSeek-V3 over 8 ranks
)


def token_counts(pattern: str, num_tokens: int, num_experts: int) -> list[int]:
    """Tokens of each expert, the same in every run. ``balanced`` is what a fair router draws; ``equal`` is exact."""
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


def moved_bytes(shape: Shape, counts: Sequence[int], arm: str) -> int:
    """Bytes that a grouped arm moves between its products, forward and backward, without the products' own."""
    from megatron_fp8rl.trainer import expert_kernels as kernels

    num_rows = sum(-(-count // 128) * 128 for count in counts)
    trainer, wgrad = OURS[arm]
    fp8, columns = trainer != "bf16", trainer != "bf16" and wgrad == "fp8"
    operand = dict(rows=fp8, columns=columns, bf16=not columns)
    size = (shape.tokens, num_rows, shape.width)
    return (
        2 * kernels.permute_quantize_bytes(shape.tokens, num_rows, shape.hidden, **operand)
        + kernels.swiglu_quantize_bytes(*size, rows=fp8, bf16=not fp8)
        + kernels.unpermute_bytes(shape.tokens, shape.hidden, probs=True)
        + kernels.swiglu_backward_bytes(*size, activation_columns=columns, activation_bf16=not columns, **operand)
        + kernels.unpermute_bytes(shape.tokens, shape.hidden)
    )


def floor_ms(shape: Shape, counts: Sequence[int], arm: str, ceilings: dict[str, float]) -> float:
    """The time that a grouped arm would take at the GPU's ceilings: operations per second, and bytes per second."""
    trainer, wgrad = OURS[arm]
    operations, operands = shape.num_operations / 3, "bf16" if trainer == "bf16" else "fp8"
    seconds = 2 * operations / ceilings[operands] + operations / ceilings[wgrad]
    return 1e3 * (seconds + moved_bytes(shape, counts, arm) / ceilings["copy"])


def verdict(rows: Sequence[Row], shape: Shape, device: str) -> str:
    """Whether FP8 pays for a shape, in a line for each pattern that was measured on a device."""
    sentences = []
    for pattern in PATTERNS:
        ms = {
            row["arm"]: row["ms"]
            for row in rows
            if row["measured"] == "experts" and row["pattern"] == pattern and row["device"] == device and "ms" in row
            and all(row[name] == getattr(shape, name) for name in ("experts", "tokens", "hidden", "width"))
        }  # fmt: skip
        in_bf16 = {arm: time for arm, time in ms.items() if arm.endswith(" bf16")}
        in_fp8 = {arm: time for arm, time in ms.items() if arm not in in_bf16}
        if not in_bf16 or not in_fp8:
            continue
        slow, fast = min(in_bf16, key=in_bf16.get), min(in_fp8, key=in_fp8.get)
        gain = in_bf16[slow] / in_fp8[fast]
        answer = "FP8 pays" if gain > 1.02 else "FP8 does not pay" if gain < 0.98 else "FP8 makes no difference"
        sentences.append(
            f"{pattern}: {answer}: {fast} {in_fp8[fast]:.2f} ms, {slow} {in_bf16[slow]:.2f} ms, {gain:.2f}x"
        )
    return "\n".join(sentences) or f"not measured on {device}: {shape}"


def measure_experts(
    shape: Shape, pattern: str, ceilings: dict[str, float], options: argparse.Namespace
) -> Iterator[Row]:
    """A row for each arm that has none yet."""
    import torch

    counts = token_counts(pattern, shape.tokens, shape.experts)
    base = {"measured": "experts", **vars(shape), "pattern": pattern}
    for arm in options.arms:
        row = base | {"arm": arm}
        if options.is_known(row) or _is_late(options, f"{shape} {pattern} {arm}"):
            continue
        try:
            forward, both = experts(arm, counts, shape.hidden, shape.width)
            both()  # kernels compile
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            both()
            row["peak_GiB"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)
            ms = milliseconds(both, options.rounds)
            row |= {"ms": round(ms, 4), "forward_ms": round(milliseconds(forward, options.rounds), 4)}
            row["TFLOPs"] = round(shape.num_operations / ms / 1e9)
            if arm in OURS:
                row["floor_ms"] = round(floor_ms(shape, counts, arm, ceilings), 4)
            del forward, both
        except (RuntimeError, ValueError, ImportError, AssertionError) as error:
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        torch.cuda.empty_cache()
        yield row


def _is_late(options: argparse.Namespace, what: str) -> bool:
    """Whether the budget is spent; says what is left out."""
    if time.monotonic() - options.started <= options.budget_s:
        return False
    print(f"SKIPPED {what}: the budget is spent; run the same command again", flush=True)
    return True


def measure_kernels(shape: Shape, pattern: str, ceilings: dict[str, float], rounds: int) -> Iterator[Row]:
    """A row for each kernel by itself."""
    import torch

    from megatron_fp8rl.trainer.expert_kernels import Layout

    counts = token_counts(pattern, shape.tokens, shape.experts)
    on_device = torch.tensor(counts, device="cuda")
    layout = Layout.of(on_device, shape.tokens, counts)
    base = {"measured": "kernels", **vars(shape), "pattern": pattern}
    ms = milliseconds(lambda: Layout.of(on_device, shape.tokens, counts), rounds)
    yield base | {"arm": "layout", "ms": round(ms, 4)}
    for name, call, num_bytes in movement_calls(layout, shape.hidden, shape.width, "pow2"):
        ms = milliseconds(call, rounds)
        speed = num_bytes / ms * 1e3
        found = {"GB/s": round(speed / 1e9), "of_copy": round(speed / ceilings["copy"], 3)}
        yield base | {"arm": name, "ms": round(ms, 4)} | found
    for name, call, num_operations in product_calls(layout, shape.hidden, shape.width):
        ms = milliseconds(call, rounds)
        rate = num_operations / ms * 1e3
        of_dense = rate / ceilings["fp8" if name.endswith("fp8") else "bf16"]
        yield base | {"arm": name, "ms": round(ms, 4), "TFLOPs": round(rate / 1e12), "of_dense": round(of_dense, 3)}


def measure_layers(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """A row for each arm: a model of a few layers, trained for some steps on one GPU."""
    import torch

    from benchmarks.synthetic import Language
    from benchmarks.training import batches, free_memory, model_of, single_rank, train
    from megatron_fp8rl.config import OptimConfig, RolloutConfig
    from megatron_fp8rl.trainer.policy import Policy

    first = RunConfig(
        name="experts",
        model=model_of(name, options.layers),
        precision=_LAYER_ARMS["te bf16"],
        optim=OptimConfig(lr=1e-5),
        rollout=RolloutConfig(max_tokens_per_microbatch=_LAYER_TOKENS),
        num_steps=8,
    )
    language = Language(first.model.vocab_size)
    with single_rank(first) as parallel:
        steps = batches(first, language, 8, num_sequences=_LAYER_TOKENS // 2048, length=2048)
        for arm, precision in _LAYER_ARMS.items():
            row: Row = {"measured": "layers", "model": name, "layers": first.model.num_layers, "arm": arm}
            if arm == "grouped bf16" and not first.model.is_moe or options.is_known(row):
                continue
            if _is_late(options, f"{name} {arm}"):
                continue
            policy = None
            try:
                policy = Policy.build(replace(first, precision=precision), parallel)
                train(policy, steps[:3])  # kernels compile, memory is found
                torch.cuda.reset_peak_memory_stats()
                times = []
                for step in steps[3:]:
                    started = time.perf_counter()
                    train(policy, [step])  # its loss is a number: the GPU has finished
                    times.append(time.perf_counter() - started)
                row |= {"ms": round(1e3 * statistics.median(times), 2)}
                row |= {"tokens_per_s": round(_LAYER_TOKENS / statistics.median(times))}
                row["peak_GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            except (RuntimeError, ValueError, AssertionError) as error:
                row["error"] = f"{type(error).__name__}: {error}"[:300]
            del policy
            free_memory()
            yield row


def table(rows: Sequence[Row]) -> list[Row]:
    """One line per shape and pattern, milliseconds of each arm; the fastest FP8 arm against the fastest BF16 one."""
    lines: dict[tuple, Row] = {}
    for row in rows:
        if row["measured"] == "experts" and "ms" in row:
            key = tuple(row[name] for name in ("experts", "tokens", "hidden", "width", "pattern", "device"))
            names = ("experts", "tokens", "hidden", "width", "pattern", "device")
            lines.setdefault(key, dict(zip(names, key)))[row["arm"]] = round(row["ms"], 3)
            if row["arm"] == "grouped fp8":
                lines[key]["floor"] = round(row["floor_ms"], 3)
    for line in lines.values():
        arms = {arm: line[arm] for arm in ARMS if arm in line}
        in_bf16 = [ms for arm, ms in arms.items() if arm.endswith(" bf16")]
        in_fp8 = [ms for arm, ms in arms.items() if not arm.endswith(" bf16")]
        line["bf16 : fp8"] = round(min(in_bf16) / min(in_fp8), 2) if in_bf16 and in_fp8 else None
    return list(lines.values())


def plot(rows: Sequence[Row], path: Path) -> None:
    """Milliseconds of every arm over the shapes, relative to Transformer Engine's BF16."""
    from megatron_fp8rl.observe import style

    lines = [line for line in table(rows) if line.get("te bf16")]
    with style.styled():
        figure = style.new_figure(11.0, 0.9 + 0.75 * max(2, len(lines)))
        axes = figure.subplots()
        height = 0.8 / len(ARMS)
        for index, (arm, color) in enumerate(zip(ARMS, style.CYCLE)):
            found = [(place, line["te bf16"] / line[arm]) for place, line in enumerate(lines) if line.get(arm)]
            places, speeds = [place - 0.4 + index * height for place, _ in found], [speed for _, speed in found]
            axes.barh(places, speeds, height, color=color, label=arm)
        names = ["{experts} x {hidden} x {width}, {tokens:,} tokens, {pattern}".format(**line) for line in lines]
        axes.set_yticks(range(len(lines)), names)
        axes.axvline(1.0, color=style.GREY, linewidth=0.8)
        axes.invert_yaxis()
        style.finish(axes, "Experts, forward and backward", x="speed, Transformer Engine in BF16 = 1")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=140, bbox_inches="tight")


def write_section(rows: Sequence[Row]) -> None:
    from benchmarks import record

    notes = (
        "Milliseconds, forward and backward, weights quantized in every call, gradients added to FP32 buffers. Tokens "
        "count once for each of their experts. Floor: operations of `grouped fp8` at the rate of one dense 8192-cubed "
        "product without block scales, plus its bytes at the speed of a copy, both measured in the same run."
    )
    kernels, layers, ceilings = (
        [{name: value for name, value in row.items() if name != "measured"} for row in rows if row["measured"] == what]
        for what in ("kernels", "layers", "ceilings")
    )
    parts = [record.table(part) for part in (table(rows), ceilings, kernels, layers) if part]
    record.section("experts", "Experts", "\n\n".join(parts), notes=notes)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experts", description=__doc__.split("\n")[0])
    parser.add_argument("--config", help="a configuration, whose shape is measured alone, and answered for")
    parser.add_argument("--shape", type=Shape.parse, nargs="+", default=list(SHAPES), metavar="E,T,H,F")
    parser.add_argument("--pattern", nargs="+", choices=PATTERNS, default=["balanced", "skewed"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--layers", type=int, help="train models of so many layers instead of experts alone")
    parser.add_argument("--model", nargs="+", default=list(_LAYER_MODELS), help="of --layers")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--again", action="store_true", help="measure also what --results has already")
    parser.add_argument("--budget-s", type=float, default=540.0)
    parser.add_argument("--quick", action="store_true", help="one small shape, few rounds; no rows of the table")
    parser.add_argument("--results", type=Path, default=FOLDER / "experts.jsonl")
    options = parser.parse_args(argv)
    if options.config:
        from megatron_fp8rl.cli import load_config

        options.shape = [Shape.of(load_config(options.config))]
    if options.quick:
        options.rounds, options.pattern = 5, ["skewed"]
        options.shape = options.shape if options.config else [Shape(16, 16_384, 2048, 768)]
        options.results = options.results.with_name("experts_quick.jsonl")
    options.started = time.monotonic()
    return options


def measure_all(options: argparse.Namespace, results: Results, device: str) -> None:
    """Print and keep a row for everything that ``options`` ask for."""
    options.is_known = lambda row: not (options.again or options.quick) and results.has(row | {"device": device})
    if options.layers:
        for name in options.model:
            for row in measure_layers(name, options):
                results.add(row | {"device": device})
        return
    ceilings = dense_rates() | {"copy": copy_bandwidth()}
    shown = {name: round(rate / 1e12, 3) for name, rate in ceilings.items()}
    results.add({"measured": "ceilings", "device": device} | shown)  # TFLOP/s, and TB/s
    for shape in options.shape:
        for pattern in options.pattern:
            for row in measure_experts(shape, pattern, ceilings, options):
                results.add(row | {"device": device})
        if _is_late(options, f"the kernels of {shape} by themselves"):
            continue
        try:
            for row in measure_kernels(shape, options.pattern[0], ceilings, options.rounds):
                results.add(row | {"device": device})
        except (RuntimeError, ImportError) as error:
            print(f"SKIPPED the kernels of {shape} by themselves: {error}", flush=True)
        print(verdict(results.rows(), shape, device), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    require_gpus(1, "benchmarks.experts")
    if any(arm.startswith("te ") for arm in options.arms):
        with contextlib.suppress(ImportError):
            import transformer_engine.pytorch  # noqa: F401  before PyTorch loads cuDNN
    import torch

    results = Results(options.results, KEYS)
    measure_all(options, results, torch.cuda.get_device_name())
    if not options.quick:
        write_section([row for row in results.rows() if "error" not in row])
        if not options.layers:
            plot(results.rows(), PLOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
