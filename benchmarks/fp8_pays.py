"""Does FP8 pay for the shapes of a run? Quoted from rows that a GPU has measured, for experts and for other linears.

    python -m benchmarks.fp8_pays CONFIG [--gpu h200] [--field value ...]

Each answer is a note. It names the GPU, the shape and the number of tokens that were measured, which is the one nearest
to the run's; of experts that were measured in other numbers alone, the one nearest in the tokens of each. And it names
the command that measures it.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from benchmarks import measured_rows as measured
from benchmarks.measured_rows import Answer, Measured
from benchmarks.record import Row
from megatron_fp8rl import cli
from megatron_fp8rl.config import FP8_BLOCK, RunConfig
from megatron_fp8rl.precision.hardware import Hardware
from megatron_fp8rl.precision.kernel_choice import TABLE, Field, KernelChoice
from megatron_fp8rl.precision.matmul_shapes import Experts, Linear, Use, experts_of, linears_of
from megatron_fp8rl.preflight.findings import Finding

_OURS = {"experts": "grouped fp8", "linears": "ours deep_gemm"}  # begin the names of DeepGEMM's arms


def findings(cfg: RunConfig, gpu: str, rows: Mapping[str, Sequence[Row]] | None = None) -> list[Finding]:
    """A note on experts, if there are any, and one on linears. ``gpu`` is a word of the name of the GPU that is meant;
    ``rows`` are those of each benchmark, by default what :func:`measured.rows` finds."""
    rows = rows if rows is not None else {name: measured.rows(name) for name in ("experts", "linears")}
    experts, linears = experts_of(cfg), linears_of(cfg)
    found = [_of_experts(cfg, experts, gpu, rows["experts"])] if experts else []
    return [*found, _of_linears(cfg, linears, gpu, rows["linears"])] if linears else found


def _of_experts(cfg: RunConfig, shape: Experts, gpu: str, rows: Sequence[Row]) -> Finding:
    arms = _arms(cfg, "experts")
    found = measured.nearest(rows, shape, gpu, arms) or measured.nearest_of_others(rows, shape, gpu, arms)
    if found is None:
        return _unknown("experts", f"{shape.experts} experts of {shape.hidden} x {shape.width}", gpu, [shape])
    answer = Answer.of(found.ms)
    assert answer is not None  # nearest() looks for rows that have one
    of_others = f" where the run has {shape.experts}" if found.shape.experts != shape.experts else ""
    where = f"{found.shape.experts} experts of {shape.hidden} x {shape.width}{of_others}, "
    where += _tokens([found], [shape], "routed tokens")
    return _known("experts", answer, f"{where}, {found.pattern}", cfg, gpu, [found])


def _of_linears(cfg: RunConfig, uses: Sequence[Use], gpu: str, rows: Sequence[Row]) -> Finding:
    """All of a model together, each as often as there are layers that have it, on the device that has the most."""
    shapes, arms = list(dict.fromkeys(use.shape for use in uses)), _arms(cfg, "linears")
    best: dict[Linear, Measured] = {}
    devices = {row["device"] for row in rows if "device" in row}
    for device in sorted(devices, key=lambda name: (not measured.is_of(gpu, name), name)):
        own = [row for row in rows if row.get("device") == device]
        known = {shape: found for shape in shapes if (found := measured.nearest(own, shape, gpu, arms))}
        best = max(best, known, key=len)  # the first of equals
    missing = [shape for shape in shapes if shape not in best]
    if missing:
        return _unknown("linears", f"{len(missing)} of {len(shapes)} shapes of this run", gpu, missing)
    ms = {shape: _with_rest(found) for shape, found in best.items()}
    shared = set.intersection(*map(set, ms.values()))
    total = {arm: sum(use.num_layers * ms[use.shape][arm] for use in uses) for arm in shared}
    if (answer := Answer.of(total)) is None:
        return _unknown("linears", "kernels that all shapes were timed with", gpu, shapes)
    tokens = _tokens(list(best.values()), shapes, "tokens")
    where = f"the linears of {cfg.model.num_layers} layers, {tokens}"
    return _known("linears", answer, where, cfg, gpu, list(best.values()))


def _with_rest(found: Measured) -> Mapping[str, float]:
    """Times by arm; a matrix that DeepGEMM does not multiply takes Transformer Engine's also under its name."""
    is_whole = not (found.shape.rows % FP8_BLOCK or found.shape.columns % FP8_BLOCK)
    rest = found.ms.get("ours te blockwise")
    return found.ms if is_whole or rest is None else {**found.ms, _OURS["linears"]: rest}


