"""``python -m megatron_fp8rl doctor CONFIG``: can this run work, on which GPUs, and what would mend it?

A preflight for a login node: it needs neither a GPU nor torch, and starts nothing. Exit status 0: fine; 1: warnings;
2: the run cannot work.
"""

from __future__ import annotations

import sys

from megatron_fp8rl import cli
from megatron_fp8rl.preflight.diagnosis import Diagnosis, DoctorOptions, diagnose
from megatron_fp8rl.preflight.doctor_report import print_report, to_json

__all__ = ["COMMAND", "Diagnosis", "DoctorOptions", "diagnose", "run"]


def run(invocation: cli.Invocation) -> int:
    """Diagnose the configuration, print the report, and return the exit status."""
    assert invocation.cfg is not None
    problems = invocation.options.problems()
    if problems:
        print("\n".join(f"python -m megatron_fp8rl doctor: {problem}" for problem in problems), file=sys.stderr)
        return 2
    diagnosis = diagnose(
        invocation.cfg,
        invocation.options,
        config_name=invocation.config_name or "CONFIG",
        overrides=invocation.overrides,
    )
    if invocation.options.json:
        sys.stdout.write(to_json(diagnosis) + "\n")
    else:
        print_report(diagnosis)
    return diagnosis.status


COMMAND = cli.Command(
    name="doctor",
    summary="preflight without a GPU: parameters, memory, FP8 tiling, precision, packages, and what to fix",
    run=run,
    options=DoctorOptions,
    judges_config=True,
)
