"""Check the data of a run before engines start."""

from __future__ import annotations

from megatron_fp8rl.config import ConfigError, RunConfig, Violation
from megatron_fp8rl.preflight.diagnosis import doubts
from megatron_fp8rl.preflight.doctor import look_at_data
from megatron_fp8rl.preflight.rules import local_accelerator


def check_data(cfg: RunConfig) -> None:
    """Print what the sources contain, the rewards of known answers, and doubts. A replay reads no data.

    Raises:
        ConfigError: a source cannot be used.
    """
    if cfg.sampling.replay is not None:
        return
    lines, findings = look_at_data(cfg)
    findings += doubts(cfg, local_accelerator())
    lines += [f"{finding.severity.upper()}: {finding.problem}" for finding in findings if finding.severity != "error"]
    if cfg.observe.display != "none" and lines:
        print("\n".join(lines), flush=True)
    if errors := [finding for finding in findings if finding.severity == "error"]:
        values = {"--data.environments": [source.dataset for source in cfg.data.environments]}
        values["--data.max_dropped"] = cfg.data.max_dropped
        raise ConfigError([Violation(e.subject, values[e.subject], e.problem, "Nothing was started") for e in errors])
