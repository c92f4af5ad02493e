"""Random faults: FP8RL_CAMPAIGN_FAULTS of them, 5 by default; 200 take about an hour on two cores."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_random_faults_change_nothing(tmp_path):
    budget = int(os.environ.get("FP8RL_CAMPAIGN_FAULTS", "5"))
    minutes = 30 + 0.5 * budget
    command = [sys.executable, "-m", "tests.campaign", "--faults", str(budget), "--minutes", str(minutes)]
    command += ["--work", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60 * minutes + 3000)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    (struck, survived, runs) = map(int, re.findall(r"\| all \| (\d+) \| (\d+) of (\d+) \|", done.stdout)[-1])
    assert struck >= budget and survived == runs
