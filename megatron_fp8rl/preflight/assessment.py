"""What preflight finds about one configuration on given machines: mistakes, memory, precision. Pure; no torch.

``doctor`` reports it, and the search for layouts accepts a candidate only if :func:`assess` finds no error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.preflight import engine_memory, precision_table, rules, trainer_memory
from megatron_fp8rl.preflight.engine_memory import EngineEstimate
from megatron_fp8rl.preflight.findings import Assessment, Finding, Findings
from megatron_fp8rl.preflight.memory import FULL, GIB, GPUS, Estimate, Gpu, GpuName, phases
from megatron_fp8rl.preflight.shapes import check_degrees, check_model


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


def assess(cfg: RunConfig, options: DoctorOptions) -> Assessment:
    """All of preflight except packages. Changes in the findings are proposals that have not been assessed yet."""
    gpu, collector = options.hardware, Findings(cfg)
    findings = [
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
    if check_degrees(collector, check_model(collector)):
        trainer = trainer_memory.worst_rank(cfg, gpu, gpu.memory_bytes, options.routing_imbalance)
        engine = engine_memory.worker(cfg, gpu.memory_bytes)
        shared = phases(cfg, trainer, engine.estimate)
        findings += _trainer_findings(trainer) + _engine_findings(cfg, engine)
        findings += _phase_findings(trainer, engine.estimate, shared)
    findings += _machine_findings(cfg, options) + precision_table.findings(cfg, gpu) + _start_findings(cfg)
    return Assessment(findings=tuple(findings), trainer=trainer, engine=engine, phases=shared)


def _trainer_findings(estimate: Estimate) -> list[Finding]:
    if not estimate.is_tight:
        return []
    cannot = estimate.share > FULL
    problem = f"needs {estimate.total_bytes / GIB:.1f} GiB of {estimate.capacity_bytes / GIB:.1f} GiB"
    return [
        Finding(
            severity="error" if cannot else "warning",
            subject=estimate.title,
            code="memory",
            problem=problem if estimate.share > 1 else f"{problem}, and fragments of the allocator come on top",
            remedy=f"The largest part: {max(estimate.parts, key=lambda part: part.num_bytes).name}",
            is_of_layout=not cannot,
        )
    ]


def _engine_findings(cfg: RunConfig, engine: EngineEstimate) -> list[Finding]:
    estimate, title = engine.estimate, engine.estimate.title
    update = estimate.part("weight update").num_bytes
    spare = estimate.capacity_bytes - (estimate.total_bytes - update)
    if spare < 0:
        problem = f"needs {-spare / GIB:.1f} GiB more than the GPU has"
        return [Finding(severity="error", subject=title, problem=problem, code="memory")]
    if engine.full_sequences < 1:
        sequence = engine.max_sequence_tokens * engine.kv_token_bytes
        problem = f"leaves {engine.kv_bytes / GIB:.1f} GiB for a KV cache; one sequence of "
        problem += f"{engine.max_sequence_tokens} tokens takes {sequence / GIB:.1f} GiB"
        return [Finding(severity="error", subject=title, problem=problem, code="memory")]
    findings = []
    if spare < update:
        enough = round((estimate.capacity_bytes - update) / estimate.capacity_bytes - 0.01, 2)
        problem = f"a weight update takes {update / GIB:.1f} GiB beside a GPU that is "
        problem += f"{cfg.engine.gpu_memory_utilization:.0%} full"
        change = (("engine.gpu_memory_utilization", enough),)
        findings.append(Finding(severity="warning", subject=title, problem=problem, change=change, is_of_layout=True))
    if engine.full_sequences < engine.num_sequences:
        problem = f"the KV cache holds {engine.full_sequences:.0f} sequences of full length, and up to "
        problem += f"{engine.num_sequences} are decoded at once; vLLM makes the others wait"
        is_idle = engine.is_idle
        severity = "warning" if is_idle else "note"
        findings.append(Finding(severity=severity, subject=title, problem=problem, is_of_layout=is_idle))
    return findings


def _phase_findings(trainer: Estimate, engine: Estimate, shared: Sequence[Estimate]) -> list[Finding]:
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
            code="memory",
            problem=problem if worst.share > 1 else f"{problem}, and fragments of the allocators come on top",
            is_of_layout=not cannot,
        )
    ]


def _machine_findings(cfg: RunConfig, options: DoctorOptions) -> list[Finding]:
    """Whether there are enough GPUs, and which process groups span nodes."""
    wanted, findings = gpus_wanted(cfg), []
    is_colocated = cfg.engine.placement == "colocated"
    engines = f"{cfg.engine.num_replicas} replicas x {cfg.engine.ranks}"
    if options.num_gpus is not None and wanted > options.num_gpus and not is_colocated:
        spare = (options.num_gpus - cfg.parallel.world_size) // cfg.engine.ranks
        findings.append(
            Finding(
                severity="error",
                subject="--engine.num_replicas",
                problem=f"trainer {cfg.parallel.world_size} + engines {engines} = {wanted} GPUs, and there are "
                f"{options.num_gpus}",
                remedy="" if spare > 0 else "The trainer leaves no room for an engine: lower --parallel.world_size",
            )
        )
    if options.num_gpus is not None and wanted > options.num_gpus and is_colocated:
        problem = f"trainer {cfg.parallel.world_size} and engines {engines} on {wanted} GPUs, and there are "
        findings.append(
            Finding(
                severity="error",
                subject="--parallel.world_size",
                problem=f"{problem}{options.num_gpus}",
                remedy="Lower the ranks of trainer and engines",
            )
        )
    node = options.gpus_per_node
    if wanted > node and cfg.weight_sync.transport == "ipc":
        findings.append(
            Finding(
                severity="error",
                subject="--weight_sync.transport",
                problem=f"{wanted} GPUs are on more than one node of {node}, and CUDA IPC ends at a node",
                remedy="Choose auto",
                choices=("auto",),
            )
        )
    for option, degree, why in (
        ("parallel.tensor", cfg.parallel.tensor, "all-reduces several times in every layer"),
        ("engine.tensor", cfg.engine.tensor, "all-reduces several times for every token"),
    ):
        if degree > node:
            problem = f"{degree} ranks are on more than one node of {node}; the group {why}"
            findings.append(Finding(severity="warning", subject=f"--{option}", problem=problem, is_of_layout=True))
    if cfg.model.is_moe and cfg.parallel.expert * cfg.parallel.expert_tensor > node:
        ranks = cfg.parallel.expert * cfg.parallel.expert_tensor
        problem = f"tokens travel between nodes of {node}: experts are spread over {ranks} ranks"
        findings.append(Finding(severity="note", subject="--parallel.expert", problem=problem))
    return findings


def _start_findings(cfg: RunConfig) -> list[Finding]:
    """The weights that the run starts from."""
    if cfg.model.hf_path is None and not cfg.warm_start.steps:
        return [
            Finding(
                severity="warning",
                subject="--model.hf_path",
                problem="the run starts from random weights",
                remedy="Name a Hugging Face checkpoint: --model.hf_path DIR",
            )
        ]
    return []


def gpus_wanted(cfg: RunConfig) -> int:
    """Number of GPUs of trainer and engines, separate or shared."""
    engines = cfg.engine.num_replicas * cfg.engine.ranks
    is_colocated = cfg.engine.placement == "colocated"
    return max(cfg.parallel.world_size, engines) if is_colocated else cfg.parallel.world_size + engines
