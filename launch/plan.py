"""From a configuration and a cluster to the roles of a job, or to every reason why there is none.

In: a :class:`Request`. Out: a :class:`Plan`. Starts nothing and needs no Slurm, no GPU and no torch; reads the files
that the configuration names, as ``doctor`` does.
"""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path

from launch import user_files
from launch.cluster import Cluster
from launch.layout import Layout, Need, Place, plan_layout
from launch.spec import JobSpec, Kind, Role, nodes_in_words
from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.preflight import rules
from megatron_fp8rl.preflight.diagnosis import DoctorOptions, diagnose
from megatron_fp8rl.preflight.findings import arguments

TRAINING_JOBS = ("train", "rl", "sft")
REMOTE = ("--engine.placement", "remote")  # the engines are where agents started them


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a user asked for."""

    job: str  # a word of --job
    cluster: Cluster
    config_name: str = ""  # CONFIG as it was typed
    cfg: RunConfig | None = None  # with the overrides
    overrides: tuple[str, ...] = ()  # words that changed fields
    nodes: int | None = None  # of trainer and replicas; None: as few as possible
    words: tuple[str, ...] = ()  # further words for the job's own program


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A job, or what is wrong. ``spec`` is None exactly when there are problems."""

    spec: JobSpec | None
    problems: tuple[str, ...] = ()  # each in one sentence or two, with field, value and remedy
    warnings: tuple[str, ...] = ()


def plan_training(request: Request) -> Plan:
    """Warm start, reinforcement learning, or both in turn: a trainer on some nodes and replicas on these or others."""
    cfg, cluster = request.cfg, request.cluster
    assert cfg is not None
    needs_engines = request.job != "sft" and cfg.sampling.replay is None
    layout, found, between_nodes = None, [], []
    if not cluster.violations():
        layout, found = _lay_out(request, needs_engines)
        between_nodes = [] if layout is None else across_nodes(cfg, layout, needs_engines)
    # The doctor counts GPUs alone; the nodes that they are on are known here.
    problems, warnings = preflight(request, without="--weight_sync.transport" if between_nodes else None)
    if request.job == "rl" and cfg.model.hf_path is None:
        remedy = "Name a checkpoint, or use --job train"
        problems.append(f"--model.hf_path = None: rl starts from trained weights. {remedy}.")
    if request.job == "train" and not (cfg.model.hf_path or cfg.warm_start.steps or cfg.model.random):
        remedy = "Name a checkpoint, set --warm_start.steps, or train random weights by --model.random True"
        problems.append(f"--model.hf_path = None: {request.config_name} has no weights to start from. {remedy}.")
    problems += found
    if layout is not None and cluster.gpu is not None and layout.ranks_per_node % max(1, cfg.parallel.tensor):
        problems.append(
            f"--parallel.tensor = {cfg.parallel.tensor}: a tensor-parallel group would cross the edge of a node with "
            f"{layout.ranks_per_node} trainer ranks. Choose a divisor of {layout.ranks_per_node}, or other --nodes."
        )
    problems += between_nodes
    if problems or layout is None:
        return Plan(spec=None, problems=tuple(problems), warnings=tuple(warnings))
    if _shares_gpus(request) and layout.replicas:
        request = dataclasses.replace(request, overrides=(*request.overrides, "--weight_sync.transport", "gloo"))
        warnings.append(
            f"--engine.placement = 'colocated' on {len(layout.trainer_nodes)} nodes: weights travel through host memory, "
            "since NCCL cannot join two processes of one GPU. With engines on GPUs of their own they do not."
        )
    run_dir = absolute_run_dir(cfg, cluster)
    replicas = replica_roles(request, layout.replicas, run_dir)
    trainer = Role(
        name="trainer",
        kind="torchrun",
        nodes=layout.trainer_nodes,
        processes_per_node=layout.ranks_per_node,
        gpus=tuple(range(layout.ranks_per_node)) if cluster.gpus_per_node else (),
        command=("-m", "megatron_fp8rl", request.job, request.config_name, *trainer_words(request, run_dir, replicas)),
    )
    roles = (trainer, *replicas)
    return Plan(spec=job_spec(request, run_dir, roles, layout.nodes), warnings=tuple(warnings))


def preflight(request: Request, *, without: str | None = None) -> tuple[list[str], list[str]]:
    """(problems, warnings) of the cluster's file and of ``doctor``, for the GPUs of the cluster.

    ``without`` names a field, such as "--weight_sync.transport", about which the caller knows better.
    """
    cfg, cluster = request.cfg, request.cluster
    problems = [str(violation) for violation in cluster.violations()]
    warnings: list[str] = []
    if cfg is None:
        return problems, warnings
    if cluster.gpu is None:
        found = rules.check(cfg, accelerator="cpu")
        return problems + [str(violation) for violation in found if violation.field != without], warnings
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
    if found := problems or warnings:  # one remedy for all of them, with the last
        if diagnosis.change:
            found[-1] += f" All of it works with {arguments((), diagnosis.change)}."
        elif diagnosis.tried:
            found[-1] += f" No change was found that mends it: {diagnosis.tried}."
    return problems, warnings


