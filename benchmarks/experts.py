"""Does FP8 pay for the experts of my shape? Transformer Engine and grouped kernels, next to what the GPU can do.

    python -m benchmarks.experts
    python -m benchmarks.experts --config grpo_qwen3_30b_a3b
    python -m benchmarks.experts --shape 64,65536,4096,1536 --pattern equal skewed
    python -m benchmarks.experts --shape 64,65536,4096,1536 --sweep
    python -m benchmarks.experts --layers 4
    python -m benchmarks.experts --quick

Experts alone: forward and backward of all experts of a rank, with all quantization (weights too, in every call) and
FP32 gradient accumulation. In the same run one large product and a copy give the GPU's ceilings, and each kernel is
timed by itself. The floor of an arm: its operations at the rate of one large product, its bytes at the copy's.
``te`` is Transformer Engine's GroupedLinear; ``grouped`` are this library's experts, who multiply by the router's
weights. Tokens are those that the experts of a rank receive: a token counts once for each of its experts. ``--sweep``
measures one shape from 128 to 131,072 tokens, and tells from how many on which kernels are faster.

``--layers`` times so many layers of Qwen3-30B-A3B's shape, and training steps of them, with the experts and linears of
each arm: benchmarks/layers.py says what. Experts alone are their part.

Rows add up in ``--results``; the table and the plot docs/experts.png are made of all of them. Most telling first: all
shapes with the first pattern of routing, then the other patterns, then the kernels one by one. ``first_s`` is the
first call, in which kernels compile, and in no other number: DeepGEMM compiles about a dozen for a shape, and keeps
them in DG_JIT_CACHE_DIR. Processes with ``--quick --shape ...``, one for a shape, fill it on many cores beforehand.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import crossover, layers, record
from benchmarks import measured_rows as measured
from benchmarks.expert_arms import ARMS, OURS, experts, movement_calls, product_calls
from benchmarks.results import FOLDER, Results, Row, require_gpus
from benchmarks.timing import Budget, device, measure_ceilings, milliseconds, passes, runnable
from megatron_fp8rl.config import PrecisionConfig
from megatron_fp8rl.precision.matmul_shapes import Experts as Shape
from megatron_fp8rl.precision.matmul_shapes import experts_of

KEYS = ("measured", "experts", "tokens", "hidden", "width", "pattern", "arm", "what", "layers", "device")
PATTERNS = ("balanced", "equal", "skewed", "half empty", "one has all")
PLOT = Path("docs/experts.png")
DUELS = (
    crossover.fp8_against_bf16(),
    crossover.one_against("grouped fp8", "te blockwise"),
    crossover.one_against("grouped bf16", "te bf16"),
    crossover.one_against_all("grouped fp8"),
)
_BUSY = ", busy"  # columns of a GPU that has something else to do first, while the host launches ahead
_FIRST = ("grouped fp8", "te bf16", "grouped bf16", "te blockwise")  # arms that decide
_FAMILY = ("experts", "hidden", "width", "pattern", "device")  # all of a shape but its tokens
LAYER_ARMS = {
    "te bf16": PrecisionConfig(trainer="bf16", rollout="bf16", experts="te"),
    "te blockwise": PrecisionConfig(trainer="blockwise", rollout="bf16", experts="te", linears="te"),
    "grouped bf16": PrecisionConfig(trainer="bf16", rollout="bf16", experts="deep_gemm"),
    "grouped fp8": PrecisionConfig(trainer="blockwise", rollout="bf16", experts="deep_gemm", linears="deep_gemm"),
}
_LAYER_MODEL = "qwen3_30b_a3b"


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
    """Bytes that a grouped arm moves between its products, forward and backward, without the products' own.

    Weights, where they are FP8: 2 bytes of each are read and one is written, which is read and written transposed.
    Results of FP8 products are written to their tokens' places at once, those of BF16 products are copied there.
    """
    from benchmarks import moved_bytes

    num_rows = sum(-(-count // 128) * 128 for count in counts)
    trainer, wgrad = OURS[arm]
    fp8, columns = trainer != "bf16", trainer != "bf16" and wgrad == "fp8"
    operand = dict(rows=fp8, columns=columns, bf16=not columns)
    size = (shape.tokens, num_rows, shape.width)
    if fp8:
        others = 3 * shape.experts * shape.hidden * shape.width * (2 + 1 + 1 + 1)
    else:
        others = sum(moved_bytes.unpermute_bytes(shape.tokens, shape.hidden, probs=probs) for probs in (True, False))
    return others + (
        2 * moved_bytes.permute_quantize_bytes(shape.tokens, num_rows, shape.hidden, **operand)
        + moved_bytes.swiglu_quantize_bytes(*size, rows=fp8, bf16=not fp8)
        + moved_bytes.swiglu_backward_bytes(*size, activation_columns=columns, activation_bf16=not columns, **operand)
    )


def floor_ms(shape: Shape, counts: Sequence[int], arm: str, ceilings: dict[str, float]) -> float:
    """The time that a grouped arm would take at the GPU's ceilings: operations per second, and bytes per second."""
    trainer, wgrad = OURS[arm]
    operations, operands = shape.num_operations / 3, "bf16" if trainer == "bf16" else "fp8"
    seconds = 2 * operations / ceilings[operands] + operations / ceilings[wgrad]
    return 1e3 * (seconds + moved_bytes(shape, counts, arm) / ceilings["copy"])


