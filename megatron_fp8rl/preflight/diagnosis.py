"""Everything that the doctor knows of one run: counts, memory, tiles, precision, packages, and what to do.

In: a RunConfig, the GPUs that it is meant for. Out: a :class:`Diagnosis`. Runs on any machine, needs neither a GPU nor
torch, and takes well under a second.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from operator import attrgetter
from typing import Any

from megatron_fp8rl.config import RunConfig, Violation
from megatron_fp8rl.preflight import (
    colocated,
    engine_memory,
    packages,
    pays,
    precision_table,
    repair,
    rules,
    tiling,
    trainer_memory,
)
from megatron_fp8rl.preflight.engine_memory import EngineEstimate
from megatron_fp8rl.preflight.finding import Change, Finding, Severity, exit_status
from megatron_fp8rl.preflight.findings import Findings
from megatron_fp8rl.preflight.hardware import GIB, GPUS, Gpu, GpuName
from megatron_fp8rl.preflight.memory import TIGHT, Estimate
from megatron_fp8rl.preflight.packages import Package
from megatron_fp8rl.preflight.parameters import ParameterCount, count
from megatron_fp8rl.preflight.shapes import check_degrees, check_model

_PROGRAM = "python -m megatron_fp8rl doctor"
_MAX_ROUNDS = 3  # of curing what the cure of something else brings about
_MIN_FULL_SEQUENCES = 8  # of full length in the KV cache; fewer leave an engine mostly idle


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """The machines that the run is meant for."""

    gpu: GpuName = "h200"  # kind of GPU of trainer and engines
    memory_gib: float | None = None  # of one GPU; None: what CUDA reports for its kind
    gpus_per_node: int = 8
    num_gpus: int | None = None  # that you have; None: as many as trainer and engines ask for
    routing_imbalance: float = 1.0  # token copies that the busiest rank's experts receive, over the mean
    json: bool = False  # one JSON object instead of tables

    def problems(self) -> list[str]:
        """Options that no machine has, with what they may be."""
        given = {name: getattr(self, name) for name in ("memory_gib", "gpus_per_node", "num_gpus", "routing_imbalance")}
        wrong = {name: value for name, value in given.items() if value is not None and not value >= 1}
        return [f"--{name} {value}: at least 1 is needed" for name, value in wrong.items()]


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What was found. Estimates and matrices are None or empty when the degrees do not divide the model."""

    cfg: RunConfig
    gpu: Gpu
    num_gpus: int  # trainer and engines
    parameters: ParameterCount | None
    trainer: Estimate | None
    engine: EngineEstimate | None
    phases: tuple[Estimate, ...]  # of a GPU that both use in turns; empty when each has its own
    matrices: tuple[tiling.Matrix, ...]
    agreement: tuple[precision_table.Row, ...]
    packages: tuple[Package, ...]
    findings: tuple[Finding, ...]
    command: str  # with the changes of all errors together; empty with fewer than two, or when one has none

    @property
    def status(self) -> int:
        """0: nothing to say, or notes; 1: warnings; 2: it cannot work."""
        return exit_status(list(self.findings))


def diagnose(
    cfg: RunConfig, options: DoctorOptions | None = None, *, config_name: str = "CONFIG", overrides: Sequence[str] = ()
) -> Diagnosis:
    """Look at a run. ``config_name`` and ``overrides`` are what commands in the findings begin with."""
    options = options or DoctorOptions()
    gpu = GPUS[options.gpu]
    if options.memory_gib is not None:
        gpu = replace(gpu, memory_bytes=int(options.memory_gib * GIB))
    mended = repair.mend_all(cfg, gpu.generation)
    judge = _Judge(gpu, options)
    findings, trainer, engine = _look(cfg, repair.apply(cfg, mended), judge)
    findings += pays.findings(cfg, gpu.name) if trainer is not None else []
    findings += packages.findings(rules.local_accelerator() != "cpu")
    findings.sort(key=lambda finding: ("error", "warning", "note").index(finding.severity))
    begin = partial(_command, config_name, [*overrides, *_option_words(options)])
    has_model = check_model(Findings(cfg))
    return Diagnosis(
        cfg=cfg,
        gpu=gpu,
        num_gpus=gpus_wanted(cfg),
        parameters=count(cfg.model) if has_model else None,
        trainer=trainer,
        engine=engine,
        phases=colocated.phases(cfg, trainer, engine.estimate) if trainer and engine else (),
        matrices=tuple(tiling.matrices(cfg)) if trainer is not None else (),
        agreement=tuple(precision_table.agreement(cfg)) if has_model else (),
        packages=tuple(packages.packages()),
        findings=tuple(replace(f, command=begin(f.change)) if f.change else f for f in findings),
        command=begin(cure) if (cure := _cure(cfg, mended, findings, judge)) else "",
    )


