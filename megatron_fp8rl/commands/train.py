"""The commands ``train``, ``demo`` and ``rl``: a warm start, reinforcement learning, or both; and the start of any job.

Only functions import torch, Megatron-Core and vLLM, so that help, dry runs and usage errors respond immediately.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_fp8rl import cli
from megatron_fp8rl.commands.ranks import has_to_start_ranks, longest_wait_s, on_every_rank, run_with_status
from megatron_fp8rl.commands.report import write_reports
from megatron_fp8rl.config import ConfigError, RunConfig
from megatron_fp8rl.envs.source_kind import job_of
from megatron_fp8rl.observe.spans import span
from megatron_fp8rl.preflight import teachers
from megatron_fp8rl.preflight.data_check import check_data
from megatron_fp8rl.preflight.folder_check import check_folder
from megatron_fp8rl.runtime.stop import StopRequest

if TYPE_CHECKING:
    from megatron_fp8rl.rollout.fleet import Fleet

_JOBS = {"rl": "rl_loop", "sft": "supervised", "dpo": "dpo", "distill": "distill"}  # the module of each
_WITHOUT_ENGINES = ("sft", "dpo")
_DATA_CHECKED = "FP8RL_DATA_SEEN"  # set for ranks if their data were checked before they were started


def _train(invocation: cli.Invocation) -> int:
    """Warm start if configured, then reinforcement learning."""
    model = invocation.cfg.model
    if model.hf_path is None and not invocation.cfg.warm_start.steps and not model.random:
        return _refuse(
            f"{invocation.config_name} has no weights to start from: set --model.hf_path to a Hugging Face checkpoint, "
            "--warm_start.steps for a warm start, or --model.random True to train random weights"
        )
    return start(invocation.cfg)


def _rl(invocation: cli.Invocation) -> int:
    if invocation.cfg.model.hf_path is None:
        return _refuse(
            "rl starts from trained weights: set --model.hf_path to a Hugging Face checkpoint, "
            "or use the train command, which warm-starts first"
        )
    return start(invocation.cfg, wants_sft=False)


def _refuse(text: str) -> int:
    print(text, file=sys.stderr)
    return 2


def start(cfg: RunConfig, *, wants_sft: bool = True, wants_rl: bool = True, job: str = "rl") -> int:
    """Check model and data, and run the requested programs on every rank; returns the exit status. ``job``: the
    training job that ``wants_rl`` asks for, a key of ``_JOBS``."""
    if wants_rl and job != (wanted := job_of(cfg)):
        problem = "with these sources, the configuration is one of another command"
        return _refuse(f"--algo.loss = {cfg.algo.loss!r}: {problem}. Use the command {wanted}.")
    if find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    is_checked = os.environ.get("RANK", "0") != "0" or _DATA_CHECKED in os.environ
    if not is_checked and (status := run_with_status(partial(_check_model, cfg))):
        return status
    if has_to_start_ranks(cfg.parallel):
        if status := run_with_status(partial(check_data, cfg)):
            return status
        os.environ[_DATA_CHECKED] = "1"
    return on_every_rank(cfg, partial(_run, cfg, wants_sft=wants_sft, wants_rl=wants_rl, job=job))


def _check_model(cfg: RunConfig) -> None:
    """Check a resume and the folder of the model, and print a line about keys of config.json that are ignored."""
    from megatron_fp8rl.data import run_folder

    if errors := run_folder.in_use(cfg) or run_folder.resume_violations(cfg):
        raise ConfigError(errors)
    ignored = check_folder(cfg.model, None if cfg.model.hf_path is None else Path(cfg.model.hf_path))
    if any(source.teacher for source in cfg.data.environments):
        teachers.check(cfg, cfg.model.hf_path or cfg.data.tokenizer)
    if ignored and cfg.observe.display != "none":
        print(ignored, flush=True)


def _run(cfg: RunConfig, *, wants_sft: bool, wants_rl: bool, job: str) -> None:
    """Collective: run this rank's part of the requested programs."""
    stop = StopRequest.install()  # before starting anything that a signal to the whole job could kill
    with contextlib.ExitStack() as stack:
        stack.enter_context(stop.watched(cfg.engine, longest_wait_s(cfg.engine)))
        stack.enter_context(stop.errors_noted())
        fleet = (
            _prepare(cfg, stack, wants_rl and job not in _WITHOUT_ENGINES)
            if os.environ.get("RANK", "0") == "0"
            else None
        )
        with span("start_imports"):  # while engines start
            import torch

            from megatron_fp8rl.trainer.compat import megatron_on_cpu

            megatron_on_cpu.install()
            from megatron_fp8rl import sft_loop
            from megatron_fp8rl.data.model_dir import model_dir
            from megatron_fp8rl.diagnose.explain_mismatch import explain
            from megatron_fp8rl.kernels import c_code
            from megatron_fp8rl.preflight.host_memory import host_memory
            from megatron_fp8rl.runtime.colocation import wait_and_sleep
            from megatron_fp8rl.trainer.parallel import Parallel

            if torch.cuda.is_available():
                from megatron_fp8rl.kernels import deep_gemm
                from megatron_fp8rl.kernels.triton import cache

                deep_gemm.import_parents()
                cache.watch()
            elif os.environ.get("RANK", "0") == "0":
                threading.Thread(target=c_code.compile_all, daemon=True).start()
            run = importlib.import_module(f"megatron_fp8rl.{_JOBS[job]}").run if wants_rl else None
        parallel = Parallel.init(cfg.parallel, deadline_s=longest_wait_s(cfg.engine))
        stack.callback(parallel.close)
        host = host_memory(cfg, parallel.device) if wants_rl else None
        if fleet is not None:
            wait_and_sleep(cfg.engine, fleet, stop.is_asked)
        parallel.barrier("model folder")
        stop.at_start(parallel)
        tokenizer_dir = model_dir(cfg)
        if wants_sft and cfg.warm_start.steps and cfg.model.hf_path is None:
            warm_start = sft_loop.run(cfg, parallel, tokenizer_dir, stop)
            cfg = replace(cfg, model=replace(cfg.model, hf_path=str(warm_start)))
        if run is not None:
            engines = {} if job in _WITHOUT_ENGINES else {"fleet": fleet, "explain": explain}
            run(cfg, parallel, tokenizer_dir, stop=stop, host=host, **engines)


