"""The installed wheel: users' commands work from an empty folder, and no common name is at the top level."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BUILD = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(
        b"\0"
    ):
        path = ROOT / name.decode()
        if name and path.is_file() and name.decode().split("/")[0] not in ("tests", "docs", "benchmarks"):
            (source / name.decode()).parent.mkdir(parents=True, exist_ok=True)
            (source / name.decode()).write_bytes(path.read_bytes())
    subprocess.run([sys.executable, *BUILD, "-w", str(folder), str(source)], check=True, timeout=300)
    [wheel] = folder.glob("*.whl")
    target = folder / "site-packages"
    args = ("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel))
    subprocess.run([sys.executable, *args], check=True, timeout=300)
    return target


def run(installed: Path, folder: Path, *args: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(args, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_nothing_at_the_top_has_a_name_that_others_use(installed: Path):
    top = {path.name for path in installed.iterdir() if path.is_dir() and not path.name.endswith((".dist-info", "bin"))}
    assert top == {"megatron_fp8rl", "megatron_fp8rl_programs"}


def test_the_users_path_works_from_an_empty_folder(installed: Path, tmp_path: Path):
    tools = installed / "bin"
    python = (sys.executable,)
    assert "This run can work" in run(
        installed, tmp_path, *python, tools / "megatron-fp8rl", "doctor", "tiny_qwen3", "--gpu", "h200"
    )
    assert "tiny_qwen3_moe" in run(installed, tmp_path, *python, "-m", "megatron_fp8rl", "train", "--help")
    shown = run(
        installed, tmp_path, *python, tools / "megatron-fp8rl-launch", "tiny_qwen3", "--cluster", "local", "--dry-run"
    )
    assert f"run folder {tmp_path}/runs/tiny_qwen3" in shown
    assert "hf_to_fp8" in run(installed, tmp_path, *python, tools / "megatron-fp8rl-checkpoints", "--help")


def test_a_program_has_one_module_under_both_names(installed: Path, tmp_path: Path):
    program = (
        "import megatron_fp8rl_programs.launch.cluster as a, launch.cluster as b, sys\n"
        "from megatron_fp8rl_programs import launch\n"
        "import launch as plain\n"
        "assert a is b and launch is plain and a.__spec__.name == 'launch.cluster'\n"
        "print(b.__file__)\n"
        "from pathlib import Path\n"
        "from launch import slurm\n"
        "slurm.copy_code(Path('code'))\n"
    )
    assert run(installed, tmp_path, sys.executable, "-c", program).startswith(str(installed))
    assert (tmp_path / "code" / "launch" / "agent.py").is_file() and (
        tmp_path / "code" / "megatron_fp8rl" / "cli.py"
    ).is_file()
