"""The ``grpo`` command: a run from a model's folder, rows of data and a reward, without a line of Python.

Out: a complete ``RunConfig``. Architecture, tokenizer and chat template come from the folder, and the layout from
``preflight/auto_layout.py``. Imports nothing heavy.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_fp8rl import cli
from megatron_fp8rl.algo.near_matches import near_matches
from megatron_fp8rl.commands import train
from megatron_fp8rl.config import (
    AlgoConfig,
    CheckpointConfig,
    ConfigError,
    DataConfig,
    EngineConfig,
    EnvironmentConfig,
    ModelConfig,
    ObserveConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    RewardConfig,
    RunConfig,
    SamplingConfig,
    ScoringConfig,
    Violation,
)
from megatron_fp8rl.data import weight_files
from megatron_fp8rl.data.gguf_folder import model_folder
from megatron_fp8rl.envs.source_kind import VERIFIERS, has_rows, is_supervised, kind_of, short_name
from megatron_fp8rl.kernels.compile_cache import gpus
from megatron_fp8rl.names.registry import from_hf_config
from megatron_fp8rl.preflight import auto_layout, rules
from megatron_fp8rl.preflight.assessment import DoctorOptions
from megatron_fp8rl.preflight.diagnosis import diagnose
from megatron_fp8rl.preflight.doctor import headline
from megatron_fp8rl.preflight.memory import GIB, GpuName

_VERIFIERS = "megatron_fp8rl.envs.libraries.verifiers"
_TASKS = f"env:{_VERIFIERS}:Tasks"
_PROMPT_TOKENS, _COMPLETION_TOKENS = 1024, 3072


@dataclass(frozen=True, kw_only=True)
class GrpoOptions:
    """Model, data and reward; all fields of a configuration are options as well."""

    model: str = ""  # folder of a Hugging Face model (config.json, tokenizer, weights), or FILE.gguf
    data: tuple[str, ...] = ()  # files, folders, hub:NAME, verifiers:NAME, env:module:Class, reasoning-gym generators
    reward: tuple[str, ...] = ()  # for rows: exact, number, choice, math, code, ..., model:DIR, or FILE.py:function
    # FILE.py:function or module:function that plays a session for each completion (docs/agents.md). Its options are
    # typed as --agent_options.NAME VALUE.
    agent: str = ""
    eval: tuple[str, ...] = ()  # held-out rows, in the order of --data
    gpus: int | None = None  # GPUs of trainer and engines; None: those of this machine; 0: the CPU
    gpu: GpuName | None = None  # GPU model to plan for; None: the GPU of this machine, else h200


def configure(
    options: GrpoOptions, override: Callable[[RunConfig], RunConfig], *, needs_reward: bool = True
) -> tuple[RunConfig, list[str]]:
    """(configuration, lines that explain it). ``override`` applies the user's fields, before and after the choice.
    Raises ConfigError with every mistake in the options."""
    errors = _problems(options, needs_reward)
    typed, override = override, lambda cfg: _with_equal_tasks(typed(cfg))
    model, folder = read_model(options.model, errors)
    errors += _gpu_problems(options.gpus)
    if errors or model is None:
        raise ConfigError([*errors, *_source_mistakes(options)])
    return with_layout(_base(options, folder, model), options.gpus, options.gpu, override)


def read_model(name: str, errors: list[Violation]) -> tuple[ModelConfig | None, Path]:
    """(architecture, folder) of ``--model``; adds what is wrong to ``errors``, and then there is no architecture."""
    folder = Path(name).expanduser()
    if not name:
        remedy = "Name the folder of a Hugging Face model; with --model.random True its weights are not read"
        errors.insert(0, Violation("--model", "", "there is no model to train", remedy))
        return None, folder
    try:
        folder = model_folder(folder)
        return model_in(folder), folder
    except (OSError, ValueError) as error:
        errors.append(Violation("--model", name, str(error), "Name another folder"))
        return None, folder


def with_layout(
    cfg: RunConfig, gpus: int | None, gpu: GpuName | None, override: Callable[[RunConfig], RunConfig]
) -> tuple[RunConfig, list[str]]:
    """``cfg`` with a layout for ``gpus`` GPUs of the kind ``gpu``, or of this machine, and lines that explain it."""
    if errors := _gpu_problems(gpus):
        raise ConfigError(errors)
    cfg = override(cfg)
    if cfg.engine.speculation == "mtp" and cfg.model.hf_path is not None and not cfg.model.num_mtp_layers:
        stored = model_in(Path(cfg.model.hf_path), with_drafts=True)
        cfg = replace(cfg, model=replace(cfg.model, num_mtp_layers=stored.num_mtp_layers))
    if cfg.model.random:
        cfg = replace(cfg, model=replace(cfg.model, hf_path=None))
    num_gpus = _local_gpus()[0] if gpus is None else gpus
    return _on_gpus(cfg, gpu, num_gpus, override) if num_gpus else _on_cpu(cfg, override)


def _gpu_problems(gpus: int | None) -> list[Violation]:
    if gpus is None or gpus >= 0:
        return []
    return [Violation("--gpus", gpus, "is below 0", "Give a number of GPUs, or 0 for the CPU")]


def model_in(folder: Path, *, with_drafts: bool = False) -> ModelConfig:
    """The architecture of a folder, with ``hf_path`` set. Raises ValueError if it is missing or unsupported.
    ``with_drafts``: with its multi-token prediction layers."""
    if not folder.is_dir():
        names = [entry.name for entry in folder.parent.iterdir() if entry.is_dir()] if folder.parent.is_dir() else []
        of_hub = f"; fetch it from the hub: hf download {folder} --local-dir FOLDER" if len(folder.parts) == 2 else ""
        raise ValueError(f"is not a folder{near_matches(folder.name, names) or of_hub}")
    file = folder / "config.json"
    if weight_files.is_adapter(folder):
        raise ValueError(weight_files.adapter_problem(folder))
    if not file.is_file():
        files = sorted(folder.glob("*.gguf"))
        raise ValueError(f"has no config.json{f'; name the GGUF file itself: {files[0]}' if files else ''}")
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"config.json is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError("config.json is not a JSON object")
    return replace(from_hf_config(config, keep_mtp=with_drafts, fp8_weights=True), hf_path=str(folder.resolve()))


def _problems(options: GrpoOptions, needs_reward: bool) -> list[Violation]:
    errors: list[tuple[str, object, str, str]] = []
    if not options.data:
        errors.append(("--data", "", "there is nothing to learn", "Name a file, such as train.jsonl"))
    rows = [name for name in options.data if has_rows(name)]
    if rows and needs_reward and not options.reward and not options.agent:
        remedy = "Name a reward: exact, number, choice, math, code, or FILE.py:function"
        errors.append(("--reward", "", f"nothing scores the answers to {rows[0]}", remedy))
    if options.reward and options.data and not rows:
        errors.append(
            ("--reward", options.reward, f"{', '.join(options.data)} scores its own problems", "Leave it out")
        )
    if nameless := [name for name in options.data if name.startswith(VERIFIERS) and name.endswith((":", "/"))]:
        errors.append(("--data", nameless[0], "names no taskset", "Write verifiers:NAME or verifiers:dir/file.py"))
    if options.agent and options.data and all(name.startswith(VERIFIERS) for name in options.data):
        errors.append(("--agent", options.agent, f"{options.data[0]} has an agent of its own", "Leave it out"))
    if len(options.eval) > len(rows):
        problem = f"there are {len(options.eval)} held-out sources and {len(rows)} sources of rows to train on"
        errors.append(("--eval", options.eval, problem, "Name a held-out source for each --data, in the same order"))
    return [Violation(*error) for error in errors]


def _source_mistakes(options: GrpoOptions) -> list[Violation]:
    """Mistakes of data and rewards, which do not depend on the model. A missing reward is reported elsewhere."""
    size = dict.fromkeys(("num_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"), 1)
    model = ModelConfig(family="llama", vocab_size=1, **size)
    cfg = RunConfig(name="grpo", model=model, data=DataConfig(environments=_environments(options)))
    violations = rules.check_sources(cfg)  # without the user's fields, such as options of the agent
    return [violation for violation in violations if not violation.field.endswith((".rewards", ".agent_options"))]


def _environments(options: GrpoOptions) -> tuple[EnvironmentConfig, ...]:
    rewards = tuple(map(_reward, options.reward))
    agent = absolute(options.agent) if ".py:" in options.agent else options.agent
    held_out = map(absolute, options.eval)
    return tuple(
        EnvironmentConfig(dataset=absolute(name), rewards=rewards, eval=next(held_out, ""), agent=agent)
        if has_rows(name)
        else _taskset(name.removeprefix(VERIFIERS))
        if name.startswith(VERIFIERS)
        else EnvironmentConfig(dataset=name, agent=agent)
        for name in options.data
    )


def _base(options: GrpoOptions, folder: Path, model: ModelConfig) -> RunConfig:
    prompt = min(_PROMPT_TOKENS, model.max_sequence_tokens // 3)
    return RunConfig(
        name=f"{folder.resolve().name.removesuffix('.hf')}-{'-'.join(short_name(name) for name in options.data)}",
        model=model,
        optim=OptimConfig(
            warmup_steps=10, weight_decay=0.1, max_tokens_per_microbatch=max(8192, prompt + _COMPLETION_TOKENS)
        ),
        sampling=SamplingConfig(
            prompts_per_step=64,
            completions_per_prompt=16,
            max_prompt_tokens=prompt,
            max_completion_tokens=min(_COMPLETION_TOKENS, model.max_sequence_tokens - prompt),
        ),
        engine=EngineConfig(deadline_scale=3.0),
        data=DataConfig(environments=_environments(options), tokenizer=str(folder.resolve())),
        scoring=ScoringConfig(num_workers=4),
        algo=AlgoConfig(clip_high=0.28),
        checkpoint=CheckpointConfig(every_steps=20, every_minutes=30),
        observe=ObserveConfig(eval_every=20),
        num_steps=200,
    )


def _taskset(taskset: str) -> EnvironmentConfig:
    options = {"taskset": absolute(taskset) if taskset.endswith(".py") else taskset}
    return EnvironmentConfig(dataset=_TASKS, options=options, agent=f"{_VERIFIERS}:rollout", agent_options=options)


def _with_equal_tasks(cfg: RunConfig) -> RunConfig:
    """Give the tasks of a taskset the options that its agent has for them."""
    sources = (
        replace(
            source,
            options={key: source.agent_options[key] for key in ("taskset", "options") if key in source.agent_options},
        )
        if source.dataset == _TASKS
        else source
        for source in cfg.data.environments
    )
    return replace(cfg, data=replace(cfg.data, environments=tuple(sources)))


def _reward(name: str) -> RewardConfig:
    kind, _, where = name.partition(":")
    if kind == "model" and where:
        option = {"url": where} if "://" in where else {"folder": os.path.abspath(os.path.expanduser(where))}
        return RewardConfig(function="model", options=option)
    return RewardConfig(function=absolute(name) if ".py:" in name else name)


def absolute(name: str) -> str:
    """An absolute path, valid on other nodes; names of the hub stay."""
    return name if kind_of(name) == "hub" else os.path.abspath(os.path.expanduser(name))


def _on_cpu(cfg: RunConfig, override: Callable[[RunConfig], RunConfig]) -> tuple[RunConfig, list[str]]:
    notes = ["no GPU: trainer and engine share the CPU, and FP8 is emulated"]
    length = cfg.sampling.max_prompt_tokens + cfg.sampling.max_completion_tokens
    cfg = replace(
        cfg,
        engine=replace(cfg.engine, kv_cache_bytes=256 << 20, graphs="none"),
        sampling=cfg.sampling
        if is_supervised(cfg)
        else replace(cfg.sampling, prompts_per_step=8, completions_per_prompt=8),
        optim=replace(cfg.optim, max_tokens_per_microbatch=max(length + 16, 4096)),
        scoring=replace(cfg.scoring, num_workers=1),
    )
    cfg = override(cfg)
    if cfg.precision == PrecisionConfig() and (reason := _reason_against_fp8(cfg)):
        fp8, cfg = cfg, replace(cfg, precision=PrecisionConfig(trainer="bf16", rollout="bf16"))
        notes += [f"BF16 at both ends: {reason}", *_widening(fp8)]
    return cfg, notes


def _reason_against_fp8(cfg: RunConfig) -> str:
    """Why matrices of this model cannot be FP8; empty if they can."""
    bf16 = replace(cfg, precision=PrecisionConfig(trainer="bf16", rollout="bf16"))
    others = {str(violation) for violation in rules.check(bf16)}
    return next((v.problem for v in rules.check(cfg) if str(v) not in others), "")


def _widening(cfg: RunConfig) -> list[str]:
    """The command after which this model's sizes tile; empty if they do, or if it cannot be widened."""
    folder, model = cfg.model.hf_path, cfg.model
    if folder is None or model.mla or model.gdn or all(v.code != "untiled_size" for v in rules.check(cfg)):
        return []
    return [f"for FP8, widen its sizes without a change of function: python -m checkpoint_tools widen {folder} FOLDER"]


