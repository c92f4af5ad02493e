"""Saves checkpoints and records rollouts in a folder; run under strace by test_power_loss.py."""

import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from megatron_fp8rl.observe.recording import RolloutWriter
from tests.helpers.dist import run_ranks
from tests.helpers.rollouts import make_group
from tests.helpers.training import DENSE, continue_training, run_config


def save(folder: str, steps: tuple[int, ...]) -> None:
    from megatron_fp8rl.trainer import checkpoint
    from megatron_fp8rl.trainer.parallel import Parallel
    from megatron_fp8rl.trainer.policy import Policy

    cfg = run_config(model=replace(DENSE, num_layers=1))
    cfg = replace(cfg, checkpoint=replace(cfg.checkpoint, keep=2))
    policy = Policy.build(cfg, Parallel.init(cfg.parallel, deadline_s=60))
    with closing(RolloutWriter(Path(folder, "rollouts"))) as rollouts:
        for step in steps:
            continue_training(policy, 1)
            rollouts.write(step, [make_group(step)])
            rollouts.flush()
            checkpoint.save(Path(folder, "checkpoints"), step, policy, {"step": step})
            Path(folder, f"saved_{step}").touch()  # from here on, the step must not be lost


if __name__ == "__main__":
    run_ranks(1, save, sys.argv[1], (1, 2, 3))
