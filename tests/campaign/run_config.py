"""The run of a campaign: tiny_qwen3 on the rows of a file, with the reward of a file, which faults may change."""

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

from megatron_fp8rl.config import DataConfig, EnvironmentConfig, RewardConfig, RunConfig
from model_configs.tiny import tiny_qwen3

DATA = "FP8RL_CAMPAIGN_DATA"  # environment variable: folder of the rows and of the reward
ROWS, FAILS, LEAKS = "rows.jsonl", "fails", "leaks"  # the last two: files that change the reward while they exist
_REWARD = f'''"""The reward of a campaign's run, which fails or leaks while a file of that name exists."""

from pathlib import Path

FOLDER = Path(__file__).parent
KEPT = []


def correct(completion, answer):
    if (FOLDER / "{FAILS}").exists():
        raise RuntimeError("the campaign lets every score fail")
    if (FOLDER / "{LEAKS}").exists():
        KEPT.append(bytearray(64 << 20))
    return float(completion.strip() == answer)
'''


def write_data(folder: Path) -> None:
    """Rows of sums as the warm start has learned them, and the reward."""
    folder.mkdir(parents=True)
    pairs = list(itertools.product(range(10), repeat=2))
    rows = [{"question": f"{a} + {b} = ", "answer": str(a + b)} for a, b in pairs]
    (folder / ROWS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[::9]))
    (folder / "reward.py").write_text(_REWARD)


def config() -> RunConfig:
    folder = Path(os.environ[DATA])
    rewards = (RewardConfig(function=f"{folder / 'reward.py'}:correct"),)
    source = EnvironmentConfig(dataset=str(folder / ROWS), eval=str(folder / "held_out.jsonl"), rewards=rewards)
    cfg = tiny_qwen3()
    return replace(cfg, name="campaign", data=replace(DataConfig(), environments=(source,)))
