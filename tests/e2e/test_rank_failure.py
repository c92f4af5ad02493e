"""A trainer rank is killed in a publication: no engine samples from partial weights, and the run continues."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_fp8rl.observe.recording import read_step, steps_of
from tests.helpers.fields import options

ROOT = Path(__file__).resolve().parents[2]
DYING = Path(__file__).parent / "dying"
DEADLINE_S = 600
NUM_STEPS = 4
KILLED_AT = 3  # the version that is published when the rank dies: dies_publishing.VERSION
OPTIONS = options(
    "--algo.loss dies_publishing:loss --parallel.world_size 2 --parallel.expert 2 --weight_sync.bucket_bytes 100000 "
    "--sampling.prompts_per_step 8 --observe.display plain --observe.eval_prompts 4 --checkpoint.every_steps 1 "
    "--checkpoint.export_hf False --warm_start.steps 5"
) | {"--num_steps": str(NUM_STEPS)}


def start(run_dir: Path, marks: Path | None, transport: str) -> tuple[int, str]:
    """A run, or its continuation, to its end: (status, output)."""
    options = OPTIONS | {"--output_dir": str(run_dir), "--weight_sync.transport": transport}
    command = [sys.executable, "-m", "megatron_fp8rl", "train", "tiny_qwen3_moe"]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(DYING)))}
    environ |= {} if marks is None else {"DIES_PUBLISHING": str(marks)}
    args = [word for pair in options.items() for word in pair]
    done = subprocess.run([*command, *args], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=DEADLINE_S)
    return done.returncode, done.stdout + done.stderr


def metrics(run_dir: Path) -> dict[int, dict[str, float]]:
    """Every value that does not measure time, by step."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: {key: value for key, value in line.items() if _is_equal_in_every_run(key)} for line in lines}


def _is_equal_in_every_run(key: str) -> bool:
    return (
        key.startswith(("reward/", "train/", "loss/", "eval/", "mismatch/"))
        and "_per_s" not in key
        and "time" not in key
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    status, output = start(run_dir, None, "auto")
    assert status == 0, output[-3000:]
    return run_dir


@pytest.mark.long
@pytest.mark.parametrize("transport", ["ipc", "gloo"])
def test_a_rank_killed_in_the_middle_of_a_publication_costs_a_restart(transport, undisturbed, tmp_path):
    run_dir, marks = tmp_path / "run", tmp_path / "marks"
    marks.mkdir()
    status, output = start(run_dir, marks, transport)
    assert status not in (0, 85), output[-3000:]
    died_at, mode, number = (marks / "died").read_text().split()
    assert time.time() - float(died_at) < 300, "the other rank and the engine were waited for"
    assert mode == "direct" and int(number) >= 2, "part of the weights had been sent"

    asked = [line.split() for line in (marks / "asked").read_text().splitlines()]
    before = [path for at, _, path in asked if float(at) < float(died_at)]
    after = [path for at, _, path in asked if float(at) >= float(died_at)]
    assert any("update_weights" in path for path in before[before.index(next(p for p in before if "/pause" in p)) :])
    assert not [path for path in after if "generate" in path or "resume" in path], (
        "the engine sampled from half a publication"
    )
    assert max(steps_of(run_dir / "rollouts")) == KILLED_AT  # of which the weights were being published
    if transport == "gloo":
        return  # the next start reads the checkpoint, and knows nothing of the transport before

    status, output = start(run_dir, marks, transport)
    assert status == 0, output[-3000:]
    assert f"continues after step {KILLED_AT - 1}" in output or f"continues after step {KILLED_AT}, " in output
    assert metrics(run_dir) == metrics(undisturbed)
    assert list(metrics(run_dir)) == list(range(NUM_STEPS + 1))
    for folder in (run_dir / "rollouts", run_dir / "rollouts" / "_cut"):
        for step, path in steps_of(folder).items():
            assert read_step(path) == read_step(steps_of(undisturbed / "rollouts")[step])
    assert list(steps_of(run_dir / "rollouts")) == list(range(1, NUM_STEPS + 1))
