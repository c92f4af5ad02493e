"""The command of `make demo-math`, as the Makefile has it, for a few steps."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FEW = "--num_steps 2 --warm_start.steps 3 --observe.eval_prompts 4 --observe.display plain --checkpoint.export_hf False"


def test_the_makefiles_commands_run(tmp_path):
    recipe = re.search(r"^demo-math:\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)[1]
    lines = recipe.replace("\\\n", " ").replace("$(ARGS)", FEW).replace("$(PYTHON)", shlex.quote(sys.executable))
    commands = [shlex.split(line.strip().lstrip("@")) for line in lines.splitlines()][1:]  # the first one installs
    environ = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MEGATRON_FP8RL_CACHE": str(tmp_path / "c"),
    }
    commands[0][1] = str(ROOT / commands[0][1])
    for command in commands:
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr[-3000:]
    steps = [json.loads(line) for line in (tmp_path / "runs" / "demo_math" / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["step"] == 2 and "eval/score/mean" in steps[-1]
