"""Diagnose one run: mistakes, memory, tiles, precision, packages, and remedies.

In: a RunConfig and the GPUs it is meant for. Out: a :class:`Diagnosis`. Runs on any machine without a GPU or torch, and
takes about a second if it has to search for a layout. :func:`judge` applies all of preflight to one configuration; a
change is proposed only after :func:`judge` has accepted it.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.precision.hardware import Generation, cpu_has_avx512
from megatron_fp8rl.precision.parameters import ParameterCount, count
from megatron_fp8rl.preflight import (
    engine_memory,
    layout_search,
    packages,
    precision_table,
    rules,
    tiling,
    trainer_memory,
)
from megatron_fp8rl.preflight.engine_memory import EngineEstimate
from megatron_fp8rl.preflight.findings import Change, Finding, Findings, Judgement, exit_status
from megatron_fp8rl.preflight.memory import FULL, GIB, GPUS, Estimate, Gpu, GpuName, phases
from megatron_fp8rl.preflight.packages import Package
from megatron_fp8rl.preflight.shapes import check_degrees, check_model

_PROGRAM = "python -m megatron_fp8rl doctor"
_OF_GPUS = {"linear_backend": "auto", "moe_backend": "auto", "attention_backend": "auto", "sleep_level": 0}


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """The machines the run is meant for."""

    gpu: GpuName = "h200"  # kind of GPU of trainer and engines
    memory_gib: float | None = None  # of one GPU; None: what CUDA reports for its kind
    gpus_per_node: int = 8
    num_gpus: int | None = None  # available; None: as many as trainer and engines ask for
    routing_imbalance: float = 1.0  # token copies received by the experts of the busiest rank, over the mean
    data: bool = True  # read the data and score reference answers
    json: bool = False  # one JSON object instead of tables

    @property
    def hardware(self) -> Gpu:
        """The kind of GPU, with the memory given."""
        gpu = GPUS[self.gpu]
        return gpu if self.memory_gib is None else replace(gpu, memory_bytes=int(self.memory_gib * GIB))

    def problems(self) -> list[str]:
        """Options with impossible values, and the values that are possible."""
        given = {name: getattr(self, name) for name in ("memory_gib", "gpus_per_node", "num_gpus", "routing_imbalance")}
        wrong = {name: value for name, value in given.items() if value is not None and not value >= 1}
        return [f"--{name} {value}: at least 1 is needed" for name, value in wrong.items()]


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The result. Estimates and matrices are None or empty if the degrees do not divide the model."""

    cfg: RunConfig
    gpu: Gpu
    num_gpus: int  # trainer and engines
    parameters: ParameterCount | None
    trainer: Estimate | None
    engine: EngineEstimate | None
    phases: tuple[Estimate, ...]  # of a GPU shared by trainer and engine; empty if each has its own
    matrices: tuple[tiling.Matrix, ...]
    agreement: tuple[precision_table.Row, ...]
    packages: tuple[Package, ...]
    findings: tuple[Finding, ...]
    change: Change  # that makes the run work; empty if it works already or none was found
    command: str  # that applies ``change``
    tried: str  # description of an unsuccessful search; empty otherwise

    @property
    def status(self) -> int:
        """0: at most notes; 1: warnings; 2: the run cannot work."""
        return exit_status(self.findings)


def diagnose(
    cfg: RunConfig, options: DoctorOptions | None = None, *, config_name: str = "CONFIG", overrides: Sequence[str] = ()
) -> Diagnosis:
    """Diagnose a run. Commands in the findings begin with ``config_name`` and ``overrides``."""
    options = options or DoctorOptions()
    gpu, found = options.hardware, judge(cfg, options)
    outcome = layout_search.Outcome()
    if found.errors or found.num_layout_warnings:
        outcome = layout_search.search(
            cfg, partial(judge, options=options), gpu, options.num_gpus, options.gpus_per_node
        )
    begin = partial(_command, config_name, [*overrides, *_option_words(options)])
    findings = [_with_command(finding, cfg, found, options, begin) for finding in found.findings]
    findings += packages.findings(rules.local_accelerator() != "cpu")
    findings.sort(key=lambda finding: ("error", "warning", "note").index(finding.severity))
    has_model = check_model(Findings(cfg))
    return Diagnosis(
        cfg=cfg,
        gpu=gpu,
        num_gpus=gpus_wanted(cfg),
        parameters=count(cfg.model) if has_model else None,
        trainer=found.trainer,
        engine=found.engine,
        phases=found.phases,
        matrices=tuple(tiling.matrices(cfg)) if found.trainer is not None else (),
        agreement=tuple(precision_table.agreement(cfg)) if has_model else (),
        packages=tuple(packages.packages()),
        findings=tuple(findings),
        change=outcome.change,
        command=begin(outcome.change) if outcome.change else "",
        tried=outcome.tried,
    )


