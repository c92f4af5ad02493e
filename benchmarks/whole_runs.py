"""Whole runs as child processes: follow one step by step, and ask it to stop before a budget ends.

In: the command of a run and its folder. Out: its steps, printed as they come, and its exit status. No process of a run
outlives the call.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.grpo_rows import step_line
from benchmarks.process_tree import ProcessTree
from megatron_fp8rl.report.run_data import RunData

STOP_S = 30.0  # before the end of the budget: a step, a checkpoint, a report and the end of the engines
_KILL_S = 5.0  # before the end of the budget


def follow(
    name: str,
    command: Sequence[str],
    run_dir: Path,
    log: Path,
    num_steps: int,
    left_s: float,
    *,
    environment: Mapping[str, str] | None = None,
    note: Callable[[int], None] = lambda step: None,
    until: int | None = None,
) -> int | None:
    """Start a run and print its steps as they come; its exit status, None when it had to be killed.

    ``left_s``: of the budget; STOP_S before its end the run is asked to stop and save, as a user would ask it.
    ``note`` is called with each new step as soon as its line is there; after step ``until`` the run is killed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    began, is_asked, status = time.monotonic(), False, None
    seen = {(step["step"], step.get("time/step/s")) for step in RunData(run_dir).records}  # before an interruption
    with log.open("wb") as file:
        tree = ProcessTree.start(command, file, environment or os.environ)
        try:
            while status is None and (passed_s := time.monotonic() - began) < left_s - _KILL_S:
                if not is_asked and passed_s > left_s - STOP_S:
                    print(f"{passed_s:5.0f} s of {name}: it is asked to stop", flush=True)
                    tree.ask_command()
                    is_asked = True
                status = tree.wait(0.5)
                for step in RunData(run_dir).records:
                    if (key := (step["step"], step.get("time/step/s"))) not in seen:
                        seen.add(key)
                        note(step["step"])
                        print(f"{time.monotonic() - began:5.0f} s of {name}: {step_line(step, num_steps)}", flush=True)
                        if step["step"] == until:
                            return None
        finally:
            tree.end(_KILL_S)
    return status
