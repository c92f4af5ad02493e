"""Tests that pass only alone are named, and distinguished from those that are broken; more than two fail the build."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "tools" / "run_tests.py"

# Fails in a worker of xdist, which shares the cores, and passes without one.
LONELY = """
import os
import pytest

def fail_beside_others():
    assert "PYTEST_XDIST_WORKER" not in os.environ

@pytest.fixture
def scarce():
    fail_beside_others()

@pytest.mark.parametrize("text", ["two words", "it's", 'a "quote"', "a::b [c] - d", "-n 3", "é", ""])
def test_ids(text):
    if text != "":
        fail_beside_others()

def test_setup(scarce):
    pass

def test_fine():
    pass
"""
BROKEN = "def test_broken():\n    assert 1 == 2\n"
MANY = "import pytest\n@pytest.mark.parametrize('n', range(11))\ndef test_n(n):\n    assert n < 0\n"


def run(folder: Path, *args: str, **files: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -ra\n")
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, SCRIPT, "-n", "1", *args]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def test_what_passes_only_alone_fails_with_its_name(tmp_path: Path):
    done = run(tmp_path, test_lonely=LONELY, test_broken=BROKEN)
    assert done.returncode == 1
    first, output, second = done.stdout.partition("8 failed while others shared the cores; again, alone")
    assert output and "7 failed, 2 passed, 1 error" in first, done.stdout
    for name in ("two words", "it's", 'a "quote"', "a::b [c] - d", "-n 3"):
        assert f"FAILS ONLY BESIDE OTHERS: test_lonely.py::test_ids[{name}]\n" in second
    assert "FAILS ONLY BESIDE OTHERS: test_lonely.py::test_setup\n" in second and "test_fine" not in second
    assert "FAILS ALSO ALONE: test_broken.py::test_broken\n" in second
    assert not (tmp_path / ".pytest_cache").exists()


@pytest.mark.parametrize(
    ("selected", "broken", "status"), [("words", "", 0), ("words or setup or a", "", 1), ("words", BROKEN, 1)]
)
def test_two_that_pass_only_alone_are_tolerated(tmp_path: Path, selected: str, broken: str, status: int):
    done = run(tmp_path, "-k", f"{selected} or broken", test_lonely=LONELY, test_broken=broken)
    assert done.returncode == status, done.stdout
    assert "FAILS ONLY BESIDE OTHERS: test_lonely.py::test_ids[two words]\n" in done.stdout


@pytest.mark.parametrize(
    ("args", "name", "text", "status"),
    [
        ((), "test_many", MANY, 1),
        ((), "test_syntax", "def test(:\n", 1),
        (("--no-such-option",), "test_broken", BROKEN, 4),
    ],
    ids=["too many", "collection error", "usage error"],
)
def test_nothing_else_is_repeated(tmp_path: Path, args: tuple[str, ...], name: str, text: str, status: int):
    done = run(tmp_path, *args, **{name: text})
    assert (done.returncode, "alone" in done.stdout) == (status, False), done.stdout + done.stderr
