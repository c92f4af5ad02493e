"""All checks of one configuration on given machines: mistakes, memory, precision. Pure; no torch."""

from dataclasses import dataclass, replace

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.envs.source_kind import is_supervised
from megatron_fp8rl.preflight import engine_memory, precision_table, rules, trainer_memory
from megatron_fp8rl.preflight.engine_memory import EngineEstimate
from megatron_fp8rl.preflight.findings import Checks, Finding
from megatron_fp8rl.preflight.memory import FULL, GIB, GPUS, Estimate, Gpu, GpuName, phases
from megatron_fp8rl.preflight.shapes import check_degrees, check_model


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """The machines of a run."""

    gpu: GpuName = "h200"  # kind of GPU of trainer and engines
    memory_gib: float | None = None  # of one GPU; None: what CUDA reports for its kind
    gpus_per_node: int = 8
    num_gpus: int | None = None  # available; None: as many as trainer and engines ask for
    routing_imbalance: float = 1.0  # token copies received by the experts of the busiest rank, over the mean
    data: bool = True  # read the data and score reference answers
    json: bool = False  # one JSON object instead of tables
    compile: bool = False  # compile the run's kernels on this machine, and keep them for all later starts

    @property
    def hardware(self) -> Gpu:
        gpu = GPUS[self.gpu]
        return gpu if self.memory_gib is None else replace(gpu, memory_bytes=int(self.memory_gib * GIB))

    def problems(self) -> list[str]:
        names = ("memory_gib", "gpus_per_node", "num_gpus", "routing_imbalance")
        values = {name: getattr(self, name) for name in names}
        wrong = {name: value for name, value in values.items() if value is not None and not value >= 1}
        return [f"--{name} {value}: at least 1 is needed" for name, value in wrong.items()]


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """The findings about one configuration. Estimates are None if the degrees do not divide the model; the engine's
    also if the job has none (sft and dpo)."""

    findings: tuple[Finding, ...]
    trainer: Estimate | None = None
    engine: EngineEstimate | None = None
    phases: tuple[Estimate, ...] = ()  # of a GPU that trainer and engine share; empty if they use separate GPUs

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def works(self) -> bool:
        return not self.errors

    @property
    def num_layout_warnings(self) -> int:
        return sum(finding.is_of_layout for finding in self.findings)

    @property
    def status(self) -> int:
        """Exit status. 0: at most notes; 1: warnings; 2: the run cannot work."""
        return max((("note", "warning", "error").index(finding.severity) for finding in self.findings), default=0)


def assess(cfg: RunConfig, options: DoctorOptions) -> Assessment:
    """All of preflight except packages. Changes in the findings are proposals that have not been assessed yet."""
    gpu, checks = options.hardware, Checks(cfg)
    findings = [
        Finding("error", v.field, f"{v.value!r}: {v.problem}", v.remedy, code=v.code, choices=v.choices)
        for v in rules.check(cfg, accelerator=gpu.generation)
    ]
    trainer, engine, shared = None, None, ()
    if check_degrees(checks, check_model(checks)):
        trainer = trainer_memory.worst_rank(cfg, gpu, gpu.memory_bytes, options.routing_imbalance)
        findings += _trainer_findings(trainer)
        if not is_supervised(cfg):
            engine = engine_memory.worker(cfg, gpu.memory_bytes)
            shared = phases(cfg, trainer, engine.estimate)
            findings += _engine_findings(cfg, engine)
            if trainer.share <= FULL and engine.estimate.share <= 1:
                findings += _phase_findings(shared)
    findings += _machine_findings(cfg, options) + precision_table.findings(cfg, gpu)
    if cfg.model.hf_path is None and not cfg.warm_start.steps:
        remedy = "Name a Hugging Face checkpoint: --model.hf_path DIR"
        findings.append(Finding("warning", "--model.hf_path", "the run starts from random weights", remedy))
    if (scaling := cfg.model.rope_scaling) is not None and scaling.kind == "longrope":
        longest, original = cfg.max_sequence_tokens, scaling.original_max_position_embeddings
        chosen = "long_factor" if longest > original else "short_factor"
        problem = f"longrope takes {chosen} for every sequence: the longest of this run has {longest:,} tokens, "
        problem += f"and {original:,} is the limit of short_factor"
        findings.append(Finding("note", "--model.rope_scaling", problem))
    return Assessment(findings=tuple(findings), trainer=trainer, engine=engine, phases=shared)


def _memory_finding(estimate: Estimate, subject: str, problem: str, remedy: str = "") -> Finding:
    """An error if the memory of a GPU is full, a warning if fragments may fill it."""
    is_full = estimate.share > FULL
    if estimate.share <= 1:
        problem += ", and fragments of the allocator need more"
    severity = "error" if is_full else "warning"
    return Finding(severity, subject, problem, remedy, code="memory", is_of_layout=not is_full)


def _usage(estimate: Estimate) -> str:
    return f"{estimate.total_bytes / GIB:.1f} GiB of {estimate.capacity_bytes / GIB:.1f} GiB"


