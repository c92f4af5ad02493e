"""The commands in the READMEs of examples run as they stand, in a temporary copy of the examples."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Examples that train, and a metric that only the code or reward of the example writes.
TRAINED = {
    "gsm8k_style": "reward/part_math/mean",
    "own_loss": "loss/own_limited_fraction/mean",
    "agent_tools": "reward/part_call/mean",
}


def run_readme(name: str, folder: Path) -> str:
    """Run every ``sh`` block of the README of an example in ``folder``, and return what it printed."""
    for source in ("examples", "tools"):
        shutil.copytree(ROOT / source, folder / source)
    blocks = re.findall(r"^```sh\n(.*?)^```", (folder / "examples" / name / "README.md").read_text(), re.M | re.S)
    assert blocks, f"examples/{name}/README.md has no command"
    program = "".join(blocks).replace(".venv/bin/python", shlex.quote(sys.executable))
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "MEGATRON_FP8RL_CACHE": str(folder / "cache"),
        "NEMORUN_HOME": str(folder / "nemo"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "300",
    }
    done = subprocess.run(
        ["bash", "-euc", program.replace("PYTHONPATH=", f"PYTHONPATH={shlex.quote(str(ROOT))}:")],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout + done.stderr


@pytest.mark.core
def test_every_example_is_run():
    assert {path.parent.name for path in ROOT.glob("examples/*/README.md")} == {*TRAINED, "moe_on_slurm"}


@pytest.mark.parametrize("name", TRAINED)
def test_two_steps_are_trained(name, tmp_path):
    run_readme(name, tmp_path)
    lines = map(json.loads, (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines())
    trained = [line for line in lines if line.get("train/num_updates/sum")]
    assert [line["step"] for line in trained] == [1, 2]
    assert all(TRAINED[name] in line and line["train/num_tokens/sum"] > 0 for line in trained)
    assert "eval/score/mean" in trained[-1] and (tmp_path / "runs" / name / "report.html").is_file()


@pytest.mark.core  # a dry run of seconds
def test_a_batch_script_of_two_nodes_is_printed(tmp_path):
    printed = run_readme("moe_on_slurm", tmp_path)
    for part in ("#SBATCH --nodes=2", "#SBATCH --gpus-per-node=8", "#SBATCH --partition=batch", "-m launch.agent"):
        assert part in printed, printed[-3000:]
    (job,) = (tmp_path / "runs" / "moe_on_slurm").rglob("job.json")
    spec = json.loads(job.read_text())
    assert spec["nodes"] == 2 and str(job) in printed.replace("\n", "").replace(" ", "")
