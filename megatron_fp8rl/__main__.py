"""``python -m megatron_fp8rl COMMAND CONFIG [--field value ...]``: the commands of this package.

Runs in the process that the user starts, or in every rank under torchrun. With one trainer rank the program runs in
this process; with more, and outside torchrun, it starts one process per rank on this machine.

Each command imports the heavy packages it needs, so that help, dry runs and usage errors respond immediately.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_fp8rl import cli, evaluate, own_job
from megatron_fp8rl.config import ConfigError, RunConfig, Violation
from megatron_fp8rl.net.parent import end_with
from megatron_fp8rl.observe.spans import STARTED, add_seconds, span
from megatron_fp8rl.preflight import doctor, plan, show
from megatron_fp8rl.preflight.diagnosis import DoctorOptions, doubts
from megatron_fp8rl.preflight.rules import local_accelerator
from megatron_fp8rl.report import study
from megatron_fp8rl.runtime.stop import StopRequest, run_ranks

if TYPE_CHECKING:
    from megatron_fp8rl.rollout.fleet import Fleet

# Modules of trainer and engine, which a login node lacks.
_OF_ENGINES = ("torch", "vllm", "megatron", "transformers", "datasets", "safetensors", "scipy", "zstandard")
_SEEN = "FP8RL_DATA_SEEN"  # set for ranks whose data were looked at before they were started


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of the report command."""

    run_dir: str = "runs/demo"  # folder of a run, finished or not


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """Identity of this rollout replica in a launched job, or of this node's part of a multi-node replica."""

    replica: int = 0  # 0 ... rollout.num_replicas - 1
    endpoint: Path = Path("rollout-0.json")  # endpoint file, written when the server is ready
    nnodes: int = 1  # number of nodes that the replica spans, as in vLLM
    node_rank: int = 0
    master_addr: str = ""
    master_port: int = 0


def _train(invocation: cli.Invocation) -> int:
    """Warm start if configured, then reinforcement learning."""
    model = invocation.cfg.model
    if model.hf_path is None and not invocation.cfg.data.sft_steps and not model.random:
        print(
            f"{invocation.config_name} has no weights to start from: set --model.hf_path to a Hugging Face checkpoint, "
            "--data.sft_steps for a warm start, or --model.random True to train random weights",
            file=sys.stderr,
        )
        return 2
    return _start(invocation.cfg)


def _sft(invocation: cli.Invocation) -> int:
    return _start(invocation.cfg, wants_rl=False)


def _rl(invocation: cli.Invocation) -> int:
    if invocation.cfg.model.hf_path is None:
        print(
            "rl starts from trained weights: set --model.hf_path to a Hugging Face checkpoint, "
            "or use the train command, which warm-starts first",
            file=sys.stderr,
        )
        return 2
    return _start(invocation.cfg, wants_sft=False)


def _grpo(invocation: cli.Invocation) -> int:
    return _start(invocation.cfg)


def _eval(invocation: cli.Invocation) -> int:
    try:
        evaluation = evaluate.plan(invocation.cfg, invocation.options)
    except ConfigError as error:
        print(f"eval: {error}", file=sys.stderr)
        return 2
    deadline_s = _longest_wait_s(evaluation.cfg)
    return _on_every_rank(evaluation.cfg, partial(_evaluate, evaluation, deadline_s))


def _study(invocation: cli.Invocation) -> int:
    def whole() -> None:
        study_dir = study.run(invocation.cfg, invocation.config_name, invocation.overrides, invocation.options)
        print((study_dir / "study.md").read_text())

    return _refused_or(whole)


def _doctor(invocation: cli.Invocation) -> int:
    return doctor.run(invocation.cfg, invocation.options, invocation.config_name, invocation.overrides)


def _show(invocation: cli.Invocation) -> int:
    return show.run(invocation.cfg, invocation.options)


def _plan(invocation: cli.Invocation) -> int:
    return plan.run(invocation.cfg, invocation.options)


def _report(invocation: cli.Invocation) -> int:
    from megatron_fp8rl.report.run_report import write_report

    try:
        print(write_report(Path(invocation.options.run_dir)))
    except FileNotFoundError as error:
        print(f"report: {error}. Name the folder of a run: report RUN_DIR", file=sys.stderr)
        return 2
    return 0


def _evaluate(evaluation: evaluate.Evaluation, deadline_s: float) -> None:
    """Collective: evaluate, then write the report of the run's folder."""
    evaluate.run(evaluation, deadline_s=deadline_s)
    if os.environ.get("RANK", "0") == "0":
        write_reports(evaluation.cfg)


