"""What goes through a tunnel, with an ``ssh`` that runs it in a shell here, and a made-up Slurm behind it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch import cli, tunnel
from launch.cluster import Cluster, Tunnel
from launch.spec import JobSpec, Role, add_job, read_jobs
from megatron_fp8rl.config import Violation

LOGIN = Tunnel(host="login", user="me", port=2222)
NOISE = "echo 'Welcome to the cluster'; echo 'profile warns' >&2\n"


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs: ssh, which notes its words and hands the last to ``sh -c``; sbatch, squeue and scancel."""
    folder = tmp_path / "bin"
    folder.mkdir()
    home = tmp_path / "ho me"
    home.mkdir()
    (home / ".bash_profile").write_text(f"{NOISE}PATH={str(folder)!r}:$PATH\n")
    programs = {
        "ssh": f'for word; do :; done\necho "$@" > {tmp_path}/ssh_words\ncd "$HOME"; exec sh -c "$word"',
        "sbatch": f'count=$(($(cat {tmp_path}/count 2> /dev/null || echo 6) + 1)); echo $count > {tmp_path}/count\n'
        f'echo "$@" >> {tmp_path}/submitted\n'
        '[ "$count" != "$FAILS_AT" ] || { echo "sbatch: error: no" >&2; exit 1; }\n'
        'echo "$count;federated"',
        "scancel": f'echo "$@" >> {tmp_path}/cancelled',
        "squeue": 'echo "7 RUNNING"',
        "scontrol": 'echo "JobId=$5 JobState=COMPLETED Reason=None"',
    }
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def files_of(folder: Path, tasks: list[str]) -> Path:
    experiment = folder / "experiments" / "x" / "x_1"
    (folder / "code" / "x_1" / "launch").mkdir(parents=True)
    (folder / "code" / "x_1" / "launch" / "a.py").write_text("1\n")
    for task in tasks:
        (experiment / task).mkdir(parents=True)
        (experiment / task / "code").symlink_to("/anywhere")
        (experiment / f"{task}_sbatch.sh").write_text("#!/bin/sh\n")
        (experiment / f"{task}.json").write_text(json.dumps({"job_id": tunnel.JOB, "name": f"it's {task}"}) + "\n")
    return folder


def submit(launch_dir: Path, files: Path, tasks: list[str]) -> list[str]:
    return tunnel.submit(LOGIN, launch_dir, files, id="x_1", experiment="experiments/x/x_1", tasks=tasks)


def test_a_program_arrives_as_it_is_and_noise_does_not_come_back(tools: Path, tmp_path: Path):
    odd = "it's \"two words\" $HOME `id` \\ * ;\n!"
    assert tunnel.run(LOGIN, "cat; printf %s " + tunnel.shlex.quote(odd), given=b"given ") == f"given {odd}"
    words = (tmp_path / "ssh_words").read_text()
    assert "-p 2222 -l me -- login exec bash" in words and "BatchMode=yes" in words and "ConnectTimeout" in words
    with pytest.raises(tunnel.LoginNodeError, match="it broke"):
        tunnel.run(LOGIN, "echo it broke >&2; exit 3")
    assert tunnel.ask(LOGIN, "printf", "%s", "a  b") == "a  b" and tunnel.ask(LOGIN, "false") is None
    with pytest.raises(tunnel.TunnelError, match=r"CLUSTER.tunnel.host = 'login': no answer within 0.5 s"):
        tunnel.run(LOGIN, "sleep 5", deadline_s=0.5)


