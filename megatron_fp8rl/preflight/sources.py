"""The data of a run, as ``doctor`` and every start look at it: what sources hold, and what rewards say to known answers.

In: a configuration. Out: lines for people, and findings. Imports the tokenizer and the generators, so it takes seconds;
nothing here needs torch or a GPU.
"""

from __future__ import annotations

from pathlib import Path

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.preflight.findings import Finding


def look_at_data(cfg: RunConfig) -> tuple[list[str], list[Finding]]:
    """(lines, findings). Rows are read, prompts rendered, and a few reference and empty answers scored."""
    from megatron_fp8rl.data.dropped import TooManyDroppedError
    from megatron_fp8rl.data.inspection import check_rewards, inspect_sources, require_usable
    from megatron_fp8rl.data.tokenizer import load_tokenizer

    if cfg.data.tokenizer != "character" and not Path(cfg.data.tokenizer).is_dir():
        return [f"data was not read: there is no tokenizer in {cfg.data.tokenizer}"], []
    try:
        reports = inspect_sources(cfg, load_tokenizer(cfg.data.tokenizer))
    except (ValueError, OSError, ImportError) as error:
        return [], [_finding("error", "--data.environments", str(error))]
    lines = [line for report in reports for line in report.lines()]
    findings = []
    try:
        require_usable(reports, cfg.data.max_dropped)
    except TooManyDroppedError as error:
        findings.append(_finding("error", "--data.max_dropped", str(error)))
    for report in reports:
        if report.num_equal:
            problem = f"{report.num_equal} held-out questions of {report.key} are training questions, too"
            findings.append(_finding("warning", "--data.environments", problem))
    for check in check_rewards(cfg, reports):
        lines.append(check.line())
        findings += [_finding("warning", "--data.environments.rewards", text) for text in check.warnings()]
    return lines, findings


def _finding(severity: str, subject: str, problem: str) -> Finding:
    return Finding(severity=severity, subject=subject, problem=problem)
