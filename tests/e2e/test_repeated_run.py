"""An exact run repeats bit by bit under other conditions; a run of another seed is told apart at once."""

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


def finished(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_fp8rl", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)


def run(folder: Path, **overrides: str) -> Path:
    options = OPTIONS | {"--output_dir": str(folder)} | {f"--{k.replace('__', '.')}": v for k, v in overrides.items()}
    done = finished("train", "tiny_qwen3", *(word for pair in options.items() for word in pair))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return folder


def test_an_exact_run_repeats_with_other_workers_and_under_load_and_another_seed_is_named(tmp_path):
    first = run(tmp_path / "first", scoring__num_workers="1")
    load = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        second = run(tmp_path / "second", scoring__num_workers="3")
    finally:
        load.kill()
        load.wait()
    compared = finished("report", str(first), str(second))
    assert (compared.returncode, compared.stderr) == (0, "")
    start, num_values, *rest = compared.stdout.split()
    assert (start, rest) == ("equal:", ["values", "of", "24", "steps"])  # steps 0 to 3, and the warm start's
    assert int(num_values) > 3 * 64 * 10  # the rollouts of three steps among them

    other = run(tmp_path / "other", seed="7", model__hf_path=str(first / "warm_start" / "hf"))
    compared = finished("report", str(first), str(other))
    assert compared.returncode == 1 and "  seed: 1, 7" in compared.stdout
    # Step 0 is the evaluation before training; its few answers can have equal scores.
    assert compared.stdout.startswith(("differs: step 0, metric eval/", "differs: step 1, recorded prompt 0, "))