def _on_gpus(
    cfg: RunConfig, gpu: GpuName | None, num_gpus: int, override: Callable[[RunConfig], RunConfig]
) -> tuple[RunConfig, list[str]]:
    memory_gib = _local_gpus()[1]
    kind = gpu or _kind_of(memory_gib)
    machines = DoctorOptions(
        gpu=kind,
        memory_gib=memory_gib or None if gpu is None else None,
        gpus_per_node=min(num_gpus, 8),
        num_gpus=num_gpus,
    )
    together = replace(cfg.engine, num_replicas=num_gpus, placement="colocated")
    start = override(replace(cfg, engine=together, parallel=ParallelConfig(world_size=num_gpus)))
    if start.engine.placement == "colocated":
        start = override(replace(start, engine=replace(start.engine, sleep_level=2)))
    cfg, change, how = auto_layout.fastest(start, machines, override)
    widening = _widening(start) if cfg.precision.rollout == "bf16" else []
    if violations := rules.check(cfg, accelerator=machines.hardware.generation):
        raise ConfigError(violations)  # otherwise every layout fails, and the error would blame memory
    diagnosis = diagnose(cfg, machines)
    notes = [headline(diagnosis), *widening]
    if change:
        chosen = ", ".join(f"{path} {value}" for path, value in change)
        notes.append(f"{how}, with long microbatches: {chosen}")
    subjects = {"one GPU of both"}
    for estimate in (diagnosis.trainer, diagnosis.engine.estimate if diagnosis.engine else None):
        if estimate is not None:
            subjects.add(estimate.title)
            notes.append(
                f"{estimate.title}: {estimate.total_bytes / GIB:.1f} of {estimate.capacity_bytes / GIB:.1f} GiB per GPU"
            )
    if errors := [f for f in diagnosis.findings if f.severity == "error" and f.subject in subjects]:
        remedy = "No tried layout fits; use more or larger GPUs, shorter completions, or fewer layers"
        problems = "; ".join(f"{finding.subject}: {finding.problem}" for finding in errors)
        raise ConfigError([Violation("--gpus", num_gpus, f"{problems} ({kind.upper()})", remedy)])
    return cfg, notes


def _local_gpus() -> tuple[int, float]:
    """(number of GPUs of this machine, GiB of the first)."""
    mebibytes = [int(text) for text in gpus("memory.total") if text.isdigit()]
    return len(mebibytes), mebibytes[0] / 1024 if mebibytes else 0.0


def _kind_of(memory_gib: float) -> GpuName:
    return "h200" if not memory_gib or 100 < memory_gib < 160 else "b200" if memory_gib >= 160 else "h100"


COMMAND = cli.Command(
    name="grpo",
    summary="reinforcement learning of your own model: --model DIR --data FILE --reward NAME",
    run=lambda invocation: train.start(invocation.cfg),
    options=GrpoOptions,
    configure=configure,
    reads_data=True,
)
