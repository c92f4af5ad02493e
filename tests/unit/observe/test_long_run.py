"""Files of a run of ten thousand steps."""

import json
import subprocess
import sys
import time
from contextlib import closing

import pytest
from observed_run import observe_run

from megatron_fp8rl.observe.recording import RolloutWriter
from tests.helpers.rollouts import make_group

NUM_STEPS = 10_000
# Prints the largest memory of a command in KiB. A small process starts the command, because Linux counts the memory of
# the process that starts it, too.
MEASURE = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@pytest.mark.long
def test_a_report_of_ten_thousand_steps_takes_seconds_and_less_than_a_gigabyte(tmp_path):
    observe_run(tmp_path, steps=range(1, 3))
    for name in ("metrics.jsonl", "details.jsonl"):
        record = json.loads((tmp_path / name).read_text().splitlines()[-1])
        with (tmp_path / name).open("w") as file:
            file.writelines(json.dumps(record | {"step": step}) + "\n" for step in range(1, NUM_STEPS + 1))
    with closing(RolloutWriter(tmp_path / "rollouts")) as writer:
        for step in range(3, NUM_STEPS + 1, 10):
            writer.write(step, [make_group(step)])
    start = time.monotonic()
    command = [sys.executable, "-m", "megatron_fp8rl", "report", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", MEASURE, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert time.monotonic() - start < 60  # 10 s alone
    assert int(done.stdout) < 1 << 20
    assert (tmp_path / "report.html").stat().st_size > 1 << 20
