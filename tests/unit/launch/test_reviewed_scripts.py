"""Batch scripts as people read and approved them: a change of the launcher, or of nemo-run, shows here as a difference.

To approve a new text, run this file with ``REVIEWED=1`` in the environment, and read the difference before committing it.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("nemo_run", reason="nemo-run is not installed: make install EXTRAS='test launch'", exc_type=ImportError)

from launch import cli
from launch.spec import JobSpec

REVIEWED = Path(__file__).parent / "reviewed"
LARGE = ("grpo_qwen3_30b_a3b", "--cluster", "pyxis")
SMALL = (
    "tiny_qwen3_moe", "--cluster", "plain", "--parallel.world_size", "16", "--parallel.expert", "8",
    "--rollout.placement", "separate", "--rollout.transport", "auto", "--rollout.num_replicas", "2",
)  # fmt: skip
CASES = {
    "containers": LARGE,
    "chain": (*SMALL, "--chain", "2", "--output_dir", "it's a \"run\" of {name}"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_script_is_the_one_that_was_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    status = cli.main([*CASES[name], "--dry-run", "--id", "reviewed"])
    said = capsys.readouterr()
    assert status == 0, said.err
    words = set(re.findall(r"launch\.agent (\S+)", said.out))
    assert len(words) == 1, "every job of a chain starts the same agents"
    (word,) = words
    assert JobSpec.decode(word).problems() == []
    text = said.out.replace(word, "SPEC").replace(sys.executable, "PYTHON").replace(str(tmp_path), "ROOT")
    path = REVIEWED / f"{name}.txt"
    if os.environ.get("REVIEWED") == "1":
        path.write_text(text)
    expected = path.read_text()
    changed = difflib.unified_diff(expected.splitlines(), text.splitlines(), "reviewed", "now", lineterm="")
    assert text == expected, "\n".join(changed)


@pytest.mark.parametrize("name", CASES)
def test_the_script_is_shell(name: str):
    """bash reads it without running it; nothing in it is a container's path that nemo-run left behind."""
    import subprocess

    for script in re.split(r"(?m)^(?=#!/bin/bash$)", (REVIEWED / f"{name}.txt").read_text())[1:]:
        checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, timeout=60)
        assert checked.returncode == 0, checked.stderr
        assert ("/nemo_run" in script) == (name == "containers")