def verdict(rows: Sequence[Row], shape: Shape, gpu: str) -> str:
    """Whether FP8 pays for a shape, in a line for each pattern that was measured on a device."""
    found = {m.pattern: m.ms for m in measured.of_shape(rows, shape) if (m.device, m.shape) == (gpu, shape)}
    answers = {pattern: measured.Answer.of(found[pattern]) for pattern in PATTERNS if pattern in found}
    lines = [f"{pattern}: {answer}" for pattern, answer in answers.items() if answer]
    return "\n".join(lines) or f"not measured on {gpu}: {shape}"


def measure_experts(
    shape: Shape, pattern: str, ceilings: dict[str, float], options: argparse.Namespace
) -> Iterator[Row]:
    """A row for each arm that has none yet."""
    import torch

    counts = token_counts(pattern, shape.tokens, shape.experts)
    for arm in options.arms:
        row = {"measured": "experts", **vars(shape), "pattern": pattern, "arm": arm}
        if options.is_known(row) or not options.budget.allows(f"{shape} {pattern} {arm}"):
            continue
        with options.budget.case():
            try:
                row |= passes(*experts(arm, counts, shape.hidden, shape.width), options.rounds)
                row["TFLOPs"] = round(shape.num_operations / row["ms"] / 1e9)
                if arm in OURS:
                    row["floor_ms"] = round(floor_ms(shape, counts, arm, ceilings), 4)
            except (RuntimeError, ValueError, ImportError, AssertionError) as error:
                row["error"] = f"{type(error).__name__}: {error}"[:300]
            torch.cuda.empty_cache()
        yield row


