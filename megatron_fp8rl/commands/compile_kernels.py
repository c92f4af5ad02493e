"""``doctor CONFIG --compile``: compiles the kernels of a run on this machine and keeps them for later starts.

The list of kernels is the run's own: two steps of the configuration, in its layout and with its microbatches, whose
processes record what they compile. The C kernels of a CPU are compiled together, and are all that an image needs that
is built without a GPU. DeepGEMM's kernels are compiled for all numbers of tokens, in many processes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from megatron_fp8rl import cli
from megatron_fp8rl.envs.source_kind import job_of
from megatron_fp8rl.kernels import compile_cache
from megatron_fp8rl.precision.hardware import local_hardware

_TWO_STEPS = (
    "--num_steps 2 --warm_start.steps 0 --observe.eval_prompts 0 --observe.rollouts_gib 0 --observe.display none "
    "--checkpoint.every_steps 0 --checkpoint.export_hf False --algo.zero_variance keep --observe.wandb_project None"
)


def fill_cache(invocation: cli.Invocation) -> int:
    """Compile, and print the number of kernels and their seconds by compiler; 1 if the two steps failed."""
    cfg, folder, out = invocation.cfg, compile_cache.use(), sys.stderr if invocation.options.json else sys.stdout
    if cfg.engine.placement == "remote":
        problem = "--engine.placement = 'remote': doctor --compile starts the engines itself"
        print(f"{problem}. Set colocated or separate, on a machine with the GPUs of an engine", file=sys.stderr)
        return 2
    status, began = 0, time.time()
    with tempfile.TemporaryDirectory(prefix="fp8rl-compile-") as run_dir:
        compile_cache.record_in(run_dir)
        if local_hardware().is_gpu:
            command = [sys.executable, "-m", "megatron_fp8rl", *_two_steps(invocation), "--output_dir", run_dir]
            status = subprocess.run(command, stdout=out).returncode
        else:
            from megatron_fp8rl.kernels import c_code

            c_code.compile_all()
        lines = _recorded(Path(run_dir) / compile_cache.RECORD, began)
    print("\n".join(lines or ["nothing was missing"]), file=out)
    if status:
        print(f"doctor --compile: two steps of the run ended with status {status}; see above", file=sys.stderr)
        return 1
    print(f"kernels are kept in {folder}", file=out)
    return 0


def _two_steps(invocation: cli.Invocation) -> list[str]:
    """Arguments of a run of two steps, with random weights if the configuration names none."""
    cfg, job = invocation.cfg, job_of(invocation.cfg)
    weights = [] if cfg.model.hf_path else ["--model.random", "True"]
    command = ["train" if job == "rl" else job, invocation.config_name]
    return [*command, *invocation.overrides, *_TWO_STEPS.split(), *weights]


def _recorded(record: Path, began: float) -> list[str]:
    by_kind: dict[str, list[float]] = defaultdict(list)
    for kernel in compile_cache.read(record.read_bytes()) if record.exists() else ():
        by_kind[kernel["kind"]].append(kernel["seconds"])
    by_kind["deep_gemm"] = compile_cache.deep_gemm_seconds(began, time.time())
    counted = sorted((kind, seconds) for kind, seconds in by_kind.items() if seconds)
    return [f"{kind}: {len(seconds)} kernels in {sum(seconds):.1f} s" for kind, seconds in counted]
