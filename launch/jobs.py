"""Parses and plans each kind of job. Starts nothing; needs no torch.

train, rl   a trainer, and replicas on the same or other nodes; distill as well
sft, dpo    a trainer alone
eval        as train for a checkpoint, without training: CONFIG --checkpoint PATH ...
study       one node runs the precisions in turn: CONFIG --seeds 1 2 3
convert     one node runs a checkpoint tool: TOOL SOURCE TARGET ... instead of CONFIG
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.plan import Plan, Request, absolute_run_dir, plan_training, task_plan
from launch.spec import TRAINING_JOBS, escape_braces
from megatron_fp8rl import cli, evaluate
from megatron_fp8rl.__main__ import COMMANDS
from megatron_fp8rl.algo.near_matches import near_matches
from megatron_fp8rl.config import ConfigError, RunConfig

KINDS = {
    "train": "warm start if the configuration has one, then reinforcement learning",
    "rl": "reinforcement learning from a Hugging Face checkpoint",
    "distill": "on-policy distillation from the teachers of CONFIG",
    "sft": "supervised training on conversations, or the warm start of CONFIG alone",
    "dpo": "direct preference optimization on pairs of answers",
    "eval": "accuracy and pass@k of a checkpoint",
    "study": "compare precisions over several seeds, on one node",
    "convert": "a checkpoint tool, on one node",
}
_COMMANDS = {command.name: dataclasses.replace(command, checks_config=True) for command in COMMANDS}


@dataclass(frozen=True, kw_only=True)
class Target:
    """The parsed arguments that are not options of the launcher."""

    cfg: RunConfig | None  # with overrides applied; None for "convert"
    overrides: tuple[str, ...]  # arguments that changed fields
    args: tuple[str, ...]  # for the job's program; with absolute paths


def read(job: str, target: str, args: Sequence[str]) -> Target:
    """Parse CONFIG, or the tool of a conversion, and the remaining arguments. Raises cli.UsageError for an unknown
    configuration or tool, and SystemExit for an unknown option. The plan checks the configuration, for the cluster's
    GPUs."""
    if job == "convert":
        return Target(cfg=None, overrides=(), args=_tool_args(target, args))
    parsed = cli.parse([job, target, *args], _COMMANDS)
    return Target(cfg=parsed.cfg, overrides=parsed.overrides, args=_option_args(parsed.options))


def plan(request: Request) -> Plan:
    planners = {"eval": plan_eval, "study": plan_study, "convert": plan_convert}
    return plan_training(request) if request.job in TRAINING_JOBS else planners[request.job](request)


def plan_eval(request: Request) -> Plan:
    """A trainer that loads and publishes a checkpoint, and replicas. This machine must see the checkpoint."""
    assert request.cfg is not None
    run_dir = absolute_run_dir(request.cfg, request.cluster)
    cfg = dataclasses.replace(request.cfg, output_dir=escape_braces(run_dir))
    options = cli.parse(["eval", request.config_name, *request.args], _COMMANDS).options
    problems: list[str] = []
    try:
        model_dir = evaluate.plan(cfg, options).model_dir
    except ConfigError as error:
        problems += map(str, error.violations)
    else:
        request, refused = _with_tokenizer(request, model_dir, Path(run_dir))
        problems += refused
    planned = _with_problems(plan_training(request), problems)
    if planned.spec is None:
        return planned
    roles = tuple(
        dataclasses.replace(role, command=(*role.command, *request.args)) if role.name == "trainer" else role
        for role in planned.spec.roles
    )
    spec = dataclasses.replace(planned.spec, name=f"{planned.spec.name}_eval", roles=roles)
    return dataclasses.replace(planned, spec=spec)


def plan_study(request: Request) -> Plan:
    """All runs of the study in turn on one node. Finished runs are skipped."""
    cfg, cluster = request.cfg, request.cluster
    assert cfg is not None
    run_dir = absolute_run_dir(cfg, cluster)
    problems = []
    engines = cfg.engine.num_replicas * cfg.engine.ranks if cfg.engine.placement == "separate" else 0
    if not cluster.violations() and (slots := cfg.parallel.world_size + engines) > cluster.slots_per_node:
        problems.append(
            f"--parallel.world_size = {cfg.parallel.world_size}: a run of the study takes {slots} slots, and a study "
            f"runs on one node of {cluster.slots_per_node}. Lower it, or submit the runs as a sweep."
        )
    if cfg.algo.correction == "off":
        problems.append("--algo.correction = 'off': the study compares with and without. Name the correction to study.")
    args = (*request.overrides, "--output_dir", escape_braces(run_dir), "--observe.display", "plain")
    command = ("-m", "megatron_fp8rl", "study", request.config_name, *args, *request.args)
    planned = task_plan(request, f"{run_dir.rstrip('/')}_study", command, name=f"{cfg.name}_study")
    return _with_problems(planned, problems)


def plan_convert(request: Request) -> Plan:
    """A checkpoint tool. The launcher's files go below ``runs/``, because a tool has no run folder."""
    tool, *rest = request.args
    paths = [word for word in rest[:2] if word.startswith("/")]
    name = f"{tool}_{Path(paths[-1]).name}" if paths else tool
    problems = []
    if paths and not Path(paths[0]).exists():
        problems.append(f"SOURCE = {paths[0]!r}: does not exist. Name a folder on a file system that the nodes share.")
    root = Path(request.cluster.run_root) if request.cluster.run_root is not None else Path.cwd()
    command = ("-m", "checkpoint_tools", tool, *rest)
    return _with_problems(task_plan(request, str(root / "runs" / name), command, name=name), problems)


