"""Diagnose one run: mistakes, memory, tiles, precision, packages, and remedies.

In: a RunConfig and the GPUs it is meant for. Out: a :class:`Diagnosis`. Runs on any machine without a GPU or torch, and
takes about a second if it has to search for a layout. A change is proposed only if the configuration works with it.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

from megatron_fp8rl.config import KERNELS, RunConfig
from megatron_fp8rl.precision.hardware import Generation, cpu_has_avx512
from megatron_fp8rl.precision.parameters import ParameterCount, count
from megatron_fp8rl.preflight import auto_layout, packages, precision_table, rules, tiling
from megatron_fp8rl.preflight.assessment import DoctorOptions, assess, gpus_wanted
from megatron_fp8rl.preflight.engine_memory import EngineEstimate
from megatron_fp8rl.preflight.findings import (
    Assessment,
    Change,
    Finding,
    Findings,
    apply,
    arguments,
    exit_status,
)
from megatron_fp8rl.preflight.memory import Estimate, Gpu
from megatron_fp8rl.preflight.packages import Package
from megatron_fp8rl.preflight.shapes import check_model

_PROGRAM = "python -m megatron_fp8rl doctor"
_OF_GPUS = {
    **{f"precision.kernels.{role}": "auto" for role in KERNELS if role.startswith("engine_")},
    "engine.sleep_level": 0,
}


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
    result, outcome = assess(cfg, options), auto_layout.nearest(cfg, options)
    begin = partial(_command, config_name, [*overrides, *_option_arguments(options)])
    findings = [_with_command(finding, cfg, result, options, begin) for finding in result.findings]
    findings += packages.findings(rules.local_accelerator() != "cpu")
    findings.sort(key=lambda finding: ("error", "warning", "note").index(finding.severity))
    has_model = check_model(Findings(cfg))
    return Diagnosis(
        cfg=cfg,
        gpu=options.hardware,
        num_gpus=gpus_wanted(cfg),
        parameters=count(cfg.model) if has_model else None,
        trainer=result.trainer,
        engine=result.engine,
        phases=result.phases,
        matrices=tuple(tiling.matrices(cfg)) if result.trainer is not None else (),
        agreement=tuple(precision_table.agreement(cfg)) if has_model else (),
        packages=tuple(packages.packages()),
        findings=tuple(findings),
        change=outcome.change,
        command=begin(outcome.change) if outcome.change else "",
        tried=outcome.tried,
    )


def _with_command(
    finding: Finding, cfg: RunConfig, before: Assessment, options: DoctorOptions, begin: Callable[[Change], str]
) -> Finding:
    """Keep a proposed change if it removes the finding, and the run then works with no more warnings than before."""
    if not finding.change:
        return finding
    after = assess(apply(cfg, finding.change), options)
    is_gone = (finding.severity, finding.problem) not in {(f.severity, f.problem) for f in after.findings}
    if after.works and is_gone and _num_warnings(after) <= _num_warnings(before):
        return replace(finding, command=begin(finding.change))
    return replace(finding, change=())


def _num_warnings(result: Assessment) -> int:
    return sum(finding.severity == "warning" for finding in result.findings)


def _option_arguments(options: DoctorOptions) -> list[str]:
    """The options the user set, as arguments that proposed commands repeat."""
    named = [(f.name, getattr(options, f.name), f.default) for f in fields(options) if f.name not in ("json", "data")]
    return [argument for name, value, default in named if value != default for argument in (f"--{name}", str(value))]


def _command(config_name: str, overrides: Sequence[str], change: Change) -> str:
    return f"{_PROGRAM} {shlex.quote(config_name)} {arguments(overrides, change)}"


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
    for path, default in _OF_GPUS.items() if accelerator == "cpu" and cfg.engine.placement != "remote" else ():
        if (value := cfg.value(path)) != default:
            found.append(_warning(path, f"--{path} {value} has no effect without a GPU"))
    if accelerator == "cpu" and cfg.engine.kv_cache_dtype == "fp8" and not cpu_has_avx512():
        problem = "vLLM keeps an FP8 KV cache on GPUs and on CPUs with AVX-512, which this machine has not"
        found.append(_warning("engine.kv_cache_dtype", problem))
    sampling = cfg.sampling
    if sampling.window_groups > (most := sampling.max_staleness * sampling.prompts_per_step) > 0:
        problem = (
            f"groups stay {sampling.window_groups / sampling.prompts_per_step:g} steps in a window of "
            f"{sampling.window_groups} on average, and tokens older than --sampling.max_staleness {sampling.max_staleness} "
            f"are not trained; up to {most} groups most are (docs/agents.md)"
        )
        found.append(_warning("sampling.window_groups", problem))
    if cfg.engine.placement == "remote" and "LAUNCH_DIR" not in os.environ:
        problem = f"somebody else has to start its engines, which are waited for {cfg.engine.start_s:g} s"
        found.append(_warning("engine.placement", f"--engine.placement remote: {problem}; `python -m launch` does"))
    return found


def _warning(path: str, problem: str) -> Finding:
    return Finding(severity="warning", subject=f"--{path}", problem=problem)
