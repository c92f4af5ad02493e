"""Does FP8 pay for the linears of my shape? Transformer Engine and DeepGEMM, next to what the GPU can do.

    python -m benchmarks.linears
    python -m benchmarks.linears --config grpo_qwen3_8b
    python -m benchmarks.linears --shape 16384,6144,4096 16384,4096,12288,mlp --arms "te blockwise" "ours deep_gemm"
    python -m benchmarks.linears --shape 16384,4096,12288,mlp --sweep
    python -m benchmarks.linears --layers 4
    python -m benchmarks.linears --quick

Linears alone: forward and backward of one linear, or of a feed-forward part (gate, up, down and SwiGLU between them),
with all quantization (weights too, in every call) and FP32 gradient accumulation. ``te`` is Transformer Engine's own
module; ``ours te`` are its kernels as the trainer calls them (trainer/model/linear_te.py), ``ours deep_gemm`` is
trainer/model/linear_deep_gemm.py, ``ours deep_gemm, apart`` the same linears with SwiGLU by PyTorch. In the same run one large
product and a copy give the GPU's ceilings, and each kernel of DeepGEMM's path is timed by itself. ``--sweep`` measures
one shape from 128 to 131,072 tokens, and tells from how many on which kernels are faster.

``--layers`` times so many layers of Qwen3-8B's shape, and training steps of them: benchmarks/layers.py says what. BF16
linears are Megatron-Core's own.

Rows add up in ``--results``; the table and the plot docs/linears.png are made of all of them. Most telling first: all
shapes, then the kernels one by one. ``first_s`` is the first call, in which kernels compile, and in no other number.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import crossover, fp8_pays, layers, record
from benchmarks import measured_rows as measured
from benchmarks.linear_arms import APART, ARMS, calls, kernel_calls
from benchmarks.results import FOLDER, Results, Row, require_gpus
from benchmarks.timing import Budget, measure_ceilings, milliseconds, passes, runnable
from megatron_fp8rl.config import PrecisionConfig
from megatron_fp8rl.precision.matmul_shapes import Linear as Shape
from megatron_fp8rl.precision.matmul_shapes import linears_of

KEYS = ("measured", "what", "tokens", "rows", "columns", "arm", "layers", "device")
PLOT = Path("docs/linears.png")
DUELS = (
    crossover.fp8_against_bf16(),
    crossover.one_against("ours deep_gemm", "ours te blockwise"),
    crossover.one_against_all("ours deep_gemm"),
)
_FIRST = ("ours deep_gemm", "ours te blockwise", "te bf16", "te blockwise")  # arms that decide
_FAMILY = ("what", "rows", "columns", "device")  # all of a shape but its tokens
LAYER_ARMS = {
    "bf16": PrecisionConfig(trainer="bf16", rollout="bf16"),
    "te blockwise": PrecisionConfig(trainer="blockwise", rollout="bf16", linears="te"),
    "te delayed": PrecisionConfig(trainer="delayed", rollout="bf16", linears="te"),
    "deep_gemm": PrecisionConfig(trainer="blockwise", rollout="bf16", linears="deep_gemm"),
}
_LAYER_MODEL = "qwen3_8b"
_TOKENS = layers.TOKENS


def parse_shape(text: str) -> Shape:
    """``tokens,rows,columns``, and ``mlp`` behind them for a feed-forward part."""
    numbers, is_mlp = text.removesuffix(",mlp").split(","), text.endswith(",mlp")
    sizes = [int(word) for word in numbers if word.isdecimal()]
    if len(sizes) != 3 or len(numbers) != 3 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a shape is tokens,rows,columns or tokens,hidden,width,mlp")
    return Shape("mlp" if is_mlp else "linear", *sizes)


SHAPES = (
    Shape("linear", _TOKENS, 6_144, 4_096),  # Qwen3-8B: q, k and v
    Shape("linear", _TOKENS, 4_096, 4_096),  # o
    Shape("linear", _TOKENS, 24_576, 4_096),  # gate and up
    Shape("linear", _TOKENS, 4_096, 12_288),  # down
    Shape("mlp", _TOKENS, 4_096, 12_288),
    Shape("linear", _TOKENS, 5_120, 2_048),  # Qwen3-30B-A3B: q, k and v
    Shape("linear", _TOKENS, 2_048, 4_096),  # o
)


def measure_linears(shape: Shape, ceilings: dict[str, float], options: argparse.Namespace) -> Iterator[Row]:
    """A row for each arm that has none yet."""
    import torch

    for arm in options.arms:
        row = {"measured": "linears", **vars(shape), "arm": arm}
        if arm == APART and shape.what != "mlp" or options.is_known(row):
            continue
        if not options.budget.allows(f"{shape} {arm}"):
            continue
        with options.budget.case():
            try:
                row |= passes(*calls(arm, shape), options.rounds)
                rate = shape.num_operations / row["ms"] * 1e3
                ceiling = ceilings["bf16" if arm.endswith("bf16") else "fp8"]
                row |= {"TFLOPs": round(rate / 1e12), "of_dense": round(rate / ceiling, 3)}
            except (RuntimeError, ValueError, ImportError, AssertionError) as error:
                row["error"] = f"{type(error).__name__}: {error}"[:300]
            torch.cuda.empty_cache()
        yield row


def measure_kernels(shape: Shape, ceilings: dict[str, float], options: argparse.Namespace) -> Iterator[Row]:
    """A row for each kernel of DeepGEMM's path that has none yet."""
    for name, call, operations, num_bytes in kernel_calls(shape):
        row = {"measured": "kernels", **vars(shape), "arm": name}
        if options.is_known(row):
            continue
        ms = milliseconds(call, options.rounds, busy=1.0)
        row["ms"] = round(ms, 4)
        if operations:
            rate = operations / ms * 1e3
            ceiling = ceilings["bf16" if "BF16" in name else "fp8"]
            row |= {"TFLOPs": round(rate / 1e12), "of_dense": round(rate / ceiling, 3)}
        else:
            speed = num_bytes / ms * 1e3
            row |= {"GB/s": round(speed / 1e9), "of_copy": round(speed / ceilings["copy"], 3)}
        yield row


