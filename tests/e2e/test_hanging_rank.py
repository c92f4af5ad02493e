"""A real run of two ranks of which one stands still: the run ends after its deadline, and names the rank.

Under the grpo command and under the user's own torchrun; a first SIGTERM ends the run sooner. Other combinations of a
fault and a signal are in ``unit/runtime``, with programs that stand for a run.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.own_model import make_model
from tests.helpers.processes import until

ROOT = Path(__file__).resolve().parents[2]
DYING = Path(__file__).parent / "dying"
REWARD = "def digits(completion, answer):\n    return sum(c.isdigit() for c in completion) / max(1, len(completion))\n"
SCALE = 0.1  # of deadlines: an update may take 30 s, and a rank that was asked to end stands still for 3 s at most
UPDATE_S = 300.0 * SCALE
OWN = (
    "grpo --model model --data train.jsonl --reward reward.py:digits --algo.loss hangs:loss --num_steps 100 "
    f"--parallel.world_size 2 --engine.deadline_scale {SCALE} --sampling.prompts_per_step 2 "
    "--sampling.max_prompt_tokens 128 --sampling.max_completion_tokens 12 --observe.display plain "
    "--observe.eval_prompts 4"
).split()
COMMAND = (sys.executable, "-m", "megatron_fp8rl", *OWN)
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    *("-m", "megatron_fp8rl", *OWN),
)
START_S, END_S = 300.0, 120.0  # until a rank stands still; after its deadline


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    rows = [{"question": f"Tom has {i} apples and buys {i + 1} more?", "answer": str(2 * i + 1)} for i in range(40)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (folder / "reward.py").write_text(REWARD)
    make_model(folder / "model", [row["question"] for row in rows])
    return folder


@pytest.mark.parametrize(
    ("command", "fault", "sends", "says"),
    [
        (TORCHRUN, "publication", None, "was stopped by a signal and has stood still for 30 s"),
        (COMMAND, "regex", None, "has run one call without a pause for 30 s: match ("),
        (
            COMMAND,
            "leaves",
            signal.SIGTERM,
            "all trainer ranks wait for each other and are killed: rank 0 in all_reduce",
        ),
    ],
    ids=["stopped-torchrun", "regex", "leaves-SIGTERM"],
)
def test_a_run_with_a_rank_that_stands_still_ends_and_names_it(command, fault, sends, says, folder, tmp_path):
    name, log = tmp_path.name, tmp_path / "log"
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(DYING))),
        "HANGS": f"{fault}@{tmp_path}",
        "FP8RL_TEST_MARK": str(tmp_path),
    }
    with log.open("wb") as output:
        run = subprocess.Popen([*command, "--name", name], cwd=folder, env=environ, stdout=output, stderr=output)
    try:
        until(
            lambda: (tmp_path / "stands-still").exists() or run.poll() is not None, "a rank that stands still", START_S
        )
        assert run.poll() is None, log.read_text()[-3000:]
        began = time.monotonic()
        if sends is not None:
            time.sleep(3.0)
            run.send_signal(sends)
        run.wait((UPDATE_S if sends is None else 0) + END_S)
        text = log.read_text()
        assert run.returncode not in (0, 85) and says in text, text[-3000:]
        pid = (tmp_path / "stands-still").read_text()
        assert fault == "leaves" or f"trainer rank 1 (process {pid}) " in text
        assert sends is not None or time.monotonic() - began >= UPDATE_S - 3
        until(lambda: not _processes(str(tmp_path)), "the processes of the run to end")
    finally:
        for process in [run, *_processes(str(tmp_path))]:
            process.kill()


def _processes(mark: str) -> list[psutil.Process]:
    result = []
    for process in psutil.process_iter(["environ", "status"]):
        is_zombie = process.info["status"] == psutil.STATUS_ZOMBIE
        if (process.info["environ"] or {}).get("FP8RL_TEST_MARK") == mark and not is_zombie:
            result.append(process)
    return result
