"""What is the user's own: modules travel with the job, and paths that nodes would not find are named."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from launch import slurm, user_files
from launch.cluster import Cluster
from megatron_fp8rl.config import EnvironmentConfig, RewardConfig
from megatron_fp8rl.envs.rewards import functions
from model_configs.tiny import tiny_qwen3

MOUNTS = "/dev/sda / ext4 rw 0 0\nserver:/x /lustre lustre rw 0 0\ntmpfs /tmp tmpfs rw 0 0\n"


def config(dataset: str, **algo: str):
    cfg = tiny_qwen3()
    data = replace(cfg.data, environments=(EnvironmentConfig(dataset=dataset),))
    return replace(cfg, data=data, algo=replace(cfg.algo, **algo))


def test_modules_and_what_they_import_beside_them_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_task.py").write_text("import json\nimport my_words\nclass Task: ...\n")
    (tmp_path / "my_words.py").write_text("WORDS = ()\n")
    (tmp_path / "not_named.py").write_text("")
    (tmp_path / "my_losses").mkdir()
    (tmp_path / "my_losses" / "__init__.py").write_text("")
    (tmp_path / "my_losses" / "short.py").write_text("def loss(): ...\n")
    (tmp_path / "my_losses" / "table.csv").write_text("1,2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    cfg = config("env:my_task:Task", loss="my_losses.short:loss")
    found = user_files.modules(cfg.algo, cfg.data, "my_runs:config")
    assert found == (str(tmp_path / "my_losses"), str(tmp_path / "my_task.py"), str(tmp_path / "my_words.py"))
    assert not {"my_task", "my_losses.short"} & set(sys.modules), "nothing is imported to be found"
    slurm.copy_code(tmp_path / "code", user_modules=found)
    (tmp_path / "my_words.py").write_text("raise RuntimeError('an edit after submission')\n")
    assert (tmp_path / "code" / "my_words.py").read_text() == "WORDS = ()\n"
    assert (tmp_path / "code" / "my_losses" / "table.csv").is_file() and not (
        tmp_path / "code" / "not_named.py"
    ).exists()


def test_modules_of_this_code_and_installed_ones_stay():
    cfg = config("env:reasoning_gym:X")
    assert user_files.modules(cfg.algo, cfg.data, "model_configs.tiny:tiny_qwen3") == ()


def test_modules_in_the_root_of_the_project_travel(tmp_path: Path):
    """As in a clone: the folder of this code has modules of the user, too."""
    clone = tmp_path / "clone"
    slurm.copy_code(clone)
    (clone / "my_run.py").write_text("import my_words, launch.spec, megatron_fp8rl.config, numpy\n")
    (clone / "my_words.py").write_text("import json\n")
    program = (
        "import json; from launch import user_files; from model_configs.tiny import tiny_qwen3 as t; "
        "print(json.dumps(user_files.modules(t().algo, t().data, 'my_run:model')))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=clone, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [str(clone / "my_run.py"), str(clone / "my_words.py")]


def test_agents_and_the_imports_of_files_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file beside its imports, and an agent that is a module, in a folder without __init__.py."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "reward.py").write_text("import math, my_scale\ndef graded(completion): ...\n")
    (tmp_path / "my_scale.py").write_text("SCALE = 2\n")
    (tmp_path / "play.py").write_text("from my_tools import web\nasync def rollout(session, row): ...\n")
    (tmp_path / "my_tools" / "deep").mkdir(parents=True)
    (tmp_path / "my_tools" / ".cache").mkdir()
    for name in ("web.py", "deep/er.py", "rows.csv", ".cache/no.py"):
        (tmp_path / "my_tools" / name).write_text("")
    reward = RewardConfig(function=f"{tmp_path}/reward.py:graded")
    sources = [
        EnvironmentConfig(dataset="hub:x/y", rewards=(reward,), agent=f"{tmp_path}/play.py:rollout"),
        EnvironmentConfig(dataset="hub:x/y", rewards=(reward,), agent="my_tools.web:rollout"),
    ]
    cfg = config("hub:x/y")
    data = replace(cfg.data, environments=tuple(sources))
    assert user_files.function_files(data) == (str(tmp_path / "reward.py"), str(tmp_path / "play.py"))
    found = user_files.modules(cfg.algo, data)
    assert found == (str(tmp_path / "my_tools"), str(tmp_path / "my_scale.py"))
    slurm.copy_code(tmp_path / "code", user_files.function_files(data), found)
    copied = {str(path.relative_to(tmp_path / "code")) for path in (tmp_path / "code" / "my_tools").rglob("*.*")}
    assert copied == {"my_tools/web.py", "my_tools/deep/er.py"}
    monkeypatch.setenv(functions.COPIES, str(tmp_path / "code" / "own"))
    assert functions.parse(f"{tmp_path}/play.py:rollout")[0] == tmp_path / "code" / "own" / f"{tmp_path}/play.py"[1:]


@pytest.mark.parametrize(
    ("folder", "cluster", "run_dir", "said"),
    [
        ("/tmp", {}, "/lustre/me/run", "on a local file system of this machine (tmpfs)"),
        ("/tmp", {}, "/data/run", ""),  # one machine, or a mount that nobody knows
        (
            "/tmp",
            {"container_image": "i", "container_mounts": ("/models:/models",)},
            "/lustre/run",
            "not mounted into the container",
        ),
        ("/tmp", {"container_image": "i", "container_mounts": ("{here}:{here}",)}, "/data/run", ""),
    ],
)
def test_paths_that_nodes_would_not_find_are_named(tmp_path: Path, folder, cluster, run_dir, said):
    rows = tmp_path / "train.jsonl"
    rows.write_text('{"question": "1", "answer": "1"}\n')
    mounts = MOUNTS.replace("/tmp", str(tmp_path.parent))
    cluster = {
        name: tuple(m.format(here=tmp_path) for m in v) if isinstance(v, tuple) else v for name, v in cluster.items()
    }
    found = user_files.unreachable(config(str(rows)), Cluster(**cluster), run_dir, mounts)
    assert len(found) == bool(said)
    assert not said or (said in found[0] and found[0].startswith(f"--data.environments.0.dataset = '{rows}'"))


def test_a_relative_path_is_named_with_the_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    [found] = user_files.unreachable(config("data/train.jsonl"), Cluster(), "/data/run", MOUNTS)
    assert f"Write {tmp_path}/data/train.jsonl" in found


LOCAL = "/dev/sda / ext4 rw 0 0\n"


def test_files_and_runs_in_a_folder_that_each_node_has_for_itself_are_refused():
    """Where Slurm has other nodes. A model folder without a '/' and a pattern of files are paths, too."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        Path(folder, "a.jsonl").write_text("{}\n")
        for dataset in (f"{folder}/a.jsonl", f"{folder}/*.jsonl", folder):
            [found] = user_files.unreachable(config(dataset), Cluster(), "/data/run", LOCAL, other_nodes=True)
            assert "is in /dev/shm, which is local to each node. Copy it below /data." in found
            assert user_files.unreachable(config(dataset), Cluster(), "/data/run", LOCAL, other_nodes=False) == []
        [found] = user_files.unreachable(config("x"), Cluster(), f"{folder}/run", LOCAL, other_nodes=True)
        assert found.startswith("--output_dir = ") and "Set CLUSTER.run_root" in found
        shared = LOCAL + "server:/x /dev/shm nfs4 rw 0 0\n"
        assert user_files.unreachable(config(f"{folder}/*"), Cluster(), f"{folder}/r", shared, other_nodes=True) == []


def test_a_model_in_the_current_folder_is_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen3").mkdir()
    cfg = config("hub:x/y")
    cfg = replace(cfg, model=replace(cfg.model, hf_path="Qwen3"))
    [found] = user_files.unreachable(cfg, Cluster(), "/data/run", LOCAL, other_nodes=False)
    assert found.startswith("--model.hf_path = 'Qwen3': is relative") and f"Write {tmp_path}/Qwen3" in found


@pytest.mark.parametrize(("nodes", "has"), [("node1\nnode2\n", True), ("here\n", False), (None, False)])
def test_other_nodes_are_those_that_slurm_lists(monkeypatch: pytest.MonkeyPatch, nodes: str | None, has: bool):
    monkeypatch.setattr(slurm, "slurm_output", lambda *args: nodes)
    monkeypatch.setattr(slurm.socket, "gethostname", lambda: "here.cluster")
    assert slurm.has_other_nodes() == has
