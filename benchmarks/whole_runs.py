"""Run training as a child process, print its steps, and read the logs of its engines."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.process_tree import ProcessTree
from benchmarks.record import Row
from megatron_fp8rl.observe.metrics import PHASES
from megatron_fp8rl.report.run_data import RunData

_KILL_S = 5.0


def follow(
    name: str,
    command: Sequence[str],
    run_dir: Path,
    log: Path,
    limit_s: float,
    *,
    note: Callable[[int], None] = lambda step: None,
    until: int | None = None,
    **environment: str,
) -> int | None:
    """Start a run and print its steps; return its exit status. Kill it after step ``until`` or after ``limit_s``, and
    return None. ``note`` is called with each new step. ``environment``: further variables."""
    began, status, seen = time.monotonic(), None, set()
    with log.open("wb") as file:
        tree = ProcessTree(command, file, os.environ | environment)
        try:
            while status is None and time.monotonic() - began < limit_s:
                status = tree.wait(0.5)
                for step in RunData(run_dir).records:
                    if step["step"] not in seen:
                        seen.add(step["step"])
                        note(step["step"])
                        print(f"{time.monotonic() - began:5.0f} s of {name}: {step_line(step)}", flush=True)
                    if step["step"] == until:
                        return None
        finally:
            tree.end(_KILL_S)
    return status


def step_line(step: Row) -> str:
    """A summary of a step from its record in metrics.jsonl."""
    seconds = {phase: step.get(f"time/{phase}/s") for phase in PHASES}
    phases = ", ".join(f"{phase} {value:.2f}" for phase, value in seconds.items() if value and value >= 0.005)
    parts = [f"step {step['step']}: {step.get('time/step/s') or 0.0:.2f} s ({phases})"]
    for name, key, form in (
        ("reward", "reward/score/mean", ".3f"),
        ("mismatch", "mismatch/abs_logprob_diff/mean", ".1e"),
        ("held-out pass rate", "eval/pass_rate/mean", ".3f"),
    ):
        if step.get(key) is not None:
            parts.append(f"{name} {step[key]:{form}}")
    return ", ".join(parts)


def read_log(text: str) -> Row:
    """Tokens of KV cache, GiB of weights, and kernels from the log of a vLLM engine."""
    capacity = re.findall(r"KV cache size: ([\d,]+) tokens", text)
    loaded = re.findall(r"Model loading took ([\d.]+) GiB", text)
    patterns = [r"Selected (\w+) for \w+", r"Using '?([\w ]+?)'? (?:Fp8|Unquantized) MoE backend"]
    patterns += [
        r"Using (?:AttentionBackendEnum\.)?(\w+) attention backend",
        r"Using AttentionBackendEnum\.(\w+) backend",
    ]
    return {
        "kv_tokens": int(capacity[-1].replace(",", "")) if capacity else None,
        "weights_gib": float(loaded[-1]) if loaded else None,
        "kernels": [name for pattern in patterns for name in dict.fromkeys(re.findall(pattern, text))],
    }


def first_engine(run: RunData) -> Row:
    """:func:`read_log` of a run's first engine; empty without one."""
    log = run.run_dir / "logs" / "rollout-0.log"
    return read_log(log.read_text(encoding="utf-8", errors="replace")) if log.exists() else {}