def write_reports(cfg: RunConfig) -> None:
    """Write the reports of a run and of its warm start, finished or failed. A failing report does not fail the run."""
    from megatron_fp8rl.report.run_report import write_report
    from megatron_fp8rl.sft_loop import WARM_START

    for folder in (Path(cfg.run_dir, WARM_START), Path(cfg.run_dir)):
        try:
            page = write_report(folder)
        except FileNotFoundError:  # no run was started there
            continue
        except Exception as error:
            print(f"the report of {folder} could not be written: {error!r}", file=sys.stderr, flush=True)
            continue
        if cfg.observe.display != "none":
            print(f"report: {page}", flush=True)


def _replica(invocation: cli.Invocation) -> int:
    from megatron_fp8rl.rollout import replica

    return _refused_or(partial(replica.main, invocation.cfg, replica.Part(**vars(invocation.options))))


def _refused_or(program: Callable[[], int | None]) -> int:
    """Run a program and return its status; on a ConfigError, print the error and return 2."""
    try:
        return program() or 0
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


def _start(cfg: RunConfig, *, wants_sft: bool = True, wants_rl: bool = True) -> int:
    """Look at the data and run the requested programs on every rank; returns the exit status."""
    if find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    if _has_to_start_ranks(cfg):
        if status := _refused_or(partial(_look_at_data, cfg)):
            return status
        os.environ[_SEEN] = "1"
    return _on_every_rank(cfg, partial(_run, cfg, wants_sft=wants_sft, wants_rl=wants_rl))


def _has_to_start_ranks(cfg: RunConfig) -> bool:
    """Whether the trainer has several ranks and this process is none of them."""
    return cfg.parallel.world_size > 1 and "RANK" not in os.environ


