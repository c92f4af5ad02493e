"""``python -m megatron_fp8rl COMMAND CONFIG [--field value ...]``: dispatches to ``commands/``."""

import io
import os
import select
import signal
import sys
import time

try:
    from megatron_fp8rl import cli
    from megatron_fp8rl.commands import check, distill, grpo, replica, report, study, supervised, train
    from megatron_fp8rl.commands.eval import COMMAND as EVAL
    from megatron_fp8rl.net.parent import end_with
    from megatron_fp8rl.observe.spans import STARTED
except ModuleNotFoundError as missing:
    if missing.name is None or missing.name.startswith("megatron_fp8rl"):
        raise
    remedy = "Install the wheel with its requirements, or run `make install` in a checkout of the project"
    sys.exit(f"python -m megatron_fp8rl: {missing.name} is not installed here. {remedy}.")

# Packages of trainer and engine, which a login node lacks.
_HEAVY = ("torch", "vllm", "megatron", "transformers", "datasets", "safetensors", "scipy", "zstandard")
COMMANDS = (
    grpo.COMMAND,
    train.TRAIN,
    train.DEMO,
    supervised.SFT,
    supervised.DPO,
    distill.COMMAND,
    train.RL,
    EVAL,
    study.COMMAND,
    report.COMMAND,
    check.DOCTOR,
    check.PLAN,
    check.SHOW,
    replica.COMMAND,
)


def main() -> int:
    """Entry point of the console script."""
    if "RANK" not in os.environ or STARTED not in os.environ:  # the process that launches a rank sets it for the rank
        os.environ[STARTED] = str(time.time())
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with(os.getppid())  # a torchrun that is killed leaves its ranks running
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # bars and other signs that a terminal's encoding may lack
    try:
        status = cli.main(COMMANDS)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        reader = select.poll()
        reader.register(sys.stdout, 0)  # reports errors alone
        if not reader.poll(0):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `head` has seen enough
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in _HEAVY:
            raise
        print(
            f"python -m megatron_fp8rl: {name} is not installed here. This environment can check, plan and launch; to "
            "train or sample, run `make install` in a checkout of the project.",
            file=sys.stderr,
        )
        return 2


if __name__ == "__main__":
    sys.exit(main())
