"""The commands ``doctor``, ``plan`` and ``show``: what a configuration will do, without running it."""

from megatron_fp8rl import cli
from megatron_fp8rl.commands.compile_kernels import fill_cache
from megatron_fp8rl.preflight import doctor, plan, show
from megatron_fp8rl.preflight.assessment import DoctorOptions


def _doctor(invocation: cli.Invocation) -> int:
    status = doctor.run(invocation.cfg, invocation.options, invocation.config_name, invocation.overrides)
    return fill_cache(invocation) or status if invocation.options.compile and status < 2 else status


DOCTOR = cli.Command(
    name="doctor",
    summary="preflight without a GPU: parameters, memory, FP8 tiling, precision, packages, and what to fix",
    run=_doctor,
    options=DoctorOptions,
    checks_config=True,
)
PLAN = cli.Command(
    name="plan",
    summary="seconds by phase, memory, cost and lost time of a run on --gpus N, and the best layout; needs no GPU",
    run=lambda invocation: plan.run(invocation.cfg, invocation.options),
    options=plan.PlanOptions,
    checks_config=True,
)
SHOW = cli.Command(
    name="show",
    summary="for every group of layers its format and its kernels at both ends, and why",
    run=lambda invocation: show.run(invocation.cfg, invocation.options),
    options=show.ShowOptions,
    checks_config=True,
)