def measure_kernels(
    shape: Shape, pattern: str, ceilings: dict[str, float], options: argparse.Namespace
) -> Iterator[Row]:
    """A row for each kernel by itself that has none yet."""
    import torch

    from megatron_fp8rl.kernels.fused_moe import ExpertPermutation

    counts = token_counts(pattern, shape.tokens, shape.experts)
    on_device = torch.tensor(counts, device=device())
    layout = ExpertPermutation.of(on_device, shape.tokens, counts)
    base = {"measured": "kernels", **vars(shape), "pattern": pattern}

    def wanted(name: str) -> bool:
        return not options.is_known(base | {"arm": name})

    if wanted("layout"):
        ms = milliseconds(lambda: ExpertPermutation.of(on_device, shape.tokens, counts), options.rounds, busy=1.0)
        yield base | {"arm": "layout", "ms": round(ms, 4)}
    for name, call, num_bytes in movement_calls(layout, shape.hidden, shape.width, "pow2"):
        if wanted(name):
            ms = milliseconds(call, options.rounds, busy=1.0)
            speed = num_bytes / ms * 1e3
            found = {"GB/s": round(speed / 1e9), "of_copy": round(speed / ceilings["copy"], 3)}
            yield base | {"arm": name, "ms": round(ms, 4)} | found
    for name, call, num_operations in product_calls(layout, shape.hidden, shape.width):
        if wanted(name):
            ms = milliseconds(call, options.rounds, busy=1.0)
            rate = num_operations / ms * 1e3
            of_dense = rate / ceilings["fp8" if name.endswith("fp8") else "bf16"]
            yield base | {"arm": name, "ms": round(ms, 4), "TFLOPs": round(rate / 1e12), "of_dense": round(of_dense, 3)}


def table(rows: Sequence[Row]) -> list[Row]:
    """One line per shape and pattern, milliseconds of each arm, also of a busy GPU; the fastest FP8 arm against the
    fastest BF16 one."""
    lines: dict[tuple, Row] = {}
    for row in rows:
        if row["measured"] == "experts" and "ms" in row:
            key = tuple(row[name] for name in ("experts", "tokens", "hidden", "width", "pattern", "device"))
            names = ("experts", "tokens", "hidden", "width", "pattern", "device")
            line = lines.setdefault(key, dict(zip(names, key)))
            line[row["arm"]] = round(row["ms"], 3)
            if "busy_ms" in row:
                line[row["arm"] + _BUSY] = round(row["busy_ms"], 3)
            if row["arm"] == "grouped fp8":
                line["floor"] = round(row["floor_ms"], 3)
    for line in lines.values():
        for kind in ("", _BUSY):
            arms = {arm: line[arm + kind] for arm in ARMS if arm + kind in line}
            in_bf16 = [ms for arm, ms in arms.items() if arm.endswith(" bf16")]
            in_fp8 = [ms for arm, ms in arms.items() if not arm.endswith(" bf16")]
            line["bf16 : fp8" + kind] = round(min(in_bf16) / min(in_fp8), 2) if in_bf16 and in_fp8 else None
    return list(lines.values())


