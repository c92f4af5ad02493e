"""Plan the roles of a job from a configuration and a cluster, or list every error.

Starts nothing and needs no Slurm, GPU or torch. Reads the files named in the configuration, like ``doctor``.
"""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path

from launch import user_files
from launch.cluster import Cluster
from launch.layout import Layout, Need, Place, plan_layout
from launch.spec import TRAINING_JOBS, WITHOUT_ENGINES, JobSpec, Role, endpoint_file, escape_braces, format_nodes
from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.data import run_folder
from megatron_fp8rl.envs.source_kind import job_of
from megatron_fp8rl.preflight import rules
from megatron_fp8rl.preflight.assessment import DoctorOptions
from megatron_fp8rl.preflight.diagnosis import diagnose
from megatron_fp8rl.preflight.findings import arguments

REMOTE = ("--engine.placement", "remote")  # agents start the engines


@dataclass(frozen=True, kw_only=True)
class Request:
    job: str  # value of --job
    cluster: Cluster
    config_name: str = ""  # CONFIG as typed
    cfg: RunConfig | None = None  # with overrides applied
    overrides: tuple[str, ...] = ()  # arguments that changed fields
    nodes: int | None = None  # for trainer and replicas; None: as few as possible
    args: tuple[str, ...] = ()  # additional arguments for the job's program


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A job or its problems. ``spec`` is None exactly if there are problems."""

    spec: JobSpec | None
    problems: tuple[str, ...] = ()  # each with field, value and remedy
    warnings: tuple[str, ...] = ()


def plan_training(request: Request) -> Plan:
    cfg, cluster = request.cfg, request.cluster
    assert cfg is not None
    needs_engines = request.job not in WITHOUT_ENGINES and cfg.sampling.replay is None
    layout, layout_problems, transport_problems = None, [], []
    if not cluster.violations():
        layout, layout_problems = _lay_out(request, needs_engines)
        transport_problems = (
            [] if layout is None else _transport_problems(cfg.weight_sync.transport, layout, needs_engines)
        )
    # The doctor checks GPU counts; only this planner knows the nodes.
    problems, warnings = preflight(request, without="--weight_sync.transport" if transport_problems else None)
    if request.job in TRAINING_JOBS:
        resumed = dataclasses.replace(cfg, output_dir=escape_braces(absolute_run_dir(cfg, cluster)))
        problems += map(str, run_folder.resume_violations(resumed))
    if request.job in TRAINING_JOBS and request.job != (wanted := job_of(cfg)):
        warm_start_alone = request.job == "sft" and wanted in ("rl", "distill")
        if not warm_start_alone and (request.job, wanted) != ("train", "rl"):
            problem = f"{request.config_name} describes another job. Use --job {wanted}, or another configuration"
            problems.append(f"--job = {request.job!r}: {problem}.")
    if request.job == "rl" and cfg.model.hf_path is None:
        remedy = "Name a checkpoint, or use --job train"
        problems.append(f"--model.hf_path = None: rl starts from trained weights. {remedy}.")
    if request.job == "train" and not (cfg.model.hf_path or cfg.warm_start.steps or cfg.model.random):
        remedy = "Name a checkpoint, set --warm_start.steps, or train random weights by --model.random True"
        problems.append(f"--model.hf_path = None: {request.config_name} has no weights to start from. {remedy}.")
    problems += layout_problems
    if layout is not None and cluster.gpu is not None and layout.ranks_per_node % max(1, cfg.parallel.tensor):
        problems.append(
            f"--parallel.tensor = {cfg.parallel.tensor}: a tensor-parallel group would cross the edge of a node with "
            f"{layout.ranks_per_node} trainer ranks. Choose a divisor of {layout.ranks_per_node}, or other --nodes."
        )
    problems += transport_problems
    if problems or layout is None:
        return Plan(spec=None, problems=tuple(problems), warnings=tuple(warnings))
    if cfg.engine.placement == "colocated" and cluster.gpu is not None and layout.replicas:
        request = dataclasses.replace(request, overrides=(*request.overrides, "--weight_sync.transport", "gloo"))
        warnings.append(
            f"--engine.placement = 'colocated' on {len(layout.trainer_nodes)} nodes: weights are sent through host "
            "memory, because NCCL cannot connect two processes on one GPU. Separate engine GPUs avoid this."
        )
    run_dir = absolute_run_dir(cfg, cluster)
    replicas = replica_roles(request, layout.replicas, run_dir)
    trainer = Role(
        name="trainer",
        kind="torchrun",
        nodes=layout.trainer_nodes,
        processes_per_node=layout.ranks_per_node,
        gpus=tuple(range(layout.ranks_per_node)) if cluster.gpus_per_node else (),
        command=("-m", "megatron_fp8rl", request.job, request.config_name, *trainer_args(request, run_dir, replicas)),
    )
    roles = (trainer, *replicas)
    return Plan(spec=job_spec(request, run_dir, roles, layout.nodes), warnings=tuple(warnings))


def preflight(request: Request, *, without: str | None = None) -> tuple[list[str], list[str]]:
    """(problems, warnings) of the cluster file and of ``doctor``, for the cluster's GPUs. ``without``: a field that the
    caller checks, such as "--weight_sync.transport"."""
    cfg, cluster = request.cfg, request.cluster
    problems = [str(violation) for violation in cluster.violations()]
    warnings: list[str] = []
    if cfg is None:
        return problems, warnings
    if cluster.gpu is None:
        violations = rules.check(cfg, accelerator="cpu")
        return problems + [str(violation) for violation in violations if violation.field != without], warnings
    options = DoctorOptions(gpu=cluster.gpu, gpus_per_node=max(1, cluster.gpus_per_node))
    diagnosis = diagnose(cfg, options, config_name=request.config_name, overrides=request.overrides)
    for finding in diagnosis.findings:
        if finding.subject == without:
            continue
        sentences = [f"{finding.subject}: {finding.problem}.", f"{finding.remedy}." if finding.remedy else ""]
        if finding.change:
            sentences.append(f"Try {arguments((), finding.change)}.")
        elif finding.command:
            sentences.append(f"Try `{finding.command}`.")
        text = " ".join(sentence for sentence in sentences if sentence)
        if finding.severity == "error":
            problems.append(text)
        elif finding.severity == "warning":
            warnings.append(text)
    if texts := problems or warnings:  # append the common remedy to the last text
        if diagnosis.change:
            texts[-1] += f" All of it works with {arguments((), diagnosis.change)}."
        elif diagnosis.tried:
            texts[-1] += f" No automatic fix found. Tried: {diagnosis.tried}."
    return problems, warnings


def replica_roles(request: Request, places: tuple[Place, ...], run_dir: str) -> tuple[Role, ...]:
    """Roles of the rollout replicas: servers that agents start and restart."""
    roles = []
    for index, place in enumerate(places):
        name = f"rollout-{index}"
        command = ("-m", "megatron_fp8rl", "replica", request.config_name, *run_args(request, run_dir), *REMOTE)
        command += ("--replica", str(index), "--endpoint", str(endpoint_file(run_dir, name)))
        if len(place.nodes) > 1:
            # vLLM flags of a multi-node engine.
            command += ("--nnodes", str(len(place.nodes)), "--node_rank", "{node_rank}")
            command += ("--master_addr", "{head_address}", "--master_port", "{head_port}")
        gpus = place.slots if request.cluster.gpus_per_node else ()
        placed = {"nodes": place.nodes, "gpus": gpus, "command": command}
        roles.append(Role(name=name, kind="replica", restart=True, essential=False, **placed))
    return tuple(roles)


def run_args(request: Request, run_dir: str) -> tuple[str, ...]:
    """Overrides for every program of the run: the user's and the run's folder."""
    return (*request.overrides, "--output_dir", escape_braces(run_dir))


def trainer_args(request: Request, run_dir: str, replicas: tuple[Role, ...]) -> tuple[str, ...]:
    """Overrides for the trainer, which connects to the engines that the agents started."""
    args = run_args(request, run_dir)
    if replicas:
        args += REMOTE
    if request.cfg is not None and request.cfg.observe.display == "live":
        args += ("--observe.display", "plain")  # output goes to a log file
    return args


def job_spec(
    request: Request, run_dir: str, roles: tuple[Role, ...], nodes: int, *, name: str | None = None
) -> JobSpec:
    cluster, cfg = request.cluster, request.cfg
    return JobSpec(
        name=name or (cfg.name if cfg is not None else request.job),
        run_dir=run_dir,
        roles=roles,
        nodes=nodes,
        max_restarts=cluster.max_restarts,
        save_signal_s=cluster.save_signal_s,
        env={"PYTHONUNBUFFERED": "1", **cluster.env},
        user_files=() if cfg is None else user_files.function_files(cfg.data),
        user_modules=() if cfg is None else user_files.modules(cfg.algo, cfg.data, request.config_name),
    )


def task_plan(request: Request, run_dir: str, command: tuple[str, ...], *, name: str) -> Plan:
    """Plan a job of one program on one node with all its GPUs."""
    problems, warnings = preflight(request)
    if request.nodes not in (None, 1):
        problems.append(f"--nodes {request.nodes}: {request.job} runs on one node. Remove the option.")
    if problems:
        return Plan(spec=None, problems=tuple(problems), warnings=tuple(warnings))
    role = Role(name="task", kind="command", nodes=(0,), command=command)
    return Plan(spec=job_spec(request, run_dir, (role,), 1, name=name), warnings=tuple(warnings))


def absolute_run_dir(cfg: RunConfig, cluster: Cluster) -> str:
    """The run's absolute folder; a relative output_dir is below the cluster's run_root."""
    root = Path(cluster.run_root) if cluster.run_root is not None else Path.cwd()
    return str(root / cfg.run_dir)


def lines(spec: JobSpec) -> list[str]:
    text = [f"job {spec.name!r}: {spec.nodes} {'node' if spec.nodes == 1 else 'nodes'}, run folder {spec.run_dir}"]
    for role in spec.roles:
        where = format_nodes(role.nodes)
        ranks = f", {role.processes_per_node} ranks on each" if role.kind == "torchrun" else ""
        gpus = f", GPUs {','.join(map(str, role.gpus))}" if role.gpus else ""
        again = ", restarted when it dies" if role.restart else ""
        text.append(f"  {role.name} ({role.kind}): {where}{ranks}{gpus}{again}")
        text.append(f"    python {' '.join(map(shlex.quote, role.command))}")
    # Names only: values may be secrets.
    return text + ([f"  variables: {', '.join(sorted(spec.env))}"] if spec.env else [])


def _transport_problems(transport: str, layout: Layout, needs_engines: bool) -> list[str]:
    """Problems of transports that do not work between nodes."""
    nodes = {node for place in layout.replicas for node in place.nodes} | set(layout.trainer_nodes)
    if needs_engines and len(nodes) > 1 and transport == "ipc":
        return [
            f"--weight_sync.transport = {transport!r}: works within one node only, but trainer and "
            f"replicas are on {layout.nodes} nodes. Use --weight_sync.transport auto."
        ]
    return []


def _lay_out(request: Request, needs_engines: bool) -> tuple[Layout | None, list[str]]:
    cfg, cluster, nodes = request.cfg, request.cluster, request.nodes
    assert cfg is not None
    colocated = cfg.engine.placement == "colocated"
    need = Need(
        ranks=cfg.parallel.world_size,
        replicas=cfg.engine.num_replicas if needs_engines else 0,
        tensor=cfg.engine.ranks,
        slots=cluster.slots_per_node,
        shares_slots=colocated,
    )
    if nodes is not None and nodes < 1:
        return None, [f"--nodes {nodes} is below 1."]
    if min(need.ranks, need.tensor) < 1 or need.replicas < 0:
        return None, []  # rejected by the configuration check
    layout, sentences = plan_layout(need, nodes)
    problems = [f"{sentence}." for sentence in sentences]
    if layout is not None and cluster.max_nodes is not None and layout.nodes > cluster.max_nodes:
        problems.append(f"the job takes {layout.nodes} nodes, and CLUSTER.max_nodes = {cluster.max_nodes}.")
    if problems:
        return None, problems
    assert layout is not None
    if colocated and len(layout.trainer_nodes) == 1:
        # Rank 0 starts the replicas on its node's GPUs; they sleep during training.
        layout = dataclasses.replace(layout, replicas=())
    return layout, []