def _arms(cfg: RunConfig, kind: Field) -> Callable[[str], bool]:
    """FP8 arms that the run can have: those of its recipe; in BF16 those of blockwise, which engines share."""
    recipe = "blockwise" if cfg.precision.trainer == "bf16" else cfg.precision.trainer
    te = "ours te blockwise" if (kind, recipe) == ("linears", "blockwise") else f"te {recipe}"
    asked, deep_gemm = replace(cfg.precision, trainer=recipe), TABLE[f"trainer.{kind}"].kernels["deep_gemm"]
    wrong = deep_gemm.supports(replace(cfg, precision=asked), Hardware("hopper"))
    has_ours = recipe == "blockwise" and wrong is None
    return lambda arm: arm == te or (has_ours and arm.startswith(_OURS[kind]))


def _known(kind: Field, answer: Answer, where: str, cfg: RunConfig, gpu: str, found: Sequence[Measured]) -> Finding:
    fastest = "deep_gemm" if answer.fp8.startswith(_OURS[kind]) else "te"
    is_other = not measured.is_of(gpu, found[0].device)  # whose fastest kernels this one may not have
    chosen = getattr(KernelChoice.of(cfg, Hardware("hopper")).trainer, kind)
    is_chosen = cfg.precision.trainer == "bf16" or is_other or chosen == fastest
    return Finding(
        severity="note", subject=f"FP8 for {kind}", problem=f"{answer} ({where}, {found[0].device})",
        remedy="" if is_chosen else f"The faster kernels are --precision.{kind} {fastest}",
        command=_command(kind, [m.shape for m in found], {m.pattern for m in found} - {""}),
    )  # fmt: skip


def _unknown(kind: str, what: str, gpu: str, shapes: Sequence[Experts | Linear]) -> Finding:
    return Finding(
        severity="note", subject=f"FP8 for {kind}", problem=f"whether it pays was not measured: {what}",
        remedy=f"Measure it on one {gpu.upper()}, in a working tree", command=_command(kind, shapes),
    )  # fmt: skip


def _tokens(found: Sequence[Measured], shapes: Sequence[Experts | Linear], unit: str) -> str:
    """The numbers of tokens that were measured, and the run's own where they differ."""
    timed = sorted({m.shape.tokens for m in found})
    own = sorted({shape.tokens for shape in shapes})
    text = f"{measured.span(timed)} {unit}"
    return text if timed == own else f"{text} where the run has {measured.span(own)}"


def _command(kind: str, shapes: Sequence[Experts | Linear], patterns: set[str] = frozenset()) -> str:
    words = ["python", "-m", f"benchmarks.{kind}", "--shape", *dict.fromkeys(map(text_of, shapes))]
    return shlex.join([*words, "--pattern", *sorted(patterns)] if patterns else words)


def text_of(shape: Experts | Linear) -> str:
    """A shape as the benchmarks' ``--shape`` takes it."""
    if isinstance(shape, Experts):
        return f"{shape.experts},{shape.tokens},{shape.hidden},{shape.width}"
    return f"{shape.tokens},{shape.rows},{shape.columns}" + (",mlp" if shape.what == "mlp" else "")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the notes of one configuration."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fp8_pays", description="does FP8 pay for a run?")
    parser.add_argument("config", help="a function of model_configs/, or module:function")
    parser.add_argument("--gpu", default="h200", help="a word of the name of the GPU that is meant")
    options, overrides = parser.parse_known_args(argv)
    for note in findings(cli.parse_overrides(cli.load_config(options.config), overrides), options.gpu):
        remedy = f" {note.remedy}." if note.remedy else ""
        print(f"{note.subject}: {note.problem}.{remedy}\n    $ {note.command}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