def test_a_chain_is_copied_queued_and_recorded(tools: Path, tmp_path: Path):
    tasks = ["job0", "job1", "job2"]
    there = tmp_path / "shared/it's a \"run\" $x" / "launch"
    assert submit(there, files_of(tmp_path / "files", tasks), tasks) == ["7", "8", "9"]
    lines = (tmp_path / "submitted").read_text().splitlines()
    script = there / "experiments/x/x_1"
    assert lines[0] == f"--requeue --parsable {script}/job0_sbatch.sh"
    assert lines[2] == f"--requeue --parsable --dependency=afterany:8 {script}/job2_sbatch.sh"
    assert [(job["job_id"], job["name"]) for job in read_jobs(there.parent)] == [
        ("7", "it's job0"), ("8", "it's job1"), ("9", "it's job2"),
    ]  # fmt: skip
    assert (there / "code/x_1/launch/a.py").is_file() and (script / "job1" / "code").is_symlink()
    with pytest.raises(tunnel.LoginNodeError, match="choose another --id"):
        submit(there, tmp_path / "files", tasks)
    assert (there / "code/x_1/launch/a.py").is_file()


@pytest.mark.parametrize("cause", ["sbatch", "half a copy"])
def test_a_submission_that_fails_leaves_neither_jobs_nor_files(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str
):
    tasks = ["job0", "job1", "job2"]
    files = files_of(tmp_path / "files", tasks)
    there = tmp_path / "shared" / "run" / "launch"
    there.parents[1].mkdir()
    if cause == "sbatch":
        monkeypatch.setenv("FAILS_AT", "9")
    else:
        whole = tunnel._packed(files)
        monkeypatch.setattr(tunnel, "_packed", lambda _: whole[:-20])
    with pytest.raises(tunnel.LoginNodeError, match="sbatch: error: no" if cause == "sbatch" else "gzip|tar"):
        submit(there, files, tasks)
    if cause == "sbatch":
        assert (tmp_path / "cancelled").read_text().split() == ["7", "8"]
    else:
        assert not (tmp_path / "submitted").exists()
    assert list((tmp_path / "shared").iterdir()) == []


def test_everything_that_is_missing_is_said_at_once(tools: Path, tmp_path: Path):
    (tools / "sbatch").unlink()
    if shutil.which("sbatch"):
        (tools / "sbatch").write_text("")  # not a program; the real one is further behind
    cluster = Cluster(run_root=str(tmp_path / "no\"ne"), container_image="/no image", container_mounts=("/no/data:/x",),
                      tunnel=Tunnel(host="login", python=f"{tmp_path}/no python"))  # fmt: skip
    found = [violation.field for violation in tunnel.missing(cluster, None)]
    expected = ["CLUSTER.container_image", "CLUSTER.container_mounts", "CLUSTER.run_root", "CLUSTER.tunnel.python"]
    assert found[:4] == expected and set(found[4:]) <= {"CLUSTER.tunnel.host"}
    there = Cluster(run_root=str(tmp_path), python=sys.executable, tunnel=Tunnel(host="login"))
    source = Violation("SOURCE", "/no model", "is not there", "Name another")
    assert tunnel.missing(there, None, [source])[0] == source
    assert [v.field for v in tunnel.missing(there, None)] in ([], ["CLUSTER.tunnel.host"])
    gone = Cluster(run_root=str(tmp_path), python=sys.executable, tunnel=Tunnel(host="login", identity="/no/key"))
    with pytest.raises(tunnel.TunnelError, match=r"CLUSTER.tunnel.identity = '/no/key': does not exist"):
        tunnel.missing(gone, None)


