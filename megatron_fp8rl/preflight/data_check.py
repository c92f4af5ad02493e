"""Check the data of a run and its doubtful settings before engines start. Imports no torch."""

import itertools
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from megatron_fp8rl.config import KERNELS, ConfigError, RunConfig, Violation
from megatron_fp8rl.envs.source_kind import is_supervised, kind_of
from megatron_fp8rl.precision.hardware import Generation, cpu_has_avx512
from megatron_fp8rl.preflight.findings import Finding
from megatron_fp8rl.preflight.folder_check import check_folder
from megatron_fp8rl.preflight.rules import local_accelerator

_REWARDS = "--data.environments.rewards"
_GPU_FIELDS = {f"precision.kernels.{role}": "auto" for role in KERNELS if role.startswith("engine_")}
_GPU_FIELDS |= {"engine.sleep_level": 0}


def check_data(cfg: RunConfig) -> None:
    """Print the contents of the sources, the rewards of known answers, and warnings. A replay reads no data. Raises
    ConfigError for a source that cannot be used."""
    if cfg.sampling.replay is not None:
        return
    lines, findings = look_at_data(cfg)
    findings += doubts(cfg, local_accelerator())
    lines += [shown(finding, sys.stdout) for finding in findings if finding.severity != "error"]
    if cfg.observe.display != "none" and lines:
        print("\n".join(lines), flush=True)
    if errors := [finding for finding in findings if finding.severity == "error"]:
        values = {"--data.environments": [source.dataset for source in cfg.data.environments]}
        values |= {"--data.max_dropped": cfg.data.max_dropped, _tokenizer_field(cfg): _tokenizer(cfg)}
        values["--session.tool_parser"] = cfg.session.tool_parser
        values[_REWARDS] = [reward.function for source in cfg.data.environments for reward in source.rewards]
        raise ConfigError([Violation(e.subject, values[e.subject], e.problem, "Nothing was started") for e in errors])


def describe(cfg: RunConfig, *, with_gpus: bool = False) -> tuple[list[str], list[Finding]]:
    """(contents of the sources with the whole first prompt, warnings and errors), for a dry run. ``with_gpus``: the run
    will have GPUs, although this machine may have none."""
    if cfg.sampling.replay is not None:
        return ["data was not read: a replay reads none"], []
    folder_lines, errors = _look_at_folder(cfg)
    if errors:
        return [], errors
    lines, findings = look_at_data(cfg, whole_prompt=True)
    return folder_lines + lines, findings + doubts(cfg, "hopper" if with_gpus else local_accelerator())


def _look_at_folder(cfg: RunConfig) -> tuple[list[str], list[Finding]]:
    """(lines about the folder of the model, errors in it); nothing without torch, or without its config.json."""
    folder = None if cfg.model.hf_path is None else Path(cfg.model.hf_path)
    if folder is None or not (folder / "config.json").is_file() or find_spec("torch") is None:
        return [], []
    try:
        line = check_folder(cfg.model, folder)
    except ConfigError as error:
        texts = [f"{violation.field} = {violation.value!r}: {violation.problem}" for violation in error.violations]
        return [], [Finding("error", "--model.hf_path", text) for text in texts]
    return [line] if line else [], []


def shown(finding: Finding, stream: TextIO) -> str:
    """``WARNING: problem``; errors and doubtful rewards are red on a terminal, unless NO_COLOR is set."""
    text = f"{finding.severity.upper()}: {finding.problem}"
    is_red = (finding.severity == "error" or finding.subject == _REWARDS) and not os.environ.get("NO_COLOR")
    return f"\x1b[31m{text}\x1b[0m" if is_red and stream.isatty() else text


def look_at_data(cfg: RunConfig, *, whole_prompt: bool = False) -> tuple[list[str], list[Finding]]:
    """(lines for people, findings): reads rows, renders prompts, scores a few reference and empty answers. Imports take
    seconds."""
    if cfg.model.hf_path is None and not cfg.warm_start.steps and cfg.data.tokenizer == "character":
        return ["data was not read: neither a model nor a tokenizer is named"], _unloadable(cfg, with_classes=True)
    tokenizer = _tokenizer(cfg)
    if tokenizer != "character" and not Path(tokenizer).is_dir():
        return [f"data was not read: there is no tokenizer in {tokenizer}"], _unloadable(cfg, with_classes=True)
    try:
        from megatron_fp8rl.data.dropped import TooManyDroppedError
        from megatron_fp8rl.data.inspection import (
            check_rewards,
            inspect_ends,
            inspect_sources,
            inspect_training_rows,
            repetition,
            require_template,
            require_usable,
        )
        from megatron_fp8rl.data.tokenizer import load_tokenizer
    except ImportError as error:  # on a login node
        return [f"data was not read: {error}"], []
    if errors := _unloadable(cfg):
        return [], errors
    try:
        loaded = load_tokenizer(tokenizer)
        end_line, end_warnings = inspect_ends(cfg, loaded)
        require_template(cfg, loaded)
    except (ValueError, OSError, ImportError) as error:
        return [], [Finding("error", _tokenizer_field(cfg), str(error))]
    if problem := _tool_parser_problem(cfg):
        return [], [Finding("error", "--session.tool_parser", problem)]
    findings = [Finding("warning", "--sampling.stop_token_ids", text) for text in end_warnings]
    if not loaded.chat_template:
        end_line += "; the tokenizer has no chat template, and prompts are plain text"
    try:
        if is_supervised(cfg):
            lines, warnings = inspect_training_rows(cfg, loaded, whole=whole_prompt)
            findings += [Finding("warning", "--data.environments", text) for text in warnings]
            return [end_line, *lines], findings
        reports = inspect_sources(cfg, loaded)
    except TooManyDroppedError as error:
        return [], [Finding("error", "--data.max_dropped", str(error))]
    except (ValueError, OSError, ImportError) as error:
        return [], [Finding("error", "--data.environments", str(error))]
    lines = [end_line, *(line for report in reports for line in report.lines(whole_prompt))]
    try:
        require_usable(reports, cfg.data.max_dropped)
    except TooManyDroppedError as error:
        findings.append(Finding("error", "--data.max_dropped", str(error)))
    repeated = repetition(cfg, [report.num_rows for report in reports])
    for text in itertools.chain(repeated, *(report.warnings() for report in reports)):
        findings.append(Finding("warning", "--data.environments", text))
    for check in check_rewards(cfg.data, cfg.scoring.deadline_s, reports):
        lines.append(check.line())
        findings += [Finding("error" if check.is_broken else "warning", _REWARDS, text) for text in check.warnings()]
    return lines, findings


