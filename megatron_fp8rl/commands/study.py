"""The ``study`` command: compare precisions over several seeds."""

from megatron_fp8rl import cli
from megatron_fp8rl.commands.ranks import run_with_status
from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.report import study


def _run(invocation: cli.Invocation) -> int:
    def run_study() -> None:
        study_dir = study.run(invocation.cfg, invocation.config_name, invocation.overrides, invocation.options)
        print((study_dir / "study.md").read_text())

    return run_with_status(run_study)


def _data_of(invocation: cli.Invocation) -> RunConfig:
    study.plan_runs(invocation.cfg, invocation.overrides, invocation.options)
    return invocation.cfg


COMMAND = cli.Command(
    name="study",
    summary="compare rollout and training precisions over several seeds",
    run=_run,
    options=study.StudyOptions,
    reads_data=True,
    data_of=_data_of,
)
