"""The diagnosis of one run: all findings, and a change after which it works. Needs neither a GPU nor torch."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.precision.parameters import ParameterCount, count
from megatron_fp8rl.preflight import auto_layout, packages, rules, tiling
from megatron_fp8rl.preflight.assessment import Assessment, DoctorOptions, assess, gpus_wanted
from megatron_fp8rl.preflight.findings import Change, Checks, Finding, apply, arguments
from megatron_fp8rl.preflight.memory import Gpu
from megatron_fp8rl.preflight.packages import Package
from megatron_fp8rl.preflight.shapes import check_model


@dataclass(frozen=True, kw_only=True)
class Diagnosis(Assessment):
    """An assessment, the findings about packages, and the change after which the run works."""

    cfg: RunConfig
    gpu: Gpu
    packages: tuple[Package, ...]
    change: Change  # empty if the run works already, or if no change helps
    command: str  # that applies ``change``
    tried: str  # description of an unsuccessful search; empty otherwise

    @property
    def num_gpus(self) -> int:
        return gpus_wanted(self.cfg)

    @cached_property
    def _has_model(self) -> bool:
        return check_model(Checks(self.cfg))

    @property
    def parameters(self) -> ParameterCount | None:
        return count(self.cfg.model) if self._has_model else None

    @cached_property
    def matrices(self) -> tuple[tiling.Matrix, ...]:
        """Empty if the degrees do not divide the model."""
        return tuple(tiling.matrices(self.cfg)) if self.trainer is not None else ()


def diagnose(
    cfg: RunConfig, options: DoctorOptions | None = None, *, config_name: str = "CONFIG", overrides: Sequence[str] = ()
) -> Diagnosis:
    """Diagnose a run. Commands in the findings begin with ``config_name`` and ``overrides``."""
    options = options or DoctorOptions()
    result, outcome = assess(cfg, options), auto_layout.nearest(cfg, options)
    command = partial(_command, config_name, [*overrides, *_option_arguments(options)])
    findings = [_with_command(finding, cfg, result, options, command) for finding in result.findings]
    findings += packages.findings(rules.local_accelerator() != "cpu")
    findings.sort(key=lambda finding: ("error", "warning", "note").index(finding.severity))
    return Diagnosis(
        **vars(result) | {"findings": tuple(findings)},
        cfg=cfg,
        gpu=options.hardware,
        packages=tuple(packages.packages()),
        change=outcome.change,
        command=command(outcome.change) if outcome.change else "",
        tried=outcome.tried,
    )


def _with_command(
    finding: Finding, cfg: RunConfig, before: Assessment, options: DoctorOptions, command: Callable[[Change], str]
) -> Finding:
    """Keep a proposed change if it removes the finding, and the run then works with no more warnings than before."""
    if not finding.change:
        return finding
    after = assess(apply(cfg, finding.change), options)
    is_gone = (finding.severity, finding.problem) not in {(f.severity, f.problem) for f in after.findings}
    if after.works and is_gone and _num_warnings(after) <= _num_warnings(before):
        return replace(finding, command=command(finding.change))
    return replace(finding, change=())


def _num_warnings(result: Assessment) -> int:
    return sum(finding.severity == "warning" for finding in result.findings)


def _option_arguments(options: DoctorOptions) -> list[str]:
    named = [(f.name, getattr(options, f.name), f.default) for f in fields(options) if f.name not in ("json", "data")]
    return [argument for name, value, default in named if value != default for argument in (f"--{name}", str(value))]


def _command(config_name: str, overrides: Sequence[str], change: Change) -> str:
    return f"python -m megatron_fp8rl doctor {shlex.quote(config_name)} {arguments(overrides, change)}"