def _look(
    cfg: RunConfig, mended: RunConfig, judge: _Judge
) -> tuple[list[Finding], Estimate | None, EngineEstimate | None]:
    """(findings about the configuration, memory of the trainer, memory of an engine worker).

    ``mended`` has no violations, if that is possible: changes for the sake of memory are tried on it.
    """
    gpu, trainer, engine = judge.gpu, None, None
    findings = [_of_violation(cfg, violation, gpu) for violation in rules.check(cfg, accelerator=gpu.generation)]
    questions = Findings(cfg)
    if check_degrees(questions, check_model(questions)):
        trainer, engine = judge.trainer(cfg), engine_memory.worker(cfg, gpu.memory_bytes)
        findings += judge.of_trainer(mended, trainer) + judge.of_engine(mended, engine)
        findings += judge.of_phases(mended)
        findings += _of_tiles(cfg, {finding.subject for finding in findings})
    findings += _of_machines(cfg, judge.options) + precision_table.findings(cfg, gpu) + _of_start(cfg)
    return findings, trainer, engine


def _cure(cfg: RunConfig, mended: Change, findings: list[Finding], judge: _Judge) -> Change:
    """One change that takes away several errors, if there is one; empty otherwise."""
    if sum(finding.severity == "error" for finding in findings) < 2:
        return ()
    changes: dict[str, Any] = dict(mended)
    for _ in range(_MAX_ROUNDS):
        cured = repair.apply(cfg, tuple(changes.items()))
        errors = [finding for finding in _look(cured, cured, judge)[0] if finding.severity == "error"]
        if not errors:
            return tuple(changes.items())
        for finding in errors:
            changes |= dict(finding.change)
    return ()


def gpus_wanted(cfg: RunConfig) -> int:
    """GPUs of trainer and engines, each with its own or both on the same."""
    engines = cfg.rollout.num_replicas * cfg.rollout.tensor
    is_colocated = cfg.rollout.placement == "colocated"
    return max(cfg.parallel.world_size, engines) if is_colocated else cfg.parallel.world_size + engines


def _option_words(options: DoctorOptions) -> list[str]:
    """The machines that the user named, for commands to repeat."""
    named = [(f.name, getattr(options, f.name), f.default) for f in fields(options) if f.name != "json"]
    return [word for name, value, default in named if value != default for word in (f"--{name}", str(value))]


def _command(config_name: str, overrides: Sequence[str], change: Change) -> str:
    return f"{_PROGRAM} {shlex.quote(config_name)} {repair.words(overrides, change)}"


def _of_violation(cfg: RunConfig, violation: Violation, gpu: Gpu) -> Finding:
    return Finding(
        severity="error",
        subject=violation.field,
        problem=f"{violation.value!r}: {violation.problem}",
        remedy=violation.remedy,
        change=repair.mend(cfg, violation, gpu.generation),
    )


