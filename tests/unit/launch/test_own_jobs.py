"""The last sentence of the pages of sft, dpo and distill: a kept dry run becomes a batch script of the same job."""

import json
import re

import pytest

from launch import cli as launcher
from megatron_fp8rl import cli
from megatron_fp8rl.__main__ import COMMANDS
from tests.helpers.own_model import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "MODEL"
    make_model(folder, ["What is 2 + 3?", "Sure?"])
    return folder


@pytest.mark.parametrize(
    ("job", "row", "words"),
    [
        ("sft", {"prompt": "1", "completion": "2"}, []),
        ("dpo", {"prompt": "1", "chosen": "2", "rejected": "3"}, []),
        ("distill", {"question": "1 and 2?"}, ["--teacher", "MODEL", "--algo.teacher_kl", "full"]),
    ],
)
def test_a_kept_dry_run_is_launched_as_its_job(model, tmp_path, monkeypatch, capsys, job, row, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "MODEL").symlink_to(model)
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "runs").mkdir()
    how = f"gpu=None, gpus_per_node=0, ranks_per_node=1, partition='main', run_root={str(tmp_path / 'runs')!r}"
    (tmp_path / "mine.py").write_text(f"from launch.cluster import Cluster\nCLUSTER = Cluster({how})\n")
    own = ["--model", "MODEL", "--data", "rows.jsonl", "--gpus", "0", *words]
    assert cli.main(COMMANDS, [job, *own, "--num_steps", "2", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    module = f"kept_{job}"
    (tmp_path / f"{module}.py").write_text(printed)
    (name,) = re.findall(r"^def (\w+)\(", printed, re.MULTILINE)
    target = [f"{module}:{name}", "--cluster", str(tmp_path / "mine.py"), "--job", job]
    assert launcher.main([*target, "--dry-run"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH" in script and f"megatron_fp8rl {job} {module}:{name}" in script.replace('"', "").replace("'", "")
    other = "sft" if job == "dpo" else "dpo"
    assert launcher.main([*target[:-1], other, "--dry-run"]) == 2
    text = f"--job = {other!r}: {module}:{name} describes another job. Use --job {job}, or another configuration."
    assert text in capsys.readouterr().err