def check_agents(cfg: RunConfig) -> None:
    """Raise ConfigError if a worker cannot load the agents."""
    if errors := _unloadable(cfg):
        datasets = [source.dataset for source in cfg.data.environments]
        raise ConfigError([Violation(e.subject, datasets, e.problem, "Nothing was started") for e in errors])


def _unloadable(cfg: RunConfig, *, with_classes: bool = False) -> list[Finding]:
    """Errors of agents that a worker cannot load, and with ``with_classes`` of sources that are classes."""
    if find_spec("transformers") is None:  # on a login node, which may lack the packages of user code, too
        return []
    from megatron_fp8rl.envs.environment import EnvironmentSpecError, build_environment, environments_by_key

    sources, errors = environments_by_key(cfg.data.environments), []
    for source in sources.values():
        if with_classes and kind_of(source.dataset) == "class":
            try:
                build_environment(source)
            except EnvironmentSpecError as error:
                errors.append(str(error))
    agents = {key: {"agent": source.agent, "options": source.agent_options} for key, source in sources.items()}
    agents = {key: fields for key, fields in agents.items() if fields["agent"]}
    if agents:
        from megatron_fp8rl.rollout.agents.agent_process import load_problem

        errors += [error] if (error := load_problem(agents, cfg.scoring)) else []
    return [Finding("error", "--data.environments", error) for error in errors]


def _tool_parser_problem(cfg: RunConfig) -> str:
    """Why vLLM's parser of tool calls cannot be used; empty if it can, without agents, or without vLLM."""
    if not cfg.session.tool_parser or not any(source.agent for source in cfg.data.environments):
        return ""
    from megatron_fp8rl.rollout.agents.tool_calls import load_problem

    return load_problem(cfg.session.tool_parser, _tokenizer(cfg))


def _tokenizer(cfg: RunConfig) -> str:
    return cfg.model.hf_path or cfg.data.tokenizer


def _tokenizer_field(cfg: RunConfig) -> str:
    return "--data.tokenizer" if cfg.model.hf_path is None else "--model.hf_path"


def doubts(cfg: RunConfig, accelerator: Generation) -> list[Finding]:
    """Warnings about settings that work and are probably not intended."""
    warnings: dict[str, str] = {}  # by field
    num_updates, engine, sampling = cfg.num_steps * cfg.algo.updates_per_step, cfg.engine, cfg.sampling
    if 0 < num_updates <= (warmup := cfg.optim.warmup_steps):
        problem = f"--optim.warmup_steps {warmup} is longer than the run of {num_updates} updates, "
        warnings["optim.warmup_steps"] = f"{problem}which ends at {num_updates / warmup:.2g} of the learning rate"
    for path, default in _GPU_FIELDS.items() if accelerator == "cpu" and engine.placement != "remote" else ():
        if (value := cfg.value(path)) != default:
            warnings[path] = f"--{path} {value} has no effect without a GPU"
    if accelerator == "cpu" and engine.kv_cache_dtype == "fp8" and not cpu_has_avx512():
        problem = "vLLM supports an FP8 KV cache on GPUs and on CPUs with AVX-512, which this machine lacks"
        warnings["engine.kv_cache_dtype"] = problem
    if sampling.window_groups > (most := sampling.max_staleness * sampling.prompts_per_step) > 0:
        warnings["sampling.window_groups"] = (
            f"groups stay {sampling.window_groups / sampling.prompts_per_step:g} steps in a window of "
            f"{sampling.window_groups} on average, and tokens older than --sampling.max_staleness "
            f"{sampling.max_staleness} are not trained; up to {most} groups most are (docs/agents.md)"
        )
    if cfg.precision.exact is True and (causes := _without_repetition(cfg)):
        problem = f"--precision.exact True: the run will not repeat bit by bit, because of {' and '.join(causes)}"
        warnings["precision.exact"] = f"{problem} (docs/operations.md)"
    if engine.placement == "remote" and "LAUNCH_DIR" not in os.environ:
        problem = "--engine.placement remote: this command starts no engines and waits for them "
        warnings["engine.placement"] = f"{problem}{engine.start_s:g} s; `python -m launch` starts them"
    return [Finding("warning", f"--{path}", problem) for path, problem in warnings.items()]


def _without_repetition(cfg: RunConfig) -> list[str]:
    """The settings of a run whose results depend on time or chance."""
    staleness, sources = cfg.sampling.max_staleness, cfg.data.environments
    causes = [f"--sampling.max_staleness {staleness}"] if staleness else []
    causes += ["agents"] if any(source.agent for source in sources) else []
    is_judged = any(reward.function == "judge" for source in sources for reward in source.rewards)
    return [*causes, "the reward judge"] if is_judged else causes