def _on_every_rank(cfg: RunConfig, program: Callable[[], None]) -> int:
    """Run in this process, or start torchrun on this machine if the trainer has several ranks and this is none."""
    if _has_to_start_ranks(cfg):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(cfg.parallel.world_size),
            "-m",
            "megatron_fp8rl",
            *sys.argv[1:],
        ]
        cores = max(1, (os.cpu_count() or 1) // cfg.parallel.world_size)
        return run_ranks(command, {"OMP_NUM_THREADS": str(cores), **os.environ})
    import torch

    if not torch.cuda.is_available():
        # Set before importing Megatron-Core and vLLM, so that their compiled functions need no compiler on a CPU.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    return _refused_or(program)


def _run(cfg: RunConfig, *, wants_sft: bool, wants_rl: bool) -> None:
    """Collective: run this rank's part of the requested programs."""
    add_seconds("start_command", time.time() - float(os.environ.get(STARTED, time.time())))
    stop = StopRequest.install()  # before starting anything that a signal to the whole job could kill
    with contextlib.ExitStack() as stack:
        stack.enter_context(stop.errors_noted())
        fleet = _start_engines(cfg, stack, wants_rl) if os.environ.get("RANK", "0") == "0" else None
        with span("start_imports"):  # while engines start
            import torch

            from megatron_fp8rl.trainer.compat import megatron_on_cpu

            megatron_on_cpu.install()
            from megatron_fp8rl import rl_loop, sft_loop
            from megatron_fp8rl.data.model_dir import model_dir
            from megatron_fp8rl.diagnose.first_difference import explain
            from megatron_fp8rl.runtime.colocation import host_memory
            from megatron_fp8rl.trainer.parallel import Parallel
        parallel = Parallel.init(cfg.parallel, deadline_s=_longest_wait_s(cfg))
        stack.callback(parallel.close)
        host = host_memory(cfg, parallel.device) if wants_rl else None
        if fleet is not None and cfg.rollout.placement == "colocated" and torch.cuda.is_available():
            # An engine measures free memory while it starts; the trainer allocates afterwards.
            with span("start_engines"):
                fleet.wait_until_ready()
                fleet.sleep()
        parallel.barrier("model folder")
        tokenizer_dir = model_dir(cfg)
        if wants_sft and cfg.data.sft_steps and cfg.model.hf_path is None:
            warm_start = sft_loop.run(cfg, parallel, tokenizer_dir, stop)
            cfg = replace(cfg, model=replace(cfg.model, hf_path=str(warm_start)))
        if wants_rl:
            rl_loop.run(cfg, parallel, tokenizer_dir, fleet, stop, explain, host)


def _start_engines(cfg: RunConfig, stack: contextlib.ExitStack, wants_rl: bool) -> Fleet | None:
    """Rank 0: look at the data, then start what samples and scores, without waiting for it."""
    from megatron_fp8rl.data import run_folder

    stack.enter_context(run_folder.held(cfg))
    if _SEEN not in os.environ:
        with span("start_data"):
            _look_at_data(cfg)
    from megatron_fp8rl.data.model_dir import model_dir, write_model_dir
    from megatron_fp8rl.rollout import reward_server
    from megatron_fp8rl.rollout.fleet import Fleet

    stack.callback(write_reports, cfg)  # also after an error
    write_model_dir(cfg)
    if not wants_rl or cfg.rollout.replay is not None:
        return None
    stack.enter_context(reward_server.serving(cfg))
    return stack.enter_context(Fleet.start(cfg, model_dir(cfg), cfg.run_dir, wait=False))


def _look_at_data(cfg: RunConfig) -> None:
    """Print what the sources hold, what rewards say to known answers, and doubts; raise ConfigError if a source cannot be
    used, before engines start. A replay reads none."""
    if cfg.rollout.replay is not None:
        return
    lines, findings = doctor.look_at_data(cfg)
    findings += doubts(cfg, local_accelerator())
    lines += [f"{finding.severity.upper()}: {finding.problem}" for finding in findings if finding.severity != "error"]
    if cfg.observe.display != "none" and lines:
        print("\n".join(lines), flush=True)
    if errors := [finding for finding in findings if finding.severity == "error"]:
        shown = {"--data.environments": [source.dataset for source in cfg.data.environments]}
        shown["--data.max_dropped"] = cfg.data.max_dropped
        raise ConfigError([Violation(e.subject, shown[e.subject], e.problem, "Nothing was started") for e in errors])


def _longest_wait_s(cfg: RunConfig) -> float:
    """Timeout between trainer ranks: rank 0 may wait for engines to start, to sample and to be updated."""
    rollout = cfg.rollout
    return max(600.0, rollout.start_deadline_s + rollout.request_deadline_s + rollout.update_deadline_s)


COMMANDS = (
    cli.Command(
        name="grpo",
        summary="reinforcement learning of your own model: --model DIR --data FILE --reward NAME",
        run=_grpo,
        options=own_job.GrpoOptions,
        configure=own_job.configure,
    ),
    cli.Command(
        name="train", summary="warm start if the configuration has one, then reinforcement learning", run=_train
    ),
    cli.Command(
        name="demo",
        summary="train the tiny mixture of experts: a first run on any machine",
        run=_train,
        default_config="demo",
    ),
    cli.Command(name="sft", summary="the supervised warm start alone", run=_sft),
    cli.Command(name="rl", summary="reinforcement learning from a Hugging Face checkpoint", run=_rl),
    cli.Command(
        name="eval",
        summary="accuracy and pass@k of a checkpoint on held-out problems",
        run=_eval,
        options=evaluate.EvalOptions,
    ),
    cli.Command(
        name="study",
        summary="compare rollout and training precisions over several seeds",
        run=_study,
        options=study.StudyOptions,
    ),
    cli.Command(
        name="report", summary="write report.html of a run", run=_report, takes_config=False, options=ReportOptions
    ),
    cli.Command(
        name="doctor",
        summary="preflight without a GPU: parameters, memory, FP8 tiling, precision, packages, and what to fix",
        run=_doctor,
        options=DoctorOptions,
        judges_config=True,
    ),
    cli.Command(
        name="plan",
        summary="seconds by phase, memory, cost and lost time of a run on --gpus N, and the best layout; needs no GPU",
        run=_plan,
        options=plan.PlanOptions,
        judges_config=True,
    ),
    cli.Command(
        name="show",
        summary="for every group of layers its format and its kernels at both ends, and why",
        run=_show,
        options=show.ShowOptions,
        judges_config=True,
    ),
    cli.Command(
        name="replica",
        summary="a rollout replica, as the agents of a launched job start it",
        run=_replica,
        options=ReplicaOptions,
        judges_config=True,
    ),
)


def main() -> int:
    """Entry point of the console script."""
    if "RANK" not in os.environ or STARTED not in os.environ:  # a rank has it from the process that launched it
        os.environ[STARTED] = str(time.time())
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with(os.getppid())  # torchrun, which leaves its ranks to themselves when it is killed
    try:
        return cli.main(COMMANDS)
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in _OF_ENGINES:
            raise
        print(
            f"python -m megatron_fp8rl: {name} is not installed here. This environment can check, plan and launch; to "
            "train or sample, run `make install` in a checkout of the project.",
            file=sys.stderr,
        )
        return 2


if __name__ == "__main__":
    sys.exit(main())