@dataclass(frozen=True)
class _Judge:
    """Whether memory is enough, and which change would make it so."""

    gpu: Gpu
    options: DoctorOptions

    def trainer(self, cfg: RunConfig) -> Estimate:
        return trainer_memory.worst_rank(cfg, self.gpu, self.gpu.memory_bytes, self.options.routing_imbalance)

    def is_sound(self, cfg: RunConfig) -> bool:
        """Whether a changed configuration has no mistakes and asks for no more GPUs than there are."""
        if self.options.num_gpus is not None and gpus_wanted(cfg) > self.options.num_gpus:
            return False
        return not rules.check(cfg, accelerator=self.gpu.generation)

    def of_trainer(self, mended: RunConfig, estimate: Estimate) -> list[Finding]:
        if estimate.share <= TIGHT:
            return []
        cannot = estimate.share > 1
        problem = f"needs {estimate.total_bytes / GIB:.1f} GiB of {estimate.capacity_bytes / GIB:.1f} GiB"
        return [
            Finding(
                severity="error" if cannot else "warning",
                subject=estimate.title,
                problem=problem if cannot else f"{problem}, and fragments of the allocator come on top",
                remedy=f"The largest part: {max(estimate.parts, key=lambda part: part.num_bytes).name}",
                change=repair.shrink_trainer(mended, lambda c: self.is_sound(c) and self.trainer(c).share <= TIGHT),
            )
        ]

    def of_engine(self, mended: RunConfig, engine: EngineEstimate) -> list[Finding]:
        estimate = engine.estimate
        update = estimate.part("weight update").num_bytes
        spare = estimate.capacity_bytes - (estimate.total_bytes - update)
        few = min(_MIN_FULL_SEQUENCES, engine.num_sequences)
        utilization = mended.rollout.gpu_memory_utilization
        if spare < 0:
            change = self._shrink_engine(mended, few)
            return [_engine_finding(engine, "error", f"needs {-spare / GIB:.1f} GiB more than the GPU has", change)]
        if engine.full_sequences < 1:
            sequence = engine.max_sequence_tokens * engine.kv_token_bytes
            problem = f"leaves {engine.kv_bytes / GIB:.1f} GiB for a KV cache; one sequence of "
            problem += f"{engine.max_sequence_tokens} tokens takes {sequence / GIB:.1f} GiB"
            return [_engine_finding(engine, "error", problem, self._shrink_engine(mended, few))]
        found = []
        if spare < update:
            enough = round((estimate.capacity_bytes - update) / estimate.capacity_bytes - 0.01, 2)
            problem = f"a weight update takes {update / GIB:.1f} GiB beside a GPU that is {utilization:.0%} full"
            found.append(_engine_finding(engine, "warning", problem, (("rollout.gpu_memory_utilization", enough),)))
        if engine.full_sequences < engine.num_sequences:
            problem = f"the KV cache holds {engine.full_sequences:.0f} sequences of full length, and up to "
            problem += f"{engine.num_sequences} are decoded at once; vLLM makes the others wait"
            is_idle = engine.full_sequences < few
            change = self._shrink_engine(mended, few) if is_idle else ()
            found.append(_engine_finding(engine, "warning" if is_idle else "note", problem, change))
        return found

    def of_phases(self, mended: RunConfig) -> list[Finding]:
        """Whether trainer and engine fit onto one GPU in each phase, when each fits alone."""
        trainer, engine = self.trainer(mended), engine_memory.worker(mended, self.gpu.memory_bytes).estimate
        found = colocated.phases(mended, trainer, engine)
        if not found or max(trainer.share, engine.share) > 1:
            return []
        worst = max(found, key=lambda estimate: estimate.share)
        if worst.share <= TIGHT:
            return []
        cannot = worst.share > 1
        problem = f"trainer and engine need {worst.total_bytes / GIB:.1f} GiB of {worst.capacity_bytes / GIB:.1f} GiB "
        problem += worst.title

        def fits(cfg: RunConfig) -> bool:
            if not self.is_sound(cfg):
                return False
            engine = engine_memory.worker(cfg, self.gpu.memory_bytes)
            few = min(_MIN_FULL_SEQUENCES, engine.num_sequences)
            parts = colocated.phases(cfg, self.trainer(cfg), engine.estimate)
            return engine.full_sequences >= few and all(phase.share <= TIGHT for phase in parts)

        return [
            Finding(
                severity="error" if cannot else "warning",
                subject="one GPU of both",
                problem=problem if cannot else f"{problem}, and fragments of the allocators come on top",
                change=repair.take_turns(mended, fits),
            )
        ]

    def _shrink_engine(self, mended: RunConfig, sequences: int) -> Change:
        def fits(cfg: RunConfig) -> bool:
            if not self.is_sound(cfg):
                return False
            engine = engine_memory.worker(cfg, self.gpu.memory_bytes)
            return engine.full_sequences >= sequences and engine.estimate.share <= 1

        return repair.shrink_engine(mended, fits)


def _engine_finding(engine: EngineEstimate, severity: Severity, problem: str, change: Change) -> Finding:
    return Finding(severity=severity, subject=engine.estimate.title, problem=problem, change=change)