def sweeps(rows: Sequence[Row]) -> list[crossover.Sweep]:
    """Shapes that were measured with several numbers of tokens."""
    return crossover.sweeps(rows, "experts", _FAMILY)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Speeds of every arm: curves for sweeps, bars for other shapes."""
    found, label = sweeps(rows), "{experts} x {hidden} x {width}, {pattern}"
    curves = [(label.format(**sweep.fields) + ", {device}".format(**sweep.fields), sweep) for sweep in found]
    swept = {tuple(sweep.fields.values()) for sweep in found}
    alone = [line for line in table(rows) if tuple(line[name] for name in _FAMILY) not in swept]
    bars = [((label + ", {tokens:,} tokens, {device}").format(**line), line) for line in alone]
    crossover.plot(path, "Experts, forward and backward", bars, curves, ARMS, "routed tokens of a rank")


def write_section(rows: Sequence[Row]) -> None:
    notes = (
        "Milliseconds, forward and backward, weights quantized in every call, gradients added to FP32 buffers. Tokens "
        "count once for each of their experts. Floor: operations of `grouped fp8` at the rate of one dense 8192-cubed "
        "product without block scales, plus its bytes at the speed of a copy, both measured in the same run. Where one "
        "is faster than the other is told in routed tokens of a rank, of those that were measured. Busy: behind other "
        "work of the GPU, as in a step whose launches are ahead; the other times contain the host's. " + layers.NOTES
    )
    kernels, ceilings = (
        [{name: value for name, value in row.items() if name != "measured"} for row in rows if row["measured"] == what]
        for what in ("kernels", "ceilings")
    )
    crossovers = crossover.lines(sweeps(rows), DUELS)
    parts = [record.table(part) for part in (table(rows), crossovers, ceilings, kernels, layers.table(rows)) if part]
    record.section("experts", "Experts", "\n\n".join(parts), notes=notes)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experts", description=__doc__.split("\n")[0])
    parser.add_argument("--config", help="a configuration, whose shape is measured alone, and answered for")
    parser.add_argument("--shape", type=parse_shape, nargs="+", default=[], metavar="E,T,H,F")
    parser.add_argument("--sweep", action="store_true", help="the first shape with 128 to 131,072 tokens")
    parser.add_argument("--pattern", nargs="+", choices=PATTERNS, help="of routing; default: balanced skewed")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--layers", type=int, help="time so many layers, and steps that train them, instead")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--again", action="store_true", help="measure also what --results has already")
    parser.add_argument("--budget-s", type=float, default=540.0)
    parser.add_argument("--quick", action="store_true", help="one small shape, few rounds; no rows of the table")
    parser.add_argument("--results", type=Path, default=FOLDER / "experts.jsonl")
    options = parser.parse_args(argv)
    if options.config:
        from megatron_fp8rl.cli import load_config

        if (shape := experts_of(load_config(options.config))) is None:
            parser.error(f"--config {options.config}: the model is dense. python -m benchmarks.linears answers for it")
        options.shape = [shape]
    if options.quick:
        options.rounds, options.pattern, options.budget_s = 5, ["skewed"], min(options.budget_s, 80.0)
        options.shape = options.shape or [Shape(16, 16_384, 2048, 768)]
        options.results = options.results.with_name("experts_quick.jsonl")
    options.shape = options.shape or list(SHAPES)
    if options.sweep:
        options.shape = [replace(options.shape[0], tokens=tokens) for tokens in crossover.SWEEP]
    options.pattern = options.pattern or (["balanced"] if options.sweep else ["balanced", "skewed"])
    options.arms.sort(key=lambda arm: _FIRST.index(arm) if arm in _FIRST else len(_FIRST))
    options.budget = Budget(options.budget_s)
    return options


def measure_all(options: argparse.Namespace, results: Results, gpu: str) -> None:
    """Print and keep a row for everything that ``options`` ask for."""
    options.is_known = lambda row: not (options.again or options.quick) and results.has(row | {"device": gpu})
    if options.layers:
        for row in layers.measure(_LAYER_MODEL, LAYER_ARMS, options):
            results.add(row | {"device": gpu})
        print(*layers.told(results.rows()), sep="\n", flush=True)
        return
    ceilings = measure_ceilings(results, gpu)
    for pattern in options.pattern:
        for shape in options.shape:
            for row in measure_experts(shape, pattern, ceilings, options):
                results.add(row | {"device": gpu})
    for shape in options.shape if not options.sweep else ():
        if not any(arm in OURS for arm in options.arms) or not options.budget.allows(f"the kernels of {shape}"):
            continue
        try:
            for row in measure_kernels(shape, options.pattern[0], ceilings, options):
                results.add(row | {"device": gpu})
        except (RuntimeError, ValueError, ImportError) as error:
            print(f"SKIPPED the kernels of {shape} by themselves: {error}", flush=True)
    for shape in options.shape:
        print(f"{shape} on {gpu}:", verdict(results.rows(), shape, gpu), sep="\n", flush=True)
    for line in crossover.lines(sweeps(results.rows()), DUELS):
        print(crossover.told(line), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    require_gpus(1, "benchmarks.experts")
    options.arms = runnable(options.arms)
    if any(arm.startswith("te ") for arm in options.arms):
        with contextlib.suppress(ImportError):
            import transformer_engine.pytorch  # noqa: F401  before PyTorch loads cuDNN
    import torch

    results = Results(options.results, KEYS)
    measure_all(options, results, torch.cuda.get_device_name())
    if not options.quick:
        with record.turn():
            write_section([row for row in results.rows() if "error" not in row])
            if not options.layers:
                plot(results.rows(), PLOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
