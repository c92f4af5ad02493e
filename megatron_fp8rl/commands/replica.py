"""The ``replica`` command, which the agents of a launched job start."""

from functools import partial

from megatron_fp8rl import cli
from megatron_fp8rl.commands.ranks import run_with_status
from megatron_fp8rl.kernels import compile_cache
from megatron_fp8rl.rollout import replica


def _run(invocation: cli.Invocation) -> int:
    compile_cache.use(invocation.cfg.run_dir)
    return run_with_status(partial(replica.main, invocation.cfg, invocation.options))


COMMAND = cli.Command(
    name="replica",
    summary="a rollout replica, as the agents of a launched job start it",
    run=_run,
    options=replica.Part,
    checks_config=True,
)
