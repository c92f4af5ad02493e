"""The kinds of job: what follows CONFIG on the command line, and the plan of each.

    train, rl, sft   a trainer on some nodes, replicas on these or others
    eval             the same, for a checkpoint that is sampled and not trained: CONFIG --checkpoint PATH ...
    study            one node that runs the precisions in turn: CONFIG --seeds 1 2 3
    convert          one node that runs a checkpoint tool: TOOL SOURCE TARGET ... in the place of CONFIG

In: args of the command line, a cluster. Out: a :class:`~launch.plan.Plan`. Light: no torch, nothing is started.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.plan import TRAINING_JOBS, Plan, Request, absolute_run_dir, plan_training, task_plan
from megatron_fp8rl import cli, evaluate
from megatron_fp8rl.__main__ import COMMANDS
from megatron_fp8rl.config import ConfigError, RunConfig

KINDS = {
    "train": "warm start if the configuration has one, then reinforcement learning",
    "rl": "reinforcement learning from a Hugging Face checkpoint",
    "sft": "the supervised warm start alone",
    "eval": "accuracy and pass@k of a checkpoint",
    "study": "compare precisions over several seeds, on one node",
    "convert": "a checkpoint tool, on one node",
}


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a user typed behind the launcher's own options, understood."""

    cfg: RunConfig | None  # with the overrides; None for a job that has no configuration
    overrides: tuple[str, ...]  # args that changed fields
    args: tuple[str, ...]  # for the job's own program; paths in them are absolute


