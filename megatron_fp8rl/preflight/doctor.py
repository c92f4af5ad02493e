"""``python -m megatron_fp8rl doctor CONFIG``: can this run work, on which GPUs, and what would fix it?

Needs neither a GPU nor torch, and starts nothing. Exit status 0: fine; 1: warnings; 2: the run cannot work. Out: text
for people or JSON for programs.
"""

import dataclasses
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.envs.source_kind import is_supervised
from megatron_fp8rl.observe.display import text_table
from megatron_fp8rl.precision.formats import rollout_format, trainer_format
from megatron_fp8rl.preflight import rules, tiling
from megatron_fp8rl.preflight.assessment import DoctorOptions
from megatron_fp8rl.preflight.data_check import look_at_data
from megatron_fp8rl.preflight.diagnosis import Diagnosis, diagnose
from megatron_fp8rl.preflight.engine_memory import EngineEstimate
from megatron_fp8rl.preflight.memory import GIB, Estimate, host_bytes

WIDTH = 118
_COLORS = {  # ANSI codes by pattern
    r"^  error:|does not tile|differs?$|^This run cannot work.*": 31,
    r"^  warning:|^This run can work; .*": 33,
    r"^  note:": 36,
    r"^This run can work\.|^ +\$ .*": 32,
    r"^\S.*(?=\n  )": 1,
}
_VERDICTS = ("This run can work.", "This run can work; look at the warnings.", "This run cannot work.")


def run(cfg: RunConfig, options: DoctorOptions, config_name: str, overrides: Sequence[str]) -> int:
    if problems := options.problems():
        print("\n".join(f"python -m megatron_fp8rl doctor: {problem}" for problem in problems), file=sys.stderr)
        return 2
    diagnosis = diagnose(cfg, options, config_name=config_name, overrides=overrides)
    lines: list[str] = []
    if options.data and not rules.check(cfg, accelerator=diagnosis.gpu.generation):
        lines, findings = look_at_data(cfg)
        diagnosis = dataclasses.replace(diagnosis, findings=(*findings, *diagnosis.findings))
    if options.json:
        print(to_json(diagnosis))
    else:
        report = _colored(plain(diagnosis)) if sys.stdout.isatty() else plain(diagnosis)
        print("\n".join([*lines, "", report] if lines else [report]))
    return diagnosis.status


