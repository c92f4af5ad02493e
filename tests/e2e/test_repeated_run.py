"""An exact run repeats bit by bit under other conditions. How runs that differ are told apart: ``unit/observe``."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {
    "--precision.exact": "True",
    "--warm_start.steps": "20",
    "--num_steps": "3",
    "--observe.display": "plain",
    "--observe.eval_prompts": "8",
    "--sampling.prompts_per_step": "8",
}
# Python imports it at its start. Answers reach the trainer late, in another order.
DELAYS = """
import asyncio, importlib.machinery, random, sys

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, *arguments):
        if name != "megatron_fp8rl.rollout.client":
            return None
        spec = super().find_spec(name, *arguments)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            sampled = module.EngineClient._sampled

            async def late(self, body):
                answer = await sampled(self, body)
                await asyncio.sleep(random.uniform(0.0, 0.5))
                print("late answer", flush=True)
                return answer

            module.EngineClient._sampled = late

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder)
"""


def finished(*words: str, patches: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_fp8rl", *words]
    paths = [*([] if patches is None else [str(patches)]), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, env=env)


def run(folder: Path, patches: Path | None = None, **overrides: str) -> Path:
    options = OPTIONS | {"--output_dir": str(folder)} | {f"--{k.replace('__', '.')}": v for k, v in overrides.items()}
    done = finished("train", "tiny_qwen3", *(word for pair in options.items() for word in pair), patches=patches)
    assert patches is None or "late answer" in done.stdout
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return folder


def test_an_exact_run_repeats_with_other_workers_engines_and_delays(tmp_path):
    first = run(tmp_path / "first", scoring__num_workers="1")
    load = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        (tmp_path / "sitecustomize.py").write_text(DELAYS)
        second = run(tmp_path / "second", patches=tmp_path, scoring__num_workers="3", engine__num_replicas="2")
    finally:
        load.kill()
        load.wait()
    compared = finished("report", str(first), str(second))
    assert (compared.returncode, compared.stderr) == (0, "")
    start, num_values, *rest = compared.stdout.split()
    assert (start, rest) == ("equal:", ["values", "of", "24", "steps"])  # steps 0 to 3, and the warm start's
    assert int(num_values) > 3 * 64 * 10  # the rollouts of three steps among them
    weights = [(folder / "hf" / "model.safetensors").read_bytes() for folder in (first, second)]
    assert weights[0] == weights[1]