@pytest.mark.parametrize(
    ("said", "field", "remedy"),
    [
        ("ssh: Could not resolve hostname login: Name or service not known", "host", "~/.ssh/config"),
        ("ssh: connect to host login port 2222: Connection timed out", "host", "VPN"),
        ("ssh: connect to host login port 2222: Connection refused", "port", "at which its SSH listens"),
        ("me@login: Permission denied (publickey).", "user", "without a question"),
        ("Host key verification failed.", "host", "compare the fingerprint"),
        ("@ REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "host", "ssh-keygen -R"),
        ("Connection to login closed by remote host.", "host", "ssh -p 2222 -l me login"),
    ],
)
def test_what_ssh_says_leads_to_the_field(tools: Path, said: str, field: str, remedy: str):
    (tools / "ssh").write_text(f"#!/bin/sh\ncat >&2 << 'END'\n{said}\nEND\nexit 255\n")
    with pytest.raises(tunnel.TunnelError) as caught:
        tunnel.run(LOGIN, "true")
    assert f"CLUSTER.tunnel.{field} = " in str(caught.value) and remedy in str(caught.value)
    with pytest.raises(tunnel.TunnelError, match=f"CLUSTER.tunnel.{field} = "):
        tunnel.watch(Cluster(tunnel=LOGIN, run_root="/x"), "status", "run", ())


def cluster_file(tmp_path: Path, root: Path) -> str:
    path = tmp_path / "far.py"
    path.write_text(
        "from launch.cluster import Cluster, Tunnel\n"
        f"CLUSTER = Cluster(run_root={str(root)!r}, gpu=None, gpus_per_node=0, ranks_per_node=2, time_limit='10:00',\n"
        f"    python={sys.executable!r}, tunnel=Tunnel(host='login', user='me', port=2222))\n"
    )
    return str(path)


def a_run(run_dir: Path) -> None:
    """Submitted as number 7, with the code of this repository."""
    role = Role(name="trainer", kind="torchrun", nodes=(0,), command=())
    word = JobSpec(name="x", run_dir=str(run_dir), roles=(role,), nodes=1).encode()
    add_job(run_dir, {"job_id": "7", "kind": "slurm", "cluster": "far", "name": "x", "nodes": 1, "submitted_at": 0.0,
                      "experiment": "", "script": "", "spec": word})  # fmt: skip
    (run_dir / "launch" / "code").mkdir()
    (run_dir / "launch" / "code" / "x_1").symlink_to(Path(__file__).parents[3])


def test_status_and_logs_run_on_the_login_node(tools: Path, tmp_path: Path):
    root = tmp_path / "shared it's"
    a_run(root / "runs" / "my run")
    log = root / "runs" / "my run" / "logs" / "trainer.node0.log"
    log.parent.mkdir()
    log.write_text("[rank 0] one\n[rank 1] two — drei\n")
    file = cluster_file(tmp_path, root)

    def launch(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "launch", *words]
        return subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=300)

    shown = launch("status", "my run", "--cluster", file)
    assert shown.returncode == 0 and "job         7 on far: COMPLETED" in shown.stdout, shown
    assert "Welcome" not in shown.stdout
    shown = launch("logs", str(root / "runs" / "my run"), "--cluster", file, "--rank", "1")
    assert shown.stdout == "two — drei\n", shown
    shown = launch("logs", "my run", f"--cluster={file}", "--role", "cook")
    assert shown.returncode == 2 and "no log of role cook" in shown.stderr
    shown = launch("status", "your run", "--cluster", file)
    assert shown.returncode == 2 and f"your run is no run below {root}" in shown.stderr


def test_a_run_that_works_already_is_seen_through_the_tunnel(
    tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    root = tmp_path / "shared"
    a_run(root / "runs" / "tiny_qwen3_moe")
    assert cli.main(["tiny_qwen3_moe", "--cluster", cluster_file(tmp_path, root)]) == 2
    assert "job 7 of cluster 'far' is RUNNING" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("nemo_run") is None, reason="nemo-run is not installed")
def test_a_dry_run_asks_nobody(tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tools / "ssh").write_text("#!/bin/sh\nexit 255\n")
    words = ["--model.hf_path", "/only/there", "--data.tokenizer", "/only/there", "--data.sft_steps", "0"]
    file = cluster_file(tmp_path, tmp_path)
    assert cli.main(["tiny_qwen3_moe", "--cluster", file, "--dry-run", *words]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash")
    assert cli.main(["tiny_qwen3_moe", "--cluster", file, *words]) == 2
    assert "CLUSTER.tunnel.host" in capsys.readouterr().err
