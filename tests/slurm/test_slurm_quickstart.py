"""The commands of the quickstart's section on Slurm, as they stand on the page, in the project's folder."""

import json
import re
import subprocess

from slurm_cluster import ROOT, SlurmCluster, lines_of, logs_of

from launch import slurm as launch_slurm
from tests.helpers.own_model import make_model

PAGE = ROOT / "docs" / "quickstart.md"
# The page's cluster has GPUs; this one has two cores.
SMALLER = {
    "/shared/me": "{folder}",
    "--num_steps 40": "--num_steps 2 --warm_start.steps 20 --sampling.prompts_per_step 16 --observe.eval_prompts 8",
    "--gpus 8 --gpu h100": "--num_steps 2 --sampling.prompts_per_step 4 --sampling.completions_per_prompt 2 "
    "--sampling.max_prompt_tokens 64 --sampling.max_completion_tokens 8 --checkpoint.export_hf False",
}
MINE = """
from launch.cluster import Cluster
CLUSTER = Cluster(run_root={root!r}, account="research", partition="main", time_limit="00:20:00", gpu=None,
                  gpus_per_node=0, ranks_per_node=1, save_signal_s=60)
"""


def commands() -> list[str]:
    """The commands of the steps after the installation, in their order on the page."""
    _, _, section = PAGE.read_text().partition("\n## On Slurm\n")
    section = section.partition("\nNext: ")[0].replace("\\\n", " ")
    found = re.findall(r"`((?:python -m|sinfo) [^`]+)`|^(python -m .*)$", section, re.MULTILINE)
    return [re.sub(r"\s+", " ", inline or line) for inline, line in found]


def test_the_page_has_the_commands_that_are_followed():
    begins = ["sinfo -s", "doctor", "--dry-run", "launch tiny", "status first", "logs first", "grpo", "launch my_run:"]
    assert len(commands()) == len(begins)
    assert all(begin in command for begin, command in zip(begins, commands(), strict=True)), commands()


def test_the_quickstart_is_followed_word_for_word(slurm: SlurmCluster):
    folder = slurm.shared / "quickstart"
    subprocess.run(["rm", "-rf", folder], check=True)
    clone = folder / "megatron_fp8rl"
    launch_slurm.copy_code(clone)
    (clone / ".venv").symlink_to(ROOT / ".venv")
    (clone / "mine.py").write_text(MINE.format(root=str(folder)))
    rows = [{"question": f"What is {i} plus 1?", "answer": str(i + 1)} for i in range(10)]
    (clone / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    make_model(folder / "Qwen3-1.7B", [row["question"] for row in rows])
    environment = {name: value for name, value in slurm.environment.items() if name != "PYTHONPATH"}
    said = []
    for command in commands():
        assert any(old in command for old in SMALLER) or not re.search(r"--num_steps|/shared|--gpus", command)
        for old, new in SMALLER.items():
            command = command.replace(old, new.format(folder=folder))
        words = ["bash", "-c", f". .venv/bin/activate && {command}"]
        done = subprocess.run(words, cwd=clone, env=environment, capture_output=True, text=True, timeout=420)
        has_warnings = "doctor" in command and done.returncode == 1
        assert done.returncode == 0 or has_warnings, f"{command}\n{done.stdout}{done.stderr}{logs_of(folder / 'runs')}"
        said.append(done.stdout)
    _, doctor, script, queued, status, logs, _, last = said
    assert "This run can work" in doctor
    assert script.startswith("#!/bin/bash") and "trainer (torchrun)" in script
    assert "is queued on cluster './mine.py'" in queued and "trainer" in logs
    assert re.search(r"job +\d+ on ./mine.py: (PENDING|RUNNING|CONFIGURING)", status), status
    first = folder / "runs" / "first"
    assert [line["step"] for line in lines_of(first / "metrics.jsonl")] == [0, 1, 2] and (
        first / "report.html"
    ).is_file()
    log = (first / "logs" / "trainer.node0.log").read_text()
    assert "[rank 0] first 2/2  reward" in log and not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", log), log
    job = re.search(r"job (\d+) is queued", last)[1]
    assert slurm.wait(job, deadline_s=420) == "COMPLETED", logs_of(folder / "runs")
    [metrics] = [path for path in (folder / "runs").glob("*/metrics.jsonl") if path.parent != first]
    assert (clone / "my_run.py").is_file() and lines_of(metrics)[-1]["step"] == 2