def _with_command(
    finding: Finding, cfg: RunConfig, found: Judgement, options: DoctorOptions, begin: Callable[[Change], str]
) -> Finding:
    """Keep a proposed change if it removes the finding, and the run then works with no more warnings than before."""
    if not finding.change:
        return finding
    after = judge(layout_search.apply(cfg, finding.change), options)
    is_gone = (finding.severity, finding.problem) not in {(f.severity, f.problem) for f in after.findings}
    if after.works and is_gone and _num_warnings(after) <= _num_warnings(found):
        return replace(finding, command=begin(finding.change))
    return replace(finding, change=())


def _num_warnings(found: Judgement) -> int:
    return sum(finding.severity == "warning" for finding in found.findings)


def judge(cfg: RunConfig, options: DoctorOptions) -> Judgement:
    """All of preflight except packages. Changes in the findings are proposals that have not been judged yet."""
    gpu, questions = options.hardware, Findings(cfg)
    found = [
        Finding(
            severity="error",
            subject=violation.field,
            problem=f"{violation.value!r}: {violation.problem}",
            remedy=violation.remedy,
            code=violation.code,
            choices=violation.choices,
        )
        for violation in rules.check(cfg, accelerator=gpu.generation)
    ]
    trainer, engine, shared = None, None, ()
    if check_degrees(questions, check_model(questions)):
        trainer = trainer_memory.worst_rank(cfg, gpu, gpu.memory_bytes, options.routing_imbalance)
        engine = engine_memory.worker(cfg, gpu.memory_bytes)
        shared = phases(cfg, trainer, engine.estimate)
        found += [*_of_trainer(trainer), *_of_engine(cfg, engine), *_of_phases(trainer, engine.estimate, shared)]
    found += _of_machines(cfg, options) + precision_table.findings(cfg, gpu) + _of_start(cfg)
    return Judgement(findings=tuple(found), trainer=trainer, engine=engine, phases=shared)


def gpus_wanted(cfg: RunConfig) -> int:
    """Number of GPUs of trainer and engines, separate or shared."""
    engines = cfg.rollout.num_replicas * cfg.rollout.ranks
    is_colocated = cfg.rollout.placement == "colocated"
    return max(cfg.parallel.world_size, engines) if is_colocated else cfg.parallel.world_size + engines


def _option_words(options: DoctorOptions) -> list[str]:
    """The options the user set, as words that proposed commands repeat."""
    named = [(f.name, getattr(options, f.name), f.default) for f in fields(options) if f.name not in ("json", "data")]
    return [word for name, value, default in named if value != default for word in (f"--{name}", str(value))]


def _command(config_name: str, overrides: Sequence[str], change: Change) -> str:
    return f"{_PROGRAM} {shlex.quote(config_name)} {layout_search.words(overrides, change)}"


def _of_trainer(estimate: Estimate) -> list[Finding]:
    if not estimate.is_tight:
        return []
    cannot = estimate.share > FULL
    problem = f"needs {estimate.total_bytes / GIB:.1f} GiB of {estimate.capacity_bytes / GIB:.1f} GiB"
    return [
        Finding(
            severity="error" if cannot else "warning",
            subject=estimate.title,
            problem=problem if estimate.share > 1 else f"{problem}, and fragments of the allocator come on top",
            remedy=f"The largest part: {max(estimate.parts, key=lambda part: part.num_bytes).name}",
            is_of_layout=not cannot,
        )
    ]


def _of_engine(cfg: RunConfig, engine: EngineEstimate) -> list[Finding]:
    estimate, title = engine.estimate, engine.estimate.title
    update = estimate.part("weight update").num_bytes
    spare = estimate.capacity_bytes - (estimate.total_bytes - update)
    if spare < 0:
        problem = f"needs {-spare / GIB:.1f} GiB more than the GPU has"
        return [Finding(severity="error", subject=title, problem=problem)]
    if engine.full_sequences < 1:
        sequence = engine.max_sequence_tokens * engine.kv_token_bytes
        problem = f"leaves {engine.kv_bytes / GIB:.1f} GiB for a KV cache; one sequence of "
        problem += f"{engine.max_sequence_tokens} tokens takes {sequence / GIB:.1f} GiB"
        return [Finding(severity="error", subject=title, problem=problem)]
    found = []
    if spare < update:
        enough = round((estimate.capacity_bytes - update) / estimate.capacity_bytes - 0.01, 2)
        problem = f"a weight update takes {update / GIB:.1f} GiB beside a GPU that is "
        problem += f"{cfg.rollout.gpu_memory_utilization:.0%} full"
        change = (("rollout.gpu_memory_utilization", enough),)
        found.append(Finding(severity="warning", subject=title, problem=problem, change=change, is_of_layout=True))
    if engine.full_sequences < engine.num_sequences:
        problem = f"the KV cache holds {engine.full_sequences:.0f} sequences of full length, and up to "
        problem += f"{engine.num_sequences} are decoded at once; vLLM makes the others wait"
        is_idle = engine.is_idle
        severity = "warning" if is_idle else "note"
        found.append(Finding(severity=severity, subject=title, problem=problem, is_of_layout=is_idle))
    return found