def read(job: str, target: str, args: Sequence[str]) -> Target:
    """Understand what is left of the command line: CONFIG, or the tool of a conversion, and the words behind.

    The configuration is not judged: that is the plan's task, for the GPUs of the cluster. Raises cli.UsageError for an
    unknown kind, configuration or tool, and SystemExit for an unknown option, as the programs themselves do.
    """
    if job not in KINDS:
        near = difflib.get_close_matches(job, KINDS, n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise cli.UsageError(f"--job {job!r} is unknown{hint}. Kinds: {', '.join(KINDS)}")
    if job == "convert":
        return Target(cfg=None, overrides=(), args=_tool_args(target, args))
    commands = {command.name: dataclasses.replace(command, checks_config=True) for command in COMMANDS}
    found = cli.parse([job, target, *args], commands)
    return Target(cfg=found.cfg, overrides=found.overrides, args=_option_args(found.options))


def plan(request: Request) -> Plan:
    """The job that was asked for, or every reason why it cannot be."""
    if request.job in TRAINING_JOBS:
        return plan_training(request)
    planners: dict[str, Callable[[Request], Plan]] = {"eval": plan_eval, "study": plan_study, "convert": plan_convert}
    return planners[request.job](request)


def plan_eval(request: Request) -> Plan:
    """A trainer that loads and publishes, replicas as for training. The checkpoint has to be where this can see it."""
    assert request.cfg is not None
    run_dir = absolute_run_dir(request.cfg, request.cluster)
    cfg = dataclasses.replace(request.cfg, output_dir=run_dir.replace("{", "{{").replace("}", "}}"))
    options = cli.parse(["eval", request.config_name, *request.args], _EVAL).options
    problems: list[str] = []
    try:
        model_dir = evaluate.plan(cfg, options).model_dir
    except ConfigError as error:
        problems += map(str, error.violations)
    else:
        request, refused = _with_tokenizer(request, model_dir, Path(run_dir))
        problems += refused
    planned = plan_training(request)
    if problems or planned.spec is None:
        return dataclasses.replace(planned, spec=None, problems=(*problems, *planned.problems))
    roles = tuple(
        dataclasses.replace(role, command=(*role.command, *request.args)) if role.name == "trainer" else role
        for role in planned.spec.roles
    )
    spec = dataclasses.replace(planned.spec, name=f"{planned.spec.name}_eval", roles=roles)
    return dataclasses.replace(planned, spec=spec)


def plan_study(request: Request) -> Plan:
    """All runs of the study in turn, in one process group on one node. What has finished is not run again."""
    cfg, cluster = request.cfg, request.cluster
    assert cfg is not None
    run_dir = absolute_run_dir(cfg, cluster)
    literal = run_dir.replace("{", "{{").replace("}", "}}")
    problems = []
    engines = cfg.engine.num_replicas * cfg.engine.ranks if cfg.engine.placement == "separate" else 0
    if not cluster.violations() and (took := cfg.parallel.world_size + engines) > cluster.slots_per_node:
        problems.append(
            f"--parallel.world_size = {cfg.parallel.world_size}: a run of the study takes {took} of the "
            f"{cluster.slots_per_node} slots of one node, on which a study runs. Lower it, or submit its runs as a sweep."
        )
    if cfg.algo.correction == "off":
        problems.append("--algo.correction = 'off': the study compares with and without. Name the one to study.")
    args = (*request.overrides, "--output_dir", literal, "--observe.display", "plain")
    command = ("-m", "megatron_fp8rl", "study", request.config_name, *args, *request.args)
    planned = task_plan(request, f"{run_dir.rstrip('/')}_study", command, name=f"{cfg.name}_study")
    return _refused(planned, problems)


def plan_convert(request: Request) -> Plan:
    """A checkpoint tool. The launcher's own files go below ``runs/``, for a tool knows no folder of a run."""
    tool, *rest = request.args
    paths = [word for word in rest[:2] if word.startswith("/")]
    name = f"{tool}_{Path(paths[-1]).name}" if paths else tool
    problems = []
    if paths and not Path(paths[0]).exists():
        problems.append(f"SOURCE = {paths[0]!r}: does not exist. Name a folder on a file system that the nodes share.")
    root = Path(request.cluster.run_root) if request.cluster.run_root is not None else Path.cwd()
    command = ("-m", "checkpoint_tools", tool, *rest)
    return _refused(task_plan(request, str(root / "runs" / name), command, name=name), problems)


_EVAL = {
    command.name: dataclasses.replace(command, checks_config=True) for command in COMMANDS if command.name == "eval"
}


def _refused(planned: Plan, problems: Sequence[str]) -> Plan:
    """The plan, or with problems of its own none."""
    if not problems:
        return planned
    return dataclasses.replace(planned, spec=None, problems=(*problems, *planned.problems))


def _option_args(options: object) -> tuple[str, ...]:
    """Options of a command as words again, those that were left out too; folders absolute, since nodes begin elsewhere."""
    args: list[str] = []
    if isinstance(options, evaluate.EvalOptions) and options.checkpoint:
        options = dataclasses.replace(options, checkpoint=str(Path(options.checkpoint).absolute()))
    for field in dataclasses.fields(options) if dataclasses.is_dataclass(options) else ():
        value = getattr(options, field.name)
        if value is None or value is False or value in ("", ()):
            continue
        if value is True:  # a flag
            args.append(f"--{field.name}")
            continue
        args += [f"--{field.name}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return tuple(args)


def _tool_args(tool: str, args: Sequence[str]) -> tuple[str, ...]:
    """The tool and its words, with SOURCE and TARGET, which come first, and ``--hf_config`` made absolute."""
    from checkpoint_tools.__main__ import COMMANDS as TOOLS

    if tool not in TOOLS:
        near = difflib.get_close_matches(tool, TOOLS, n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise cli.UsageError(f"--job convert runs a checkpoint tool, and {tool!r} is none{hint}: {', '.join(TOOLS)}")
    found = list(args)
    num_paths = next((i for i, word in enumerate(found) if word.startswith("-")), len(found))
    if not num_paths:
        raise cli.UsageError(f"--job convert: {tool} needs its folders, SOURCE and TARGET, before its options")
    places = set(range(num_paths)) | {
        i + 1 for i, word in enumerate(found[:-1]) if word in ("--hf_config", "--hf-config")
    }
    return (tool, *(str(Path(word).absolute()) if i in places else word for i, word in enumerate(found)))


def _with_tokenizer(request: Request, model_dir: Path | None, run_dir: Path) -> tuple[Request, list[str]]:
    """Tell trainer and replicas alike where config.json and the tokenizer of the checkpoint are."""
    if model_dir is None or model_dir.absolute() == run_dir / "model":
        return request, []  # the run's own folder, which all of them write or wait for
    has_weights = any(model_dir.glob("*.safetensors")) or (model_dir / ".metadata").is_file()
    if not has_weights:
        return request, [
            f"--output_dir = {str(run_dir)!r}: the tokenizer of the checkpoint is in {model_dir}, of another run. "
            f"Use --output_dir {model_dir.absolute().parent}."
        ]
    overrides = (*request.overrides, "--model.hf_path", str(model_dir.absolute()))
    return dataclasses.replace(request, overrides=overrides), []
