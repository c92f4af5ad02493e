"""Values of CLUSTER.env reach only the roles: no command line, script, log or public file contains them."""

import os
import sys
import time
from pathlib import Path

import pytest

from launch import cli, local
from launch.spec import JobSpec, Role, log_file, read_jobs

MARK = "s3cret-of-nobody"
ROLE = """
import os, time, pathlib
seen = pathlib.Path(os.environ["SEEN"])
seen.write_text(os.environ["WANDB_API_KEY"])
while seen.exists():
    time.sleep(0.1)
"""


def _command_lines() -> str:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue
    return "\n".join(found)


def test_a_job_of_this_machine_shows_no_value_to_others(tmp_path: Path):
    role = Role(name="trainer", kind="command", nodes=(0,), command=("-c", ROLE))
    env = {"WANDB_API_KEY": MARK, "SEEN": str(tmp_path / "seen")}
    spec = JobSpec(name="secret", run_dir=str(tmp_path / "run"), roles=(role,), nodes=1, env=env)
    _, process = local.start(spec, cluster_name="here")
    end = time.monotonic() + 60
    while not (tmp_path / "seen").exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert (tmp_path / "seen").read_text() == MARK, "the role has it"
    assert "launch.agent" in (shown := _command_lines()) and MARK not in shown
    (tmp_path / "seen").unlink()
    assert process.wait(60) == 0
    holders = [
        path for path in (tmp_path / "run").rglob("*") if path.is_file() and MARK in path.read_text(errors="replace")
    ]
    assert [str(path) for path in holders] == [read_jobs(spec.run_dir)[0]["spec"]]
    assert holders[0].stat().st_mode & 0o777 == 0o600
    assert log_file(spec.run_dir, "trainer", 0).exists()


@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_nothing_that_the_launcher_prints_holds_a_value(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str):
    file = tmp_path / "cluster.py"
    more = "account='a', partition='p', gpu=None, gpus_per_node=0, ranks_per_node=2"
    file.write_text(
        f"from launch.cluster import Cluster\nCLUSTER = Cluster(kind={kind!r}, run_root={str(tmp_path)!r}, "
        f"python={sys.executable!r}, env={{'WANDB_API_KEY': {MARK!r}}}, {more})\n"
    )
    assert cli.main(["tiny_qwen3", "--cluster", str(file), "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "WANDB_API_KEY" in said.out and MARK not in said.out + said.err