def replica_roles(request: Request, places: tuple[Place, ...], run_dir: str) -> tuple[Role, ...]:
    """The rollout replicas of a run, as servers that the agents start and start again."""
    cluster = request.cluster
    roles = []
    for index, place in enumerate(places):
        command = (
            "-m",
            "megatron_fp8rl",
            "replica",
            request.config_name,
            *run_words(request, run_dir),
            *REMOTE,
            "--replica",
            str(index),
            "--endpoint",
            str(Path(run_dir) / "replicas" / f"rollout-{index}.json"),
        )
        if len(place.nodes) > 1:
            # vLLM's own flags, which one engine on several nodes takes on each of them.
            command += (
                "--nnodes",
                str(len(place.nodes)),
                "--node_rank",
                "{node_rank}",
                "--master_addr",
                "{head_address}",
                "--master_port",
                "{head_port}",
            )
        roles.append(
            Role(
                name=f"rollout-{index}",
                kind="replica",
                nodes=place.nodes,
                gpus=place.slots if cluster.gpus_per_node else (),
                command=command,
                restart=True,
                essential=False,
            )
        )
    return tuple(roles)


def run_words(request: Request, run_dir: str) -> tuple[str, ...]:
    """Overrides of every program of the run: the user's, and where the run's folder is."""
    # A brace in the path would be read as a field of output_dir.
    literal = run_dir.replace("{", "{{").replace("}", "}}")
    return (*request.overrides, "--output_dir", literal)


def trainer_words(request: Request, run_dir: str, replicas: tuple[Role, ...]) -> tuple[str, ...]:
    """Overrides of the program that trains: it finds its engines where the agents started them."""
    words = run_words(request, run_dir)
    if replicas:
        words += REMOTE
    if request.cfg is not None and request.cfg.observe.display == "live":
        words += ("--observe.display", "plain")  # nobody watches a log file
    return words


def job_spec(
    request: Request, run_dir: str, roles: tuple[Role, ...], nodes: int, *, name: str | None = None
) -> JobSpec:
    """A job of these roles, with what the cluster's file says about all."""
    cluster = request.cluster
    env = {"PYTHONUNBUFFERED": "1", **cluster.env}
    default = request.cfg.name if request.cfg is not None else request.job
    return JobSpec(
        name=name or default,
        run_dir=run_dir,
        roles=roles,
        nodes=nodes,
        max_restarts=cluster.max_restarts,
        save_signal_s=cluster.save_signal_s,
        env=env,
        own_files=() if request.cfg is None else user_files.reward_files(request.cfg),
        own_modules=() if request.cfg is None else user_files.modules(request.cfg, request.config_name),
    )


def task_plan(request: Request, run_dir: str, command: tuple[str, ...], *, name: str, kind: Kind = "command") -> Plan:
    """A job of one program on one node, which sees all of the node's GPUs."""
    problems, warnings = preflight(request)
    if request.nodes not in (None, 1):
        problems.append(f"--nodes {request.nodes}: {request.job} runs on one node. Leave it out.")
    if problems:
        return Plan(spec=None, problems=tuple(problems), warnings=tuple(warnings))
    role = Role(name="task", kind=kind, nodes=(0,), command=command)
    return Plan(spec=job_spec(request, run_dir, (role,), 1, name=name), warnings=tuple(warnings))


def absolute_run_dir(cfg: RunConfig, cluster: Cluster) -> str:
    """Where a run writes: its output_dir, below the cluster's run_root when it is relative."""
    root = Path(cluster.run_root) if cluster.run_root is not None else Path.cwd()
    return str(root / cfg.run_dir)


def lines(spec: JobSpec) -> list[str]:
    """The job in words, for a person to read before it is queued."""
    found = [f"job {spec.name!r}: {spec.nodes} {'node' if spec.nodes == 1 else 'nodes'}, run folder {spec.run_dir}"]
    for role in spec.roles:
        where = nodes_in_words(role.nodes)
        ranks = f", {role.processes_per_node} ranks on each" if role.kind == "torchrun" else ""
        gpus = f", GPUs {','.join(map(str, role.gpus))}" if role.gpus else ""
        again = ", restarted when it dies" if role.restart else ""
        found.append(f"  {role.name} ({role.kind}): {where}{ranks}{gpus}{again}")
        found.append(f"    python {' '.join(map(shlex.quote, role.command))}")
    names = [*sorted(spec.env)]  # values may be secrets
    return found + ([f"  variables: {', '.join(names)}"] if names else [])


def across_nodes(cfg: RunConfig, layout: Layout, needs_engines: bool) -> list[str]:
    """What does not reach from one node to another."""
    places = {node for place in layout.replicas for node in place.nodes} | set(layout.trainer_nodes[:1])
    if needs_engines and len(places | set(layout.trainer_nodes)) > 1 and cfg.weight_sync.transport == "ipc":
        return [
            f"--weight_sync.transport = {cfg.weight_sync.transport!r}: trainer and replicas are on {layout.nodes} nodes, and "
            "this ends at a node. Use --weight_sync.transport auto."
        ]
    return []


def _shares_gpus(request: Request) -> bool:
    assert request.cfg is not None
    return request.cfg.engine.placement == "colocated" and request.cluster.gpu is not None


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
        return None, []  # refused by the check of the configuration
    layout, found = plan_layout(need, nodes)
    found = [f"{sentence}." for sentence in found]
    if layout is not None and cluster.max_nodes is not None and layout.nodes > cluster.max_nodes:
        found.append(f"the job takes {layout.nodes} nodes, and CLUSTER.max_nodes = {cluster.max_nodes}.")
    if found:
        return None, found
    assert layout is not None
    if colocated and len(layout.trainer_nodes) == 1:
        # Rank 0 starts them itself, on the GPUs of its own node, and they sleep while it trains.
        layout = dataclasses.replace(layout, replicas=())
    return layout, []
