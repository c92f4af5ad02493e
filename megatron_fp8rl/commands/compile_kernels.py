"""``doctor CONFIG --compile``: compiles the kernels of a run on this machine and keeps them for later starts.

The list of kernels is the run's own: the processes of two steps, in its layout and with its microbatches, record what
they compile. Without a GPU only the C kernels of a CPU are compiled, which an image can keep.
"""

import subprocess
import sys
import tempfile
import time

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
    cfg, out = invocation.cfg, sys.stderr if invocation.options.json else sys.stdout
    if cfg.engine.placement == "remote":
        problem = "--engine.placement = 'remote': doctor --compile starts the engines itself"
        print(f"{problem}. Set colocated or separate, on a machine with the GPUs of an engine", file=sys.stderr)
        return 2
    status, began = 0, time.time()
    with tempfile.TemporaryDirectory(prefix="fp8rl-compile-") as run_dir:
        folder = compile_cache.use(run_dir)
        if local_hardware().is_gpu:
            job, weights = job_of(cfg), [] if cfg.model.hf_path else ["--model.random", "True"]
            command = [sys.executable, "-m", "megatron_fp8rl", "train" if job == "rl" else job, invocation.config_name]
            command += [*invocation.overrides, *_TWO_STEPS.split(), *weights, "--output_dir", run_dir]
            status = subprocess.run(command, stdout=out).returncode
        else:
            from megatron_fp8rl.kernels import c_code

            c_code.compile_all()
        compiled = sorted(compile_cache.seconds_by_kind(began).items())
    lines = [f"{kind}: {len(seconds)} kernels in {sum(seconds):.1f} s" for kind, seconds in compiled]
    print("\n".join(lines or ["nothing was missing"]), file=out)
    if status:
        print(f"doctor --compile: two steps of the run ended with status {status}; see above", file=sys.stderr)
        return 1
    print(f"kernels are kept in {folder}", file=out)
    return 0