def _prepare(cfg: RunConfig, stack: contextlib.ExitStack, wants_engines: bool) -> Fleet | None:
    """Rank 0: lock the run's folder, check the data, and start the engines without waiting for them. Raises ConfigError
    before any engine starts."""
    from megatron_fp8rl.data import run_folder
    from megatron_fp8rl.data.model_dir import model_dir, write_model_dir

    stack.enter_context(run_folder.locked(cfg))
    if _DATA_CHECKED not in os.environ:
        with span("start_data"):
            check_data(cfg)
    stack.callback(write_reports, cfg)  # also after an error
    write_model_dir(cfg)
    if not wants_engines or cfg.sampling.replay is not None:
        return None
    with span("start_imports"):
        from megatron_fp8rl.rollout import reward_server
        from megatron_fp8rl.rollout.fleet import Fleet

        fleet = stack.enter_context(Fleet.start(cfg, model_dir(cfg), cfg.run_dir, wait=False))
    stack.enter_context(reward_server.serving(cfg))
    return fleet


TRAIN = cli.Command(
    name="train",
    summary="warm start if the configuration has one, then reinforcement learning",
    run=_train,
    reads_data=True,
)
DEMO = cli.Command(
    name="demo",
    summary="train the tiny mixture of experts: a first run on any machine",
    run=_train,
    default_config="demo",
    reads_data=True,
)
RL = cli.Command(name="rl", summary="reinforcement learning from a Hugging Face checkpoint", run=_rl, reads_data=True)