def table(rows: Sequence[Row]) -> list[Row]:
    """One line per shape: milliseconds of each arm, and how much faster DeepGEMM is than BF16 and TE's blockwise."""
    lines: dict[tuple, Row] = {}
    for row in rows:
        if row["measured"] == "linears" and "ms" in row:
            names = ("what", "tokens", "rows", "columns", "device")
            key = tuple(row[name] for name in names)
            lines.setdefault(key, {name: row[name] for name in names})[row["arm"]] = row["ms"]
    for line in lines.values():
        ours = line.get("ours deep_gemm")
        for recipe in ("bf16", "blockwise"):
            theirs = line.get(f"te {recipe}")
            line[f"{recipe} : ours"] = round(theirs / ours, 2) if ours and theirs else None
    return list(lines.values())


def verdict(rows: Sequence[Row], shape: Shape, gpu: str) -> str:
    """Whether FP8 pays for a shape, in one line."""
    found = [m.ms for m in measured.of_shape(rows, shape) if (m.device, m.shape) == (gpu, shape)]
    answer = measured.Answer.of(found[0]) if found else None
    return f"{_label(vars(shape))}: {answer or f'not measured on {gpu}'}"


def _label(fields: dict[str, Any]) -> str:
    """A shape in words, of a row or a sweep."""
    words = ["{what} {rows} x {columns}".format(**fields)]
    words += [f"{fields['tokens']:,} tokens"] if "tokens" in fields else []
    return ", ".join([*words, fields["device"]] if "device" in fields else words)


