"""Lock the folder of a run, on trainer rank 0, and check its content.

Stopped processes (debugger, SIGSTOP) can outlive a killed run. All its processes inherit an environment variable with
the folder's name, so that the next run in the folder can kill them.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron_fp8rl.config import ConfigError, RunConfig, Violation
from megatron_fp8rl.data import folder_lock, resumed_config
from megatron_fp8rl.data.checkpoint_dir import STATE_FILE, complete, damaged, latest, make_folder
from megatron_fp8rl.data.folder_lock import RUN_LOCK, InUseError
from megatron_fp8rl.net import sockets

_MARKS = (RUN_LOCK, "versions.json", "launch/jobs", "launch/jobs.jsonl")  # every run folder contains at least one
_HARMLESS = ("logs",)  # may exist before a run
_OWNER = "FP8RL_RUN_DIR"  # environment variable of all processes of a run on its host: the folder


def violations(cfg: RunConfig) -> list[Violation]:
    """Reasons not to use the folder: no run wrote it, or a run would overwrite its checkpoints."""
    folder = Path(cfg.run_dir)
    if not folder.is_dir():
        return []
    others = sorted(entry.name for entry in folder.iterdir() if entry.name not in _HARMLESS)
    if others and not any((folder / mark).exists() for mark in _MARKS):
        some = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        problem = f"{folder} is not empty and not a run folder: it contains {some}"
        return [Violation("--output_dir", cfg.run_dir, problem, "Name another folder")]
    if not cfg.checkpoint.resume:
        for part in (folder / "checkpoints", folder / "warm_start" / "checkpoints"):
            if kept := [*complete(part), *damaged(part)]:
                problem = f"{part} contains {kept[-1].name}, which a run from step 0 would overwrite"
                remedy = "Name another output_dir, or remove the checkpoints"
                return [Violation("--checkpoint.resume", False, problem, remedy)]
    return []


def resume_violations(cfg: RunConfig) -> list[Violation]:
    """Changed fields that a training run which resumes in the folder could not apply."""
    folder = Path(cfg.run_dir)
    if not cfg.checkpoint.resume:
        return []
    newest = latest(folder / "checkpoints")
    if newest is None:
        return resumed_config.finished_warm_start_refusals(folder / "warm_start", cfg)
    state = json.loads((newest / STATE_FILE).read_text())
    if cfg.warm_start.steps and cfg.model.hf_path is None:  # its weights are in the folder of the run
        cfg = replace(cfg, model=replace(cfg.model, hf_path=state["config"]["model"]["hf_path"]))
    errors = resumed_config.refusals(state["config"], cfg, newest, steps=state["step"])
    if cfg.algo.kl_coef > 0 and cfg.model.hf_path is None and not state.get("has_reference"):
        problem = f"needs a reference model, which {newest} does not have: the run started from random weights with 0"
        remedy = "Set 0, or name another output_dir for a new run"
        errors.append(Violation("--algo.kl_coef", cfg.algo.kl_coef, problem, remedy))
    return errors


@contextlib.contextmanager
def locked(cfg: RunConfig) -> Iterator[None]:
    """Lock the folder for a training run. Raises ConfigError if it cannot be used or resumed, or is in use."""
    if errors := violations(cfg) or resume_violations(cfg):
        raise ConfigError(errors)
    folder = Path(cfg.run_dir)
    make_folder(folder)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(folder_lock.hold(folder / RUN_LOCK, is_restart="LAUNCH_DIR" in os.environ))
        except InUseError as error:
            raise ConfigError([_in_use(cfg, str(error))]) from error
        except OSError as error:
            problem = f"{folder / RUN_LOCK} cannot be written: {error.strerror}"
            remedy = "Check permissions, free space and quota"
            raise ConfigError([Violation("--output_dir", cfg.run_dir, problem, remedy)]) from error
        _kill_left_processes(str(folder.resolve()))
        sockets.remove_stale()
        os.environ[_OWNER] = str(folder.resolve())
        try:
            yield
        finally:
            os.environ.pop(_OWNER)
            sockets.remove_stale()


def in_use(cfg: RunConfig) -> list[Violation]:
    """An error if another process of this machine trains in the folder, found without waiting or writing."""
    owner = folder_lock.owner(Path(cfg.run_dir) / RUN_LOCK, waits=False)
    return [_in_use(cfg, owner)] if owner else []


def _in_use(cfg: RunConfig, owner: str) -> Violation:
    remedy = "Wait for it or stop it, or name another output_dir"
    return Violation("--output_dir", cfg.run_dir, f"another run uses it: {owner}", remedy)


def _kill_left_processes(folder: str) -> None:
    """Kill processes on this host that an earlier run in the folder started."""
    import psutil

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(_OWNER) == folder:
                process.kill()