def _of_tiles(cfg: RunConfig, refused: set[str]) -> list[Finding]:
    """Matrices of the table that do not tile, for options that are not refused already."""
    kinds = tiling.matrices(cfg)
    degrees, found = tiling.common_degrees(kinds), []
    for option in degrees:
        if option == "rollout.tensor":
            spoiled = [kind.name for kind in kinds if not kind.engine_tiles]
        else:
            spoiled = [kind.name for kind in kinds if kind.trainer_option == option and not kind.trainer_tiles]
        if spoiled and f"--{option}" not in refused:
            present = attrgetter(option)(cfg)
            best = max((degree for degree in degrees[option] if degree <= present), default=0)
            found.append(
                Finding(
                    severity="error",
                    subject=f"--{option}",
                    problem=f"{present}: FP8 blocks of a rank are not blocks of the whole matrix: {', '.join(spoiled)}",
                    remedy=f"Degrees that tile: {', '.join(map(str, degrees[option])) or 'none'}",
                    change=((option, best),) if best else (),
                )
            )
    return found


def _of_machines(cfg: RunConfig, options: DoctorOptions) -> list[Finding]:
    """Whether there are enough GPUs, and which groups reach over nodes."""
    wanted, found = gpus_wanted(cfg), []
    is_colocated = cfg.rollout.placement == "colocated"
    engines = f"{cfg.rollout.num_replicas} replicas x {cfg.rollout.tensor}"
    if options.num_gpus is not None and wanted > options.num_gpus and not is_colocated:
        spare = (options.num_gpus - cfg.parallel.world_size) // cfg.rollout.tensor
        found.append(
            Finding(
                severity="error",
                subject="--rollout.num_replicas",
                problem=f"trainer {cfg.parallel.world_size} + engines {engines} = {wanted} GPUs, and there are "
                f"{options.num_gpus}",
                remedy="" if spare > 0 else "The trainer leaves no room for an engine: lower --parallel.world_size",
                change=(("rollout.num_replicas", spare),) if spare > 0 else (),
            )
        )
    if options.num_gpus is not None and wanted > options.num_gpus and is_colocated:
        problem = f"trainer {cfg.parallel.world_size} and engines {engines} on {wanted} GPUs, and there are "
        found.append(
            Finding(
                severity="error",
                subject="--parallel.world_size",
                problem=f"{problem}{options.num_gpus}",
                remedy="Lower the ranks of trainer and engines",
            )
        )
    node = options.gpus_per_node
    if wanted > node and cfg.rollout.transport == "ipc":
        found.append(
            Finding(
                severity="error",
                subject="--rollout.transport",
                problem=f"{wanted} GPUs are on more than one node of {node}, and CUDA IPC ends at a node",
                change=(("rollout.transport", "auto"),),
            )
        )
    for option, degree, why in (
        ("parallel.tensor", cfg.parallel.tensor, "all-reduces several times in every layer"),
        ("rollout.tensor", cfg.rollout.tensor, "all-reduces several times for every token"),
    ):
        if degree > node:
            problem = f"{degree} ranks are on more than one node of {node}; the group {why}"
            found.append(Finding(severity="warning", subject=f"--{option}", problem=problem, change=((option, node),)))
    if cfg.model.is_moe and cfg.parallel.expert * cfg.parallel.expert_tensor > node:
        ranks = cfg.parallel.expert * cfg.parallel.expert_tensor
        problem = f"tokens travel between nodes of {node}: experts are spread over {ranks} ranks"
        found.append(Finding(severity="note", subject="--parallel.expert", problem=problem))
    return found


def _of_start(cfg: RunConfig) -> list[Finding]:
    """Weights and tokenizer that the run starts from."""
    if cfg.model.hf_path is None and not cfg.data.sft_steps:
        return [
            Finding(
                severity="warning",
                subject="--model.hf_path",
                problem="the run starts from random weights",
                remedy="Name a Hugging Face checkpoint, and its tokenizer",
                change=(("model.hf_path", "DIR"), ("data.tokenizer", "DIR"), ("data.chat_template", True)),
            )
        ]
    if cfg.model.hf_path is not None and cfg.data.tokenizer == "character":
        return [
            Finding(
                severity="warning",
                subject="--data.tokenizer",
                problem="trained weights under a tokenizer that splits text into characters",
                change=(("data.tokenizer", cfg.model.hf_path), ("data.chat_template", True)),
            )
        ]
    return []