def _of_phases(trainer: Estimate, engine: Estimate, shared: Sequence[Estimate]) -> list[Finding]:
    """Whether trainer and engine fit on one GPU together in each phase, given that each fits alone."""
    if not shared or trainer.share > FULL or engine.share > 1:
        return []
    worst = max(shared, key=lambda estimate: estimate.share)
    if not any(estimate.is_tight for estimate in shared):
        return []
    cannot = worst.share > FULL
    problem = f"trainer and engine need {worst.total_bytes / GIB:.1f} GiB of {worst.capacity_bytes / GIB:.1f} GiB "
    problem += worst.title
    return [
        Finding(
            severity="error" if cannot else "warning",
            subject="one GPU of both",
            problem=problem if worst.share > 1 else f"{problem}, and fragments of the allocators come on top",
            is_of_layout=not cannot,
        )
    ]


def _of_machines(cfg: RunConfig, options: DoctorOptions) -> list[Finding]:
    """Whether there are enough GPUs, and which process groups span nodes."""
    wanted, found = gpus_wanted(cfg), []
    is_colocated = cfg.rollout.placement == "colocated"
    engines = f"{cfg.rollout.num_replicas} replicas x {cfg.rollout.ranks}"
    if options.num_gpus is not None and wanted > options.num_gpus and not is_colocated:
        spare = (options.num_gpus - cfg.parallel.world_size) // cfg.rollout.ranks
        found.append(
            Finding(
                severity="error",
                subject="--rollout.num_replicas",
                problem=f"trainer {cfg.parallel.world_size} + engines {engines} = {wanted} GPUs, and there are "
                f"{options.num_gpus}",
                remedy="" if spare > 0 else "The trainer leaves no room for an engine: lower --parallel.world_size",
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
                remedy="Choose auto",
                choices=("auto",),
            )
        )
    for option, degree, why in (
        ("parallel.tensor", cfg.parallel.tensor, "all-reduces several times in every layer"),
        ("rollout.tensor", cfg.rollout.tensor, "all-reduces several times for every token"),
    ):
        if degree > node:
            problem = f"{degree} ranks are on more than one node of {node}; the group {why}"
            found.append(Finding(severity="warning", subject=f"--{option}", problem=problem, is_of_layout=True))
    if cfg.model.is_moe and cfg.parallel.expert * cfg.parallel.expert_tensor > node:
        ranks = cfg.parallel.expert * cfg.parallel.expert_tensor
        problem = f"tokens travel between nodes of {node}: experts are spread over {ranks} ranks"
        found.append(Finding(severity="note", subject="--parallel.expert", problem=problem))
    return found


def _of_start(cfg: RunConfig) -> list[Finding]:
    """The weights that the run starts from."""
    if cfg.model.hf_path is None and not cfg.data.sft_steps:
        return [
            Finding(
                severity="warning",
                subject="--model.hf_path",
                problem="the run starts from random weights",
                remedy="Name a Hugging Face checkpoint: --model.hf_path DIR",
            )
        ]
    return []


def doubts(cfg: RunConfig, accelerator: Generation) -> list[Finding]:
    """What a configuration may do and its author hardly wants: warnings, with which the run starts all the same."""
    found = []
    num_updates = cfg.num_steps * cfg.algo.updates_per_step
    if 0 < num_updates <= cfg.optim.warmup_steps:
        share = num_updates / cfg.optim.warmup_steps
        problem = (
            f"--optim.warmup_steps {cfg.optim.warmup_steps} is longer than the run of {num_updates} updates, which "
        )
        found.append(_warning("optim.warmup_steps", f"{problem}ends at {share:.2g} of the learning rate"))
    for name, default in _OF_GPUS.items() if accelerator == "cpu" and cfg.rollout.placement != "remote" else ():
        if (value := getattr(cfg.rollout, name)) != default:
            found.append(_warning(f"rollout.{name}", f"--rollout.{name} {value} has no effect without a GPU"))
    if accelerator == "cpu" and cfg.rollout.kv_cache_dtype == "fp8" and not cpu_has_avx512():
        problem = "vLLM keeps an FP8 KV cache on GPUs and on CPUs with AVX-512, which this machine has not"
        found.append(_warning("rollout.kv_cache_dtype", problem))
    rollout = cfg.rollout
    if rollout.window_groups > (most := rollout.max_staleness * rollout.prompts_per_step) > 0:
        problem = (
            f"groups stay {rollout.window_groups / rollout.prompts_per_step:g} steps in a window of "
            f"{rollout.window_groups} on average, and tokens older than --rollout.max_staleness {rollout.max_staleness} "
            f"are not trained; up to {most} groups most are (docs/agents.md)"
        )
        found.append(_warning("rollout.window_groups", problem))
    if cfg.rollout.placement == "remote" and "LAUNCH_DIR" not in os.environ:
        problem = f"somebody else has to start its engines, which are waited for {cfg.rollout.start_deadline_s:g} s"
        found.append(_warning("rollout.placement", f"--rollout.placement remote: {problem}; `python -m launch` does"))
    return found


def _warning(path: str, problem: str) -> Finding:
    return Finding(severity="warning", subject=f"--{path}", problem=problem)
