"""Some random faults; ``python -m tests.campaign --minutes 60`` does as many as one likes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_random_faults_change_nothing(tmp_path):
    command = [sys.executable, "-m", "tests.campaign", "--faults", "12", "--work", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    (struck, survived, runs) = map(int, re.search(r"\| all \| (\d+) \| (\d+) of (\d+) \|", done.stdout).groups())
    assert struck >= 12 and survived == runs
