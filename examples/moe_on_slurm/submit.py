"""Submit GRPO of Qwen3-30B-A3B to Slurm by nemo-run.

    PYTHONPATH=. python examples/moe_on_slurm/submit.py FOLDER [--model DIR] [--run]

In: folders that all nodes see. Out: the batch script on the terminal; with ``--run`` a queued job.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import nemo_run as run

from launch import nemo
from model_configs.qwen3 import grpo_qwen3_30b_a3b_16gpu


def executor() -> run.SlurmExecutor:
    """The cluster: set your account, partition, time limit and, if you use one, container image."""
    return run.SlurmExecutor(account="project", partition="batch", time="04:00:00", gpus_per_node=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the run writes; all nodes see it")
    parser.add_argument(
        "--model", type=Path, help="folder of the Hugging Face checkpoint; without it weights are random"
    )
    parser.add_argument("--run", action="store_true", help="queue the job instead of printing its script")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    cfg = grpo_qwen3_30b_a3b_16gpu()
    hf_path = str(options.model.resolve()) if options.model else None
    cfg = replace(cfg, model=replace(cfg.model, hf_path=hf_path, random=hf_path is None))
    with nemo.experiment(cfg, executor(), gpu="h200", run_root=str(options.folder.resolve())) as experiment:
        if options.run:
            experiment.run(detach=True)
        else:
            experiment.dryrun()


if __name__ == "__main__":
    main()