def sweeps(rows: Sequence[Row]) -> list[crossover.Sweep]:
    """Shapes that were measured with several numbers of tokens."""
    return crossover.sweeps(rows, "linears", _FAMILY)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Speeds of every arm: curves for sweeps, bars for other shapes."""
    found = sweeps(rows)
    swept = {tuple(sweep.fields.values()) for sweep in found}
    alone = [line for line in table(rows) if tuple(line[name] for name in _FAMILY) not in swept]
    bars = [(_label(line), line) for line in alone]
    curves = [(_label(dict(sweep.fields)), sweep) for sweep in found]
    crossover.plot(path, "Linears, forward and backward", bars, curves, ARMS, "tokens of a rank")


def write_section(rows: Sequence[Row]) -> None:
    notes = (
        "Milliseconds, forward and backward; of linears with weights quantized in every call, gradients added to FP32 "
        "buffers. `of_dense` is the share of one 8192-cubed product's rate in the same type, FP8 without block scales; "
        "`of_copy` that of a copy's speed, both measured in the same run. Where one is faster than the other is told "
        "in tokens of a rank, of those that were measured. " + layers.NOTES
    )
    parts = [table(rows), crossover.lines(sweeps(rows), DUELS), layers.table(rows)]
    parts += [
        [{name: value for name, value in row.items() if name != "measured"} for row in rows if row["measured"] == what]
        for what in ("kernels", "ceilings")
    ]
    record.section("linears", "Dense linears", "\n\n".join(record.table(part) for part in parts if part), notes=notes)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linears", description=__doc__.split("\n")[0])
    parser.add_argument("--config", help="a configuration, whose shapes are measured alone, and answered for")
    parser.add_argument("--shape", type=parse_shape, nargs="+", default=[], metavar="T,N,K[,mlp]")
    parser.add_argument("--sweep", action="store_true", help="the largest shape with 128 to 131,072 tokens")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--layers", type=int, help="time so many layers, and steps that train them, instead")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--again", action="store_true", help="measure also what --results has already")
    parser.add_argument("--budget-s", type=float, default=540.0)
    parser.add_argument("--quick", action="store_true", help="two shapes, few rounds; no rows of the table")
    parser.add_argument("--results", type=Path, default=FOLDER / "linears.jsonl")
    options = parser.parse_args(argv)
    if options.config:
        from megatron_fp8rl.cli import load_config

        options.config = load_config(options.config)
        options.shape = list(dict.fromkeys(use.shape for use in linears_of(options.config)))
        if not options.shape:
            parser.error("--config: precision.bf16_first_layers and bf16_last_layers leave FP8 no layer; lower them")
    if options.quick:
        options.rounds, options.budget_s = 5, min(options.budget_s, 80.0)
        options.shape = options.shape or [SHAPES[2], SHAPES[4]]
        options.results = options.results.with_name("linears_quick.jsonl")
    options.shape = options.shape or list(SHAPES)
    if options.sweep:
        largest = max(options.shape, key=lambda shape: shape.num_operations)
        options.shape = [replace(largest, tokens=tokens) for tokens in crossover.SWEEP]
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
    for shape in options.shape:
        for row in measure_linears(shape, ceilings, options):
            results.add(row | {"device": gpu})
    alone = [shape for shape in options.shape if shape.what == "linear" and not options.sweep]
    for shape in alone if "ours deep_gemm" in options.arms else ():
        if not options.budget.allows(f"the kernels of {shape}"):
            continue
        try:
            for row in measure_kernels(shape, ceilings, options):
                results.add(row | {"device": gpu})
        except (RuntimeError, ValueError, ImportError) as error:
            print(f"SKIPPED the kernels of {shape} by themselves: {error}", flush=True)
    print(f"on {gpu}:", *(verdict(results.rows(), shape, gpu) for shape in options.shape), sep="\n", flush=True)
    if options.config:
        note = fp8_pays.findings(options.config, gpu, {"experts": [], "linears": results.rows()})[-1]
        print(f"{options.config.name}, {note.subject}: {note.problem}", flush=True)
    for line in crossover.lines(sweeps(results.rows()), DUELS):
        print(crossover.told(line), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    require_gpus(1, "benchmarks.linears")
    options.arms = runnable(options.arms)
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