def _with_problems(planned: Plan, problems: Sequence[str]) -> Plan:
    if not problems:
        return planned
    return dataclasses.replace(planned, spec=None, problems=(*problems, *planned.problems))


def _option_args(options: object) -> tuple[str, ...]:
    """Options of a command as arguments, defaults included, with an absolute checkpoint path."""
    args: list[str] = []
    if isinstance(options, evaluate.EvalOptions) and options.checkpoint:
        options = dataclasses.replace(
            options, checkpoint=tuple(str(Path(path).absolute()) for path in options.checkpoint)
        )
    for field in dataclasses.fields(options) if dataclasses.is_dataclass(options) else ():
        value = getattr(options, field.name)
        if value is None or value is False or value in ("", ()):
            continue
        args.append(f"--{field.name}")
        if value is not True:  # not a flag
            args += map(str, value if isinstance(value, tuple) else [value])
    return tuple(args)


def _tool_args(tool: str, args: Sequence[str]) -> tuple[str, ...]:
    """The tool and its arguments, with absolute paths for SOURCE, TARGET and ``--hf_config``."""
    from checkpoint_tools.__main__ import COMMANDS as TOOLS

    if tool not in TOOLS:
        hint = near_matches(tool, TOOLS) or "."
        raise cli.UsageError(f"--job convert: {tool!r} is not a checkpoint tool{hint} Tools: {', '.join(TOOLS)}")
    num_paths = next((i for i, arg in enumerate(args) if arg.startswith("-")), len(args))
    if not num_paths:
        raise cli.UsageError(f"--job convert: {tool} needs its folders, SOURCE and TARGET, before its options")
    paths = {*range(num_paths), *(i + 1 for i, arg in enumerate(args) if arg in ("--hf_config", "--hf-config"))}
    return (tool, *(str(Path(arg).absolute()) if i in paths else arg for i, arg in enumerate(args)))


def _with_tokenizer(request: Request, model_dir: Path | None, run_dir: Path) -> tuple[Request, list[str]]:
    """Set ``model.hf_path`` for trainer and replicas to the folder of config.json and tokenizer."""
    if model_dir is None or model_dir.absolute() == run_dir / "model":
        return request, []  # the run's folder, which the trainer writes and replicas wait for
    has_weights = any(model_dir.glob("*.safetensors")) or (model_dir / ".metadata").is_file()
    if not has_weights:
        return request, [
            f"--output_dir = {str(run_dir)!r}: the tokenizer of the checkpoint is in {model_dir}, a folder of another "
            f"run. Use --output_dir {model_dir.absolute().parent}."
        ]
    overrides = (*request.overrides, "--model.hf_path", str(model_dir.absolute()))
    return dataclasses.replace(request, overrides=overrides), []