@dataclass(frozen=True)
class Table:
    """Text in columns; numbers are right-aligned."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    right: frozenset[int] = frozenset()  # columns of numbers
    notes: tuple[str, ...] = ()  # lines below


def tables(diagnosis: Diagnosis) -> list[Table]:
    memory = []
    if diagnosis.trainer is not None:
        memory = [_memory(diagnosis.trainer)]
    if diagnosis.engine is not None:
        memory.append(_memory(diagnosis.engine.estimate, _cache_line(diagnosis.engine)))
    optional = ((diagnosis.phases, _phases), (diagnosis.matrices, _tiling))
    return [*memory, *(table(diagnosis) for rows, table in optional if rows), _packages(diagnosis)]


def headline(diagnosis: Diagnosis) -> str:
    def short(number: int) -> str:
        return f"{number / 1e9:.2f} B" if number >= 1e8 else f"{number / 1e6:.2f} M"

    cfg, gpu, parameters, parallel = diagnosis.cfg, diagnosis.gpu, diagnosis.parameters, diagnosis.cfg.parallel
    lines = []
    if parameters is not None:
        active = f", {short(parameters.active)} active for a token" if cfg.model.is_moe else ""
        total = f"{parameters.total:,} parameters ({short(parameters.total)})"
        lines.append(f"{cfg.name}: {cfg.model.family}, {total}{active}")
    names = {"TP": "tensor", "PP": "pipeline", "VP": "virtual_stages", "CP": "context", "EP": "expert"}
    degrees = {short: getattr(parallel, name) for short, name in (names | {"ETP": "expert_tensor"}).items()}
    layout = " ".join(f"{short}{degree}" for short, degree in degrees.items() if degree > 1) or "data parallel"
    with_ = "and, in turns," if cfg.engine.placement == "colocated" else "+"
    engines = "" if is_supervised(cfg) else f" {with_} engines {cfg.engine.num_replicas} x {cfg.engine.ranks}"
    lines.append(
        f"trainer {parallel.world_size} ({layout}){engines} = "
        f"{diagnosis.num_gpus} {gpu.name.upper()} of {gpu.memory_bytes / GIB:.1f} GiB"
    )
    return "\n".join(lines)


def _memory(estimate: Estimate, *notes: str) -> Table:
    rows = [(part.name, f"{part.num_bytes / GIB:.2f}", part.formula) for part in estimate.parts if part.num_bytes]
    total = f"{estimate.share:.0%} of {estimate.capacity_bytes / GIB:.1f} GiB"
    if estimate.turns:
        total += "; " + " and ".join(", ".join(p.name for p in estimate.parts if p.name in t) for t in estimate.turns)
        total += " take turns"
    rows.append(("total", f"{estimate.total_bytes / GIB:.2f}", total))
    return Table(f"Memory per GPU: {estimate.title}", ("part", "GiB", "how"), rows, frozenset({1}), notes)


def _phases(diagnosis: Diagnosis) -> Table:
    def gib(estimate: Estimate, whose: str = "") -> str:
        parts = estimate.of({part.name for part in estimate.parts if part.name.startswith(whose)})
        return f"{parts.total_bytes / GIB:.2f}"

    assert diagnosis.trainer is not None and diagnosis.engine is not None
    host = host_bytes(diagnosis.cfg, diagnosis.trainer, diagnosis.engine.estimate)
    offload = ", ".join(diagnosis.cfg.optim.offload) or "nothing"
    note = f"engine.sleep_level {diagnosis.cfg.engine.sleep_level}; the trainer offloads {offload}: "
    note += f"{host / GIB:.1f} GiB of host memory for each GPU"
    return Table(
        "Memory per GPU that trainer and engine share",
        ("phase", "trainer GiB", "engine GiB", "total GiB", "of the GPU"),
        [(e.title, gib(e, "trainer"), gib(e, "engine"), gib(e), f"{e.share:.0%}") for e in diagnosis.phases],
        frozenset({1, 2, 3, 4}),
        (note,),
    )


def _tiling(diagnosis: Diagnosis) -> Table:
    def shown(shape: tuple[int, ...], tiles: bool, tile: int) -> str:
        if tile == 1:
            return "BF16"
        return " x ".join(map(str, shape)) + ("" if tiles else "  does not tile")

    def degrees(values: tuple[int, ...], option: str) -> str:
        return ", ".join(map(str, values)) if option else "any: not divided"

    rows = [
        (
            matrix.name,
            f"{matrix.count:,}",
            " x ".join(map(str, matrix.shape)),
            shown(matrix.trainer_shape, matrix.trainer_tiles, matrix.trainer_tile),
            degrees(matrix.trainer_degrees, matrix.trainer_option),
            shown(matrix.engine_shape, matrix.engine_tiles, matrix.engine_tile),
            degrees(matrix.engine_degrees, matrix.trainer_option),
        )
        for matrix in diagnosis.matrices
    ]
    precision = diagnosis.cfg.precision
    tiles = f"trainer {trainer_format(precision).tile}, engine {rollout_format(precision).tile}"
    common = tiling.common_degrees(diagnosis.matrices)
    return Table(
        f"FP8 matrices (tiles: {tiles}), and the degrees that tile up to 64",
        ("matrix", "number", "shape", "trainer rank", "its degrees", "engine worker", "engine.tensor"),
        rows,
        frozenset({1}),
        tuple(f"every matrix tiles at {option} {', '.join(map(str, n)) or 'none'}" for option, n in common.items()),
    )


def _packages(diagnosis: Diagnosis) -> Table:
    listed = [package for package in diagnosis.packages if package.state != "ok"]
    rows = [(p.name, p.wanted, p.installed or "-", p.shown_state, p.extra or "core") for p in listed]
    note = f"{len(diagnosis.packages) - len(listed)} others are installed as wanted"
    columns = ("package", "wanted", "installed", "", "for")
    return Table("Packages in this environment", columns, rows, notes=(note,))


def plain(diagnosis: Diagnosis) -> str:
    """The report as text without control characters."""
    texts = ["\n".join([plain_table(table), *(f"  {line}" for line in table.notes)]) for table in tables(diagnosis)]
    findings = "\n".join(["Findings", *_finding_lines(diagnosis)])
    return "\n\n".join([headline(diagnosis), *texts, findings, _VERDICTS[diagnosis.status]])


def _cache_line(engine: EngineEstimate) -> str:
    return (
        f"the KV cache of a replica holds {engine.kv_tokens:,} tokens, or {engine.full_sequences:.0f} sequences of "
        f"full length ({engine.max_sequence_tokens:,} tokens); at most {engine.num_sequences} are decoded at once"
    )


def plain_table(table: Table) -> str:
    lines = text_table([table.columns, *table.rows], table.right)
    return "\n".join([table.title, *(f"  {line}" for line in lines)])


def wrapped(line: str) -> str:
    return textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)


def _finding_lines(diagnosis: Diagnosis) -> Iterable[str]:
    if not diagnosis.findings:
        yield "  none"
    for finding in diagnosis.findings:
        remedy = f" {finding.remedy}." if finding.remedy else ""
        yield wrapped(f"{finding.severity}: {finding.subject}: {finding.problem}.{remedy}")
        if finding.command:
            yield f"      $ {finding.command}"
    if diagnosis.command:
        yield f"  with this change the run can work:\n      $ {diagnosis.command}"
    elif diagnosis.tried:
        yield wrapped(f"No automatic fix found. Tried: {diagnosis.tried}.")


def _colored(text: str) -> str:
    """The report with colors of a terminal: severities, verdict, and what does not agree."""
    for pattern, color in _COLORS.items():
        text = re.sub(pattern, f"\x1b[{color}m\\g<0>\x1b[0m", text, flags=re.MULTILINE)
    return text


def to_json(diagnosis: Diagnosis) -> str:
    """The whole report as one JSON object; sizes in bytes."""
    engine = diagnosis.engine
    content: dict[str, Any] = {
        "name": diagnosis.cfg.name,
        "status": diagnosis.status,
        "gpu": dataclasses.asdict(diagnosis.gpu),
        "num_gpus": diagnosis.num_gpus,
        "parameters": dataclasses.asdict(diagnosis.parameters) if diagnosis.parameters else None,
        "memory": {
            end: {"total_bytes": estimate.total_bytes, **dataclasses.asdict(estimate)}
            for end, estimate in (("trainer", diagnosis.trainer), ("engine", engine and engine.estimate))
            if estimate is not None
        },
        "phases": [{"total_bytes": e.total_bytes, **dataclasses.asdict(e)} for e in diagnosis.phases],
        "kv_cache": engine
        and {
            "bytes": engine.kv_bytes,
            "token_bytes": engine.kv_token_bytes,
            "tokens": engine.kv_tokens,
            "full_sequences": engine.full_sequences,
        },
        "matrices": [dataclasses.asdict(matrix) for matrix in diagnosis.matrices],
        "packages": [{**dataclasses.asdict(p), "state": p.state} for p in diagnosis.packages],
        "findings": [dataclasses.asdict(finding) for finding in diagnosis.findings],
        "command": diagnosis.command,
        "tried": diagnosis.tried,
    }
    return json.dumps(content, indent=2, default=sorted)  # sets of names