def _trainer_findings(estimate: Estimate) -> list[Finding]:
    if not estimate.is_tight:
        return []
    remedy = f"The largest part: {max(estimate.parts, key=lambda part: part.num_bytes).name}"
    return [_memory_finding(estimate, estimate.title, f"needs {_usage(estimate)}", remedy)]


def _phase_findings(shared: tuple[Estimate, ...]) -> list[Finding]:
    """Whether trainer and engine fit on one GPU together in each phase. The caller checks that each fits alone."""
    if not any(estimate.is_tight for estimate in shared):
        return []
    worst = max(shared, key=lambda estimate: estimate.share)
    problem = f"trainer and engine need {_usage(worst)} {worst.title}"
    return [_memory_finding(worst, "one GPU of both", problem)]


def _engine_findings(cfg: RunConfig, engine: EngineEstimate) -> list[Finding]:
    estimate, title = engine.estimate, engine.estimate.title
    update = estimate.part("weight update").num_bytes
    spare = estimate.capacity_bytes - (estimate.total_bytes - update)
    if spare < 0:
        return [Finding("error", title, f"needs {-spare / GIB:.1f} GiB more than the GPU has", code="memory")]
    if engine.full_sequences < 1:
        sequence = engine.max_sequence_tokens * engine.kv_token_bytes
        problem = f"leaves {engine.kv_bytes / GIB:.1f} GiB for a KV cache; one sequence of "
        problem += f"{engine.max_sequence_tokens} tokens takes {sequence / GIB:.1f} GiB"
        return [Finding("error", title, problem, code="memory")]
    findings = []
    if spare < update:
        fitting = round((estimate.capacity_bytes - update) / estimate.capacity_bytes - 0.01, 2)
        problem = f"a weight update takes {update / GIB:.1f} GiB beside a GPU that is "
        problem += f"{cfg.engine.gpu_memory_utilization:.0%} full"
        change = (("engine.gpu_memory_utilization", fitting),)
        findings.append(Finding("warning", title, problem, change=change, is_of_layout=True))
    if engine.full_sequences < engine.num_sequences:
        problem = f"the KV cache holds {engine.full_sequences:.0f} sequences of full length, and up to "
        problem += f"{engine.num_sequences} are decoded at once; vLLM makes the others wait"
        severity = "warning" if engine.is_idle else "note"
        findings.append(Finding(severity, title, problem, is_of_layout=engine.is_idle))
    return findings


def _machine_findings(cfg: RunConfig, options: DoctorOptions) -> list[Finding]:
    wanted, node, findings = gpus_wanted(cfg), options.gpus_per_node, []
    parallel, engine = cfg.parallel, cfg.engine
    if options.num_gpus is not None and wanted > options.num_gpus:
        engines = f"engines {engine.num_replicas} replicas x {engine.ranks}"
        limit = f"{wanted} GPUs, and there are {options.num_gpus}"
        subject, problem = "--engine.num_replicas", f"trainer {parallel.world_size} + {engines} = {limit}"
        remedy = "The trainer leaves no GPU for an engine: lower --parallel.world_size"
        if is_supervised(cfg):
            subject, problem, remedy = "--parallel.world_size", f"trainer {limit}", "Lower the ranks of the trainer"
        elif engine.placement == "colocated":
            subject, problem = "--parallel.world_size", f"trainer {parallel.world_size} and {engines} on {limit}"
            remedy = "Lower the ranks of trainer and engines"
        elif options.num_gpus - parallel.world_size >= engine.ranks:
            remedy = ""
        findings.append(Finding("error", subject, problem, remedy))
    if wanted > node and cfg.weight_sync.transport == "ipc":
        problem = f"{wanted} GPUs are on more than one node of {node}, and CUDA IPC ends at a node"
        findings.append(Finding("error", "--weight_sync.transport", problem, "Choose auto", choices=("auto",)))
    for end, degree, each in (
        ("parallel", parallel.tensor, "in every layer"),
        ("engine", 1 if is_supervised(cfg) else engine.tensor, "for a token"),
    ):
        if degree > node:
            problem = f"{degree} ranks are on more than one node of {node}; they all-reduce several times {each}"
            findings.append(Finding("warning", f"--{end}.tensor", problem, is_of_layout=True))
    ranks = parallel.expert * parallel.expert_tensor
    if cfg.model.is_moe and ranks > node:
        problem = f"tokens travel between nodes of {node}: experts are spread over {ranks} ranks"
        findings.append(Finding("note", "--parallel.expert", problem))
    return findings


def gpus_wanted(cfg: RunConfig) -> int:
    if is_supervised(cfg):
        return cfg.parallel.world_size
    engines = cfg.engine.num_replicas * cfg.engine.ranks
    is_colocated = cfg.engine.placement == "colocated"
    return max(cfg.parallel.world_size, engines) if is_colocated else cfg.parallel.world_size + engines
