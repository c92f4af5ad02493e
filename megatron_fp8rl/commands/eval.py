"""The ``eval`` command: accuracy and pass@k of a checkpoint."""

import os
import sys
from dataclasses import replace
from functools import partial

from megatron_fp8rl import cli, evaluate
from megatron_fp8rl.commands.ranks import longest_wait_s, on_every_rank
from megatron_fp8rl.commands.report import write_reports
from megatron_fp8rl.config import ConfigError, RunConfig
from megatron_fp8rl.preflight.data_check import check_agents

_CHECKED = "FP8RL_CHECKPOINT_CHECKED"  # set for ranks that start after the check


def _run(invocation: cli.Invocation) -> int:
    try:
        evaluation = evaluate.plan(invocation.cfg, invocation.options)
        if os.environ.get("RANK", "0") == "0" and _CHECKED not in os.environ:
            evaluate.check(evaluation)
            check_agents(evaluation.cfg)
            os.environ[_CHECKED] = "1"
    except ConfigError as error:
        print(f"eval: {error}", file=sys.stderr)
        return 2
    return on_every_rank(evaluation.cfg, partial(_evaluate, evaluation))


def _evaluate(evaluation: evaluate.Evaluation) -> None:
    """Collective: evaluate, then write the report of the run's folder."""
    evaluate.run(evaluation, deadline_s=longest_wait_s(evaluation.cfg.engine))
    if os.environ.get("RANK", "0") == "0":
        write_reports(evaluation.cfg)


def _data_of(invocation: cli.Invocation) -> RunConfig:
    evaluation = evaluate.plan(invocation.cfg, invocation.options)
    folder = None if evaluation.model_dir is None else str(evaluation.model_dir)
    return replace(evaluation.cfg, model=replace(evaluation.cfg.model, hf_path=folder))


COMMAND = cli.Command(
    name="eval",
    summary="accuracy and pass@k of a checkpoint on held-out problems",
    run=_run,
    options=evaluate.EvalOptions,
    reads_data=True,
    data_of=_data_of,
)
